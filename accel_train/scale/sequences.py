"""What neighbours that split sequences (sequence parallelism) exchange with every micro-batch, and what that takes of memory.

Counted by the calls of DeepSpeed's UlyssesSPAttentionHF: queries, keys and values go from slices of the sequence to slices of
the heads, and what was attended goes back; four all-to-alls a layer, and as many for the gradients. Nothing runs beside them.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from accel_train.memory_estimate import MemoryPart
from accel_train.scale.layout import Layout
from accel_train.scale.traffic import Collective, Phase, Ring

EXCHANGED = "heads for slices of the sequence (parallel.sp_size)"


def sequence_collectives(
    model: nn.Module, layout: Layout, num_positions: int, compute_bytes: int, *, checkpointed: bool
) -> tuple[Collective, ...]:
    """Those of a micro-batch of which a process has `num_positions` tokens, with numbers of `compute_bytes`.

    `checkpointed` blocks do their forward a second time. Left out: positions, a few bytes a layer that DeepSpeed gathers.
    """
    if layout.sp_size == 1:
        return ()
    ring = Ring(layout.sp_size, 1, layout.gpus_per_node)
    sizes = [compute_bytes * num_positions * width for width in _widths(model, layout.sp_size)]
    phases: tuple[Phase, ...] = ("forward", "backward", *(("backward",) if checkpointed else ()))
    return tuple(
        Collective("all-to-all", size, ring, phase, False, False, EXCHANGED)
        for phase in phases
        for _ in range(_text(model).num_hidden_layers)
        for size in sizes
    )


def with_exchange(
    parts: Sequence[MemoryPart], model: nn.Module, layout: Layout, num_positions: int, compute_bytes: int
) -> list[MemoryPart]:
    """The memory of a process that computes its slices alone, and what is on its way while one layer exchanges them."""
    if layout.sp_size == 1:
        return [*parts]
    size = sum(_widths(model, layout.sp_size)[:3]) * compute_bytes * num_positions
    how = f"queries, keys and values of a layer as they leave and as they arrive, {compute_bytes} bytes each"
    return [*parts, MemoryPart("exchange", 2 * size, "estimate", how)]


def _text(model: Any) -> Any:
    return model.config.get_text_config()


def _widths(model: nn.Module, size: int) -> tuple[int, int, int, int]:
    """Numbers a position: queries, keys, values, and what was attended. Keys are repeated where there are fewer than processes."""
    text = _text(model)
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    of_keys = max(key_heads, size) * head_size
    return heads * head_size, of_keys, of_keys, heads * head_size
