"""Frozen matrices in fewer bits: bf16, or 4 bits by bitsandbytes (nf4, Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314).
"""

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.core.hardware import cpu_flags
from accel_train.core.state import Choice
from accel_train.model.tensors import is_quantised
from accel_train.recipe.schema import Recipe

FLAGS = ("avx512_bf16", "amx_bf16")
"""CPU flags that show native bf16 support; one is enough. Other CPUs emulate bf16 a hundred times slower."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per nf4 weight: 4 bits, an 8-bit scale per 64 weights, and a 32-bit scale per 256 of those scales."""
COMPUTED = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_frozen_dtype(recipe: Recipe, mixed_precision: str, device_type: str) -> Choice[str] | None:
    """Return the type of frozen matrices (fp32, bf16, or nf4) and the reason; None if the recipe freezes nothing."""
    section = recipe.model
    if not section.freezes:
        return None
    if section.frozen_dtype != "auto":
        return Choice(section.frozen_dtype, "as set")
    if mixed_precision != "bf16":
        return Choice("fp32", f"bf16 would round them, for mixed_precision is {mixed_precision}")
    if recipe.parallel.strategy == "deepspeed" or recipe.parallel.tp_size > 1:
        return Choice("fp32", "bf16 is not tested with DeepSpeed and with layers that are split")
    if device_type == "cpu" and not cpu_flags().intersection(FLAGS):
        return Choice("fp32", f"this CPU only emulates bf16 (it has none of {', '.join(FLAGS)})")
    return Choice("bf16", "autocast computes with them in bf16: the same bits in half the memory")


def keep_frozen(
    model: nn.Module, frozen: Collection[str], choice: Choice[str] | None, mixed_precision: str
) -> dict[str, Choice[str]]:
    """Convert the frozen matrices of a model to the chosen type, in place; return the choice with the number of
    weights.

    Embeddings (and an output layer that is tied to one), norms, and biases stay in fp32, because autocast uses them in
    fp32. With nf4, the output layer also stays in fp32. bitsandbytes quantizes when the model is moved to its device. A
    model on the meta device does not change.

    Raises:
        ValueError: nf4 is chosen, and the model has no linear layer to quantize.
    """
    if choice is None:
        return {}
    said = ""
    if choice.value == "nf4":
        layers = _quantised(model, frozen)
        for name, layer in layers.items():
            if not layer.weight.is_meta:
                model.set_submodule(name, _in_4_bits(layer, COMPUTED[mixed_precision]))
        numel = sum(layer.weight.numel() for layer in layers.values())
        said = f": {len(layers)} linear layers of {numel:,} weights, {NF4_BYTES:.2f} bytes each"
    elif choice.value == "bf16":
        weights = _matrices(model, frozen)
        for weight in weights:
            weight.data = weight.data.to(torch.bfloat16)
        said = f"; {sum(map(torch.numel, weights)):,} weights in {len(weights)} matrices"
    return {"model.frozen_dtype": replace(choice, reason=choice.reason + said)}


def _matrices(model: nn.Module, frozen: Collection[str]) -> list[nn.Parameter]:
    """Return the frozen matrices, each once, that only belong to layers which autocast computes in 16 bits."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    used_by: dict[int, list[Any]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            used_by.setdefault(id(parameter), []).append(type(module))
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name in frozen and parameter.dim() > 1 and all(kind in kinds for kind in used_by[id(parameter)])
    ]


def _quantised(model: nn.Module, frozen: Collection[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that nf4 quantizes, by name: those with all weights frozen, without the output layer.

    Raises:
        ValueError: the model has no such layer.
    """
    from transformers import PreTrainedModel

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {id(weight) for weight in _matrices(model, frozen)}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    found: dict[str, nn.Linear] = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and id(module.weight) in matrices
        and all(names[id(parameter)] in frozen for parameter in module.parameters(recurse=False))
    }
    if not found:
        raise ValueError(
            "model.frozen_dtype=nf4 quantises frozen layers of torch.nn.Linear, and this model has none (GPT-2's are "
            "Conv1D); set it to auto"
        )
    return found


def _in_4_bits(layer: nn.Linear, compute_dtype: torch.dtype) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    # Create the layer on the meta device. Random initial weights would take numbers from torch's generator.
    new: Any = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=compute_dtype,
        quant_type="nf4",
        device="meta",
    )
    new.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=new)
    new.bias = layer.bias
    # With this flag, bitsandbytes would repack the weights in the first evaluation, and training would continue with
    # them.
    new.support_avx512bf16_for_cpu = False
    new.train(layer.training)
    quantised: nn.Module = new
    return quantised


def in_fp32(model: nn.Module) -> nn.Module:
    """Return a copy in host memory whose weights are all fp32, dequantized as in the forward.

    Adapters are merged into this copy, and it is saved.
    """
    # `deepcopy` takes objects that are already copied from its memo.
    memo: dict[int, Any] = {id(each): each.detach().to("cpu", copy=True) for each in model.buffers()}
    memo |= {id(each): nn.Parameter(_widened(each), each.requires_grad) for each in model.parameters()}
    copied: nn.Module = copy.deepcopy(model, memo)
    for name, module in list(copied.named_modules()):
        if type(module).__name__ == "Linear4bit":
            rows, columns = module.weight.shape
            layer = nn.Linear(columns, rows, bias=module.bias is not None, device="meta")
            layer.weight, layer.bias = module.weight, module.bias
            copied.set_submodule(name, layer.train(module.training))
    return copied


def _widened(parameter: Any) -> Tensor:
    if is_quantised(parameter):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(parameter.data, parameter.quant_state).to("cpu", torch.float32)
    values = parameter.detach().to("cpu", copy=True)
    return values.float() if values.is_floating_point() else values


def bytes_saved_by_nf4(model: nn.Module, frozen: Collection[str]) -> int:
    """Return the bytes that the weights of an fp32 model save once `keep_frozen` has quantized them."""
    return sum(round((4 - NF4_BYTES) * layer.weight.numel()) for layer in _quantised(model, frozen).values())
