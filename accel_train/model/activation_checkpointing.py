"""Activation checkpointing: select the tensors that the forward pass keeps. The backward pass recomputes the rest."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from accel_train.recipe.schema import Precision

WIDEST = 8
"""Largest ratio of output width to input width at which an output is kept. A wider output, for example an adapter's, is
cheap to recompute.
"""

_aten = torch.ops.aten
_DROPOUT_OF: Mapping[Any, int] = {
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_fused_attention_overrideable.default: 4,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Attention operators of all backends, mapped to the position of `dropout_p` among their arguments."""
_WEIGHT_OF: Mapping[Any, int] = {_aten.mm.default: 1, _aten.addmm.default: 2}
"""Matrix products of linear layers, mapped to the position of the weight (inputs, outputs) among their arguments."""
_OF_DOCUMENTS = "torch_attn._varlen_attn.default"
"""Operator for attention within documents (`kernels/documents.py`). It has no dropout. torch registers it at the first
call.
"""


def checkpoint_activations(model: nn.Module, precision: Precision) -> None:
    """Turn on checkpointing in the blocks of a transformers model, as `precision.gradient_checkpointing` says.

    A model that already checkpoints stays unchanged. A model under a memory budget also stays unchanged, because the
    compiler chooses for it.

    Raises:
        ValueError: the model is not a transformers model with blocks that support checkpointing.
    """
    if precision.recomputed in ("nothing", "budget") or any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    ):
        return
    enable = enable_method(model)
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise ValueError(
            f"precision.gradient_checkpointing={precision.recomputed}: {type(model).__name__} has no blocks that can "
            "be checkpointed, as models of transformers have; set it to off, and call torch.utils.checkpoint in the "
            "model's own forward"
        )
    selects = {"context_fn": partial(create_selective_checkpoint_contexts, keep_or_recompute)}
    enable({"use_reentrant": False, **(selects if precision.recomputed == "selective" else {})})


def enable_method(model: nn.Module) -> Callable[[dict[str, Any] | None], None] | None:
    """Return the model's method that turns on checkpointing, or None. transformers 5.23 renamed this method."""
    old = getattr(model, "gradient_checkpointing_enable", None)
    return getattr(model, "activation_checkpointing_enable", old)


def keep_or_recompute(_: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether `selective` checkpointing saves or recomputes an operator's output.

    It saves attention without dropout, and matrix products whose output is at least as wide as their input. A narrower
    output is either the last one of its block or cheap for its size. The rest of the block does not need the last
    output again. Keys and values of grouped heads are cheap.

    Attention with dropout is recomputed. Skipping it would leave the random generator behind, and the next dropout
    would draw another mask.
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
