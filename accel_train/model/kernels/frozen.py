"""Frozen matrices in fewer bits: bf16, or 4 bits by bitsandbytes (nf4)."""

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accel_train.core.format import format_count
from accel_train.core.hardware import cpu_flags
from accel_train.core.state import Choice, Choices
from accel_train.model.kernels.nf4 import NF4_BYTES, Nf4Linear, Packed, pack, packed_layers
from accel_train.recipe.schema import Recipe

FLAGS = ("avx512_bf16", "amx_bf16")
"""CPU flags that show native bf16 support; one is enough. Other CPUs emulate bf16 a hundred times slower."""
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
    model: nn.Module,
    frozen: Collection[str],
    choice: Choice[str] | None,
    mixed_precision: str,
    device: torch.device | None = None,
    read: Callable[[nn.Linear], None] | None = None,
    *,
    stays: bool = False,
) -> Choices:
    """Convert the frozen matrices of a model to the chosen type, in place; return the choice with the number of
    weights.

    Embeddings (and an output layer that is tied to one), norms, and biases stay in fp32, because autocast uses them in
    fp32. With nf4, the output layer also stays in fp32. Layers are quantized one at a time on `device` (default: where
    they are), and go back to where they were, unless each `stays`. `read` first gives a layer its values.

    Raises:
        ValueError: nf4 is chosen, and the model has no linear layer to quantize.
    """
    if choice is None:
        return {}
    said = ""
    if choice.value == "nf4":
        layers = _to_quantize(model, frozen)
        for name, layer in layers.items():
            if read is not None:
                read(layer)
            here = layer.weight.device
            there = here if device is None or layer.weight.is_meta else device
            packed = Packed(*(each.to(there if stays else here) for each in pack(layer.weight.to(there))))
            model.set_submodule(name, Nf4Linear(packed, layer.bias, COMPUTED[mixed_precision]).train(layer.training))
        numel = sum(layer.weight.numel() for layer in layers.values())
        said = f": {format_count(len(layers), 'linear layer')} of {numel:,} weights, {NF4_BYTES:.2f} bytes each"
    elif choice.value == "bf16":
        weights = _matrices(model, frozen)
        for weight in weights:
            weight.data = weight.data.to(torch.bfloat16)
        said = f"; {sum(map(torch.numel, weights)):,} weights in {format_count(len(weights), 'matrix', 'matrices')}"
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


def _to_quantize(model: nn.Module, frozen: Collection[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that nf4 quantizes, by name, without the output layer.

    All their weights are frozen, and their matrices have an even number of columns.

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
        and module.in_features % 2 == 0
        and all(names[id(parameter)] in frozen for parameter in module.parameters(recurse=False))
    }
    if not found:
        raise ValueError(
            "model.frozen_dtype=nf4 quantizes frozen layers of torch.nn.Linear, and this model has none (GPT-2's are "
            "Conv1D); set it to auto"
        )
    return found


def in_fp32(model: nn.Module) -> nn.Module:
    """Return a copy in host memory whose weights are all fp32, dequantized as in the forward.

    Adapters are merged into this copy, and it is saved.
    """
    # `deepcopy` takes objects that are already copied from its memo.
    memo: dict[int, Any] = {id(each): each.detach().to("cpu", copy=True) for each in model.buffers()}
    for each in model.parameters():
        is_packed = not each.is_floating_point()
        memo[id(each)] = (
            each if is_packed else nn.Parameter(each.detach().to("cpu", torch.float32, copy=True), each.requires_grad)
        )
    copied: nn.Module = copy.deepcopy(model, memo)
    for name, module in packed_layers(model).items():
        layer = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
        layer.weight = nn.Parameter(module.packed().unpacked().cpu(), requires_grad=False)
        layer.register_parameter("bias", copied.get_submodule(name).bias)  # type: ignore[arg-type]
        copied.set_submodule(name, layer.train(module.training))
    return copied
