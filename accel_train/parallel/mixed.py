"""Mixed precision of FSDP2: which weights it gathers in 16 bits, and which in fp32."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel_train.model.batch_norm import has_batch_norm
from accel_train.model.weights import fp32_weights, gathers_two_types


def cost(precision: str) -> str:
    """Return the effects of gathering weights in 16 bits, in words."""
    said = f"fsdp2 gathers weights in {'bf16' if precision == 'fp8' else precision}, half the traffic of fp32"
    if gathers_two_types():
        return f"{said}. Norms, embeddings, and routers are gathered in fp32 and compute as under ddp"
    return (
        f"{said}. Embeddings and norms then also compute in 16 bits (fp32 under ddp, or with torch 2.15), so losses "
        "deviate 3 to 9 times as much from fp32 (small GPT-2). A model with batch norm is gathered in fp32"
    )


def policy_of(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the policy that gathers weights in `dtype` (None: as they are) and reduces gradients in fp32.

    FSDP2 never casts inputs. The input of the root is the batch, whose labels, boxes, and scores are not rounded, and
    blocks may take times or coordinates. Autocast casts the inputs of each product, as under DDP.
    """
    return MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)


def policy(given: MixedPrecisionPolicy, model: nn.Module) -> tuple[MixedPrecisionPolicy, str]:
    """Return the policy for this model, and a note on weights that it gathers in fp32 against expectation, or "".

    With torch 2.15, weights that autocast does not round stay in fp32.
    """
    if gathers_two_types():
        kept = fp32_weights(model)

        def dtype_of(parameter: nn.Parameter) -> torch.dtype | None:
            return parameter.dtype if id(parameter) in kept else None

        # The policy has this field from torch 2.15 on.
        return replace(given, param_dtype_override_fn=dtype_of), ""  # type: ignore[call-arg]
    if has_batch_norm(model):
        # Autocast casts the weights, as under DDP.
        return policy_of(None), "; weights are gathered in fp32, because batch norm does not take 16-bit weights"
    return given, ""


def narrow_for_norms(model: nn.Module) -> None:
    """Cast the inputs of norms to the type of their gathered weights, for a CPU. On GPUs, autocast widens both."""
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.register_forward_pre_hook(_narrow)


def _narrow(norm: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next((each.dtype for each in norm.parameters(recurse=False)), torch.float32)
    if dtype == torch.float32:
        return inputs
    return tuple(each.to(dtype) if torch.is_tensor(each) and each.is_floating_point() else each for each in inputs)
