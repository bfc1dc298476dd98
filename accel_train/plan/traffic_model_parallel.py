"""Traffic within groups that split layers (tensor parallelism) or sequences (sequence parallelism), per micro-batch.

Layers are counted by the styles of the model's plan, as transformers applies them. A `colwise` layer sums its input's
gradients over the group, and a `rowwise` layer sums its output. Sequences are counted by the calls of DeepSpeed's
UlyssesSPAttentionHF. Queries, keys and values go from sequence slices to head slices, and the attention output goes
back. These are four all-to-alls per layer, and four more for the gradients. None of this traffic overlaps with
computing.
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
"""One collective: its kind, the elements per position, and its pass."""


def neighbour_collectives(
    model: nn.Module, layout: Layout, num_positions: int, compute_bytes: int, *, checkpointed: bool, chunked: bool
) -> tuple[Collective, ...]:
    """Return the collectives of split layers or sequences in one micro-batch.

    A process has `num_positions` tokens and elements of `compute_bytes`. `checkpointed` blocks repeat their forward
    pass. A `chunked` loss does not gather logits. Left out are the gradients of the few weights that all processes hold
    and sum. Also left out are positions, a few bytes per layer that DeepSpeed gathers.

    Raises:
        ValueError: as for `tensor_parallel.styles_of`.
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
    """Yield the exchanges of split layers.

    `of_sums` is the size of an fp32 sum of a chunked loss, in elements of the compute dtype. None means that logits are
    gathered.
    """
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
            # The largest logit of a position.
            yield "all-reduce", of_sums, "forward"
            # Its sum of exponentials, the logit of its label, and the mean.
            yield "all-reduce", 3 * of_sums, "forward"
            # The chunked loss computes the gradients of its input in the forward pass.
            yield "all-reduce", width_in * of_sums, "forward"
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
    """Return the memory parts of a process with its slices only, and the buffers of one layer's exchange."""
    if layout.sp_size == 1:
        return [*parts]
    size = sum(_head_widths(model, layout.sp_size)[:3]) * compute_bytes * num_positions
    how = f"queries, keys and values of a layer as they leave and as they arrive, {compute_bytes} bytes each"
    return [*parts, MemoryPart("exchange", 2 * size, "estimate", how)]


def _head_widths(model: Any, size: int) -> tuple[int, int, int, int]:
    """Return the elements per position of queries, keys, values, and attention output.

    Keys and values are repeated if there are fewer key heads than processes.
    """
    text = model.config.get_text_config()
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    of_keys = max(key_heads, size) * head_size
    return heads * head_size, of_keys, of_keys, heads * head_size
