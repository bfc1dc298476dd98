"""Mixed precision of FSDP2: which weights it gathers in 16 bits, and which in fp32."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel_train.model.batch_norm import has_batch_norm
from accel_train.model.weights import fp32_weights, gathers_two_types

_OVERRIDE = "param_dtype_override_fn"
"""Field of the policy that decides by weight (torch 2.15)."""


def cost(precision: str) -> str:
    """Return the effects of gathering weights in 16 bits, in words."""
    said = f"fsdp2 gathers weights in {'bf16' if precision == 'fp8' else precision}, half the traffic of fp32"
    if gathers_two_types():
        return f"{said}. Norms, embeddings, and routers are gathered in fp32 and compute as under ddp"
    return (
        f"{said}. Embeddings and norms then also compute in 16 bits (fp32 under ddp, or with torch 2.15), so losses "
        "deviate 3 to 9 times as much from fp32 (small GPT-2). A model with batch norm is gathered in fp32"
    )


def policy(given: MixedPrecisionPolicy, model: nn.Module) -> tuple[MixedPrecisionPolicy, str]:
    """Return the policy for this model, and a note on weights that it gathers in fp32 against expectation, or "".

    With torch 2.15, weights that autocast does not round stay in fp32, and autocast casts the inputs of each layer, as
    under DDP. FSDP2 would round the inputs of each block.
    """
    if gathers_two_types():
        kept = set(map(id, fp32_weights(model)))

        def dtype_of(parameter: nn.Parameter) -> torch.dtype | None:
            return parameter.dtype if id(parameter) in kept else None

        return replace(given, cast_forward_inputs=False, **{_OVERRIDE: dtype_of}), ""  # type: ignore[arg-type]
    if has_batch_norm(model):
        # Autocast casts the weights, as under DDP.
        return MixedPrecisionPolicy(), "; weights are gathered in fp32, because batch norm does not take 16-bit weights"
    return given, ""
