"""Activation checkpointing: what a forward keeps for the backward pass, and what that computes again."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from accel_train.recipe.schema import Precision

WIDEST = 8
"""An output is kept up to this multiple of its input's width; wider ones (an adapter's, say) cost little to compute again."""

_aten = torch.ops.aten
_DROPOUT_OF: Mapping[Any, int] = {
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_fused_attention_overrideable.default: 4,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""The attention operators of all backends, and where `dropout_p` stands among their arguments."""
_WEIGHT_OF: Mapping[Any, int] = {_aten.mm.default: 1, _aten.addmm.default: 2}
"""The products of linear layers, and where the weight stands, (inputs, outputs)."""
_OF_DOCUMENTS = "torch_attn._varlen_attn.default"
"""Attention within documents (`kernels/documents.py`), which has no dropout; torch knows it from the first call on."""


def checkpoint_activations(model: nn.Module, precision: Precision) -> None:
    """Let the blocks of a model of transformers keep what `precision.gradient_checkpointing` says; a model that already
    checkpoints is left as it is, and so is every model under a memory budget, which is the compiler's.

    Raises:
        ValueError: the model has no blocks of transformers.
    """
    if precision.recomputed in ("nothing", "budget") or any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    ):
        return
    enable = enable_method(model)
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise ValueError(
            f"precision.gradient_checkpointing={precision.recomputed}: {type(model).__name__} has no blocks that can be checkpointed, "
            "as models of transformers have; set it to off, and call torch.utils.checkpoint in the model's own forward"
        )
    selects = {"context_fn": partial(create_selective_checkpoint_contexts, keep_or_recompute)}
    enable({"use_reentrant": False, **(selects if precision.recomputed == "selective" else {})})


def enable_method(model: nn.Module) -> Callable[[dict[str, Any] | None], None] | None:
    """Return the method of a model of transformers that switches checkpointing on: 5.23 has renamed it."""
    old = getattr(model, "gradient_checkpointing_enable", None)
    return getattr(model, "activation_checkpointing_enable", old)


def keep_or_recompute(_: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return what happens to an operator's output under `selective`.

    Kept are attention and products whose output is at least as wide as their input. A narrower one is the last of its block,
    which nothing in the block needs again, or cheap for its size: keys and values of grouped heads. Attention with dropout is
    computed again: to skip it would leave the generator behind, and the dropout after it would have another mask.
    """
    is_kept = False
    if op in _DROPOUT_OF:
        place = _DROPOUT_OF[op]
        is_kept = kwargs.get("dropout_p", args[place] if len(args) > place else 0.0) == 0
    elif op in _WEIGHT_OF:
        num_inputs, num_outputs = args[_WEIGHT_OF[op]].shape
        is_kept = num_inputs <= num_outputs <= WIDEST * num_inputs
    else:
        is_kept = str(op) == _OF_DOCUMENTS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
