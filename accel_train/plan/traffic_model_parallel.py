"""Traffic in groups of processes that split layers (tensor parallelism) or sequences (sequence parallelism) send each other with every micro-batch.

Layers are counted by the styles of the model's plan, as transformers carries them out: a layer split by rows sums the gradients
of its input over the neighbours, one split by columns sums its output. Sequences are counted by the calls of DeepSpeed's
UlyssesSPAttentionHF: queries, keys and values go from slices of the sequence to slices of the heads, and what was attended goes
back; four all-to-alls a layer, and as many for the gradients. Nothing of it runs beside computing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from accel_train.model.compile import repeated_blocks
from accel_train.model.memory_estimate import MemoryPart
from accel_train.parallel.tensor_parallel import styles_of
from accel_train.plan.place import Layout
from accel_train.plan.traffic import Collective, Kind, Phase, Ring

_FORWARD: dict[str, Kind] = {
    "rowwise": "all-reduce",
    "rowwise_split_input": "all-reduce",
    "embedding_rowwise": "all-reduce",
    "colwise_gather_output": "all-gather",
}
_BACKWARD: dict[str, Kind] = {
    "colwise": "all-reduce",
    "colwise_gather_output": "all-reduce",
    "rowwise_split_input": "all-gather",
}
_Exchange = tuple[Kind, int, Phase]
"""One collective: its kind, its numbers a position, and the pass it is in."""


def neighbour_collectives(
    model: nn.Module, layout: Layout, num_positions: int, compute_bytes: int, *, checkpointed: bool, chunked: bool
) -> tuple[Collective, ...]:
    """Return the collectives of split layers or sequences; a process has `num_positions` tokens, with numbers of `compute_bytes`.

    `checkpointed` blocks do their forward a second time; a `chunked` loss gathers no logits. Left out: gradients of the few
    weights that all hold and sum, and positions, a few bytes a layer that DeepSpeed gathers.

    Raises:
        ValueError: as `tensor_parallel.styles_of`.
    """
    exchanges: Iterable[_Exchange] = ()
    size, purpose = layout.tp_size, "activations of split layers"
    if layout.tp_size > 1:
        exchanges = _of_layers(model, size, checkpointed, of_sums=4 // compute_bytes if chunked else None)
    elif layout.sp_size > 1:
        size, purpose = layout.sp_size, "heads for slices of the sequence (parallel.sp_size)"
        exchanges = _of_sequences(model, size, checkpointed)
    ring = Ring(size, 1, layout.gpus_per_node)
    return tuple(
        Collective(kind, compute_bytes * num_positions * width, ring, phase, False, False, purpose)
        for kind, width, phase in exchanges
    )


def _of_layers(model: Any, size: int, checkpointed: bool, of_sums: int | None) -> Iterator[_Exchange]:
    """A chunked loss sums fp32 numbers, each as large as `of_sums` of the numbers computed in; None: logits are gathered."""
    chunked_head = None if of_sums is None else model.get_output_embeddings()
    in_blocks = {id(part) for block in repeated_blocks(model) for part in block.modules()}
    modules = dict(model.named_modules())
    for name, style in styles_of(model, size).items():
        if (module := modules.get(name)) is None:
            continue
        is_embedding = isinstance(module, nn.Embedding)
        width_in = 0 if is_embedding else int(getattr(module, "in_features", 0))
        width_out = int(getattr(module, "embedding_dim" if is_embedding else "out_features", 0))
        if module is chunked_head and of_sums is not None:
            yield "all-reduce", of_sums, "forward"  # the largest logit of a position
            yield "all-reduce", 3 * of_sums, "forward"  # its sum of exponentials, the logit of its label, the mean
            yield "all-reduce", width_in * of_sums, "forward"  # the gradients are made there
            continue
        if (kind := _FORWARD.get(style)) is not None:
            yield kind, width_out, "forward"
            if checkpointed and id(module) in in_blocks:
                yield kind, width_out, "backward"
        if (kind := _BACKWARD.get(style)) is not None:
            yield kind, width_in, "backward"


def _of_sequences(model: Any, size: int, checkpointed: bool) -> Iterator[_Exchange]:
    phases: tuple[Phase, ...] = ("forward", "backward", "backward") if checkpointed else ("forward", "backward")
    for phase in phases:
        for _ in range(model.config.get_text_config().num_hidden_layers):
            for width in _head_widths(model, size):
                yield "all-to-all", width, phase


def with_exchange(
    parts: Sequence[MemoryPart], model: Any, layout: Layout, num_positions: int, compute_bytes: int
) -> list[MemoryPart]:
    """Return the memory of a process that computes its slices alone, and what is sent while one layer exchanges them."""
    if layout.sp_size == 1:
        return [*parts]
    size = sum(_head_widths(model, layout.sp_size)[:3]) * compute_bytes * num_positions
    how = f"queries, keys and values of a layer as they leave and as they arrive, {compute_bytes} bytes each"
    return [*parts, MemoryPart("exchange", 2 * size, "estimate", how)]


def _head_widths(model: Any, size: int) -> tuple[int, int, int, int]:
    """Return the numbers a position: queries, keys, values, and what was attended. Keys are repeated where there are fewer than processes."""
    text = model.config.get_text_config()
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    of_keys = max(key_heads, size) * head_size
    return heads * head_size, of_keys, of_keys, heads * head_size
