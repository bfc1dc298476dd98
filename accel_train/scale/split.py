"""What neighbours that split a model's layers (tensor parallelism) send each other with every micro-batch.

Counted by the styles of the model's plan, as transformers carries them out: a layer split by rows sums the gradients of its
input over the neighbours, one split by columns sums its output, and nothing of it runs beside computing.
"""

from collections.abc import Iterator

from torch import nn

from accel_train.compiling import repeated_blocks
from accel_train.scale.layout import Layout
from accel_train.scale.traffic import Collective, Kind, Phase, Ring
from accel_train.tensor_parallel import styles_of

ACTIVATIONS = "activations of split layers"
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


def split_collectives(
    model: nn.Module, layout: Layout, num_positions: int, compute_bytes: int, *, checkpointed: bool
) -> tuple[Collective, ...]:
    """Those of a micro-batch of `num_positions` tokens, whose activations have `compute_bytes` a number.

    `checkpointed` blocks do their forward a second time. Left out: gradients of the few weights that all hold and sum.

    Raises:
        ValueError: as `tensor_parallel.styles_of`.
    """
    if layout.tp_size == 1:
        return ()
    ring = Ring(layout.tp_size, 1, layout.gpus_per_node)
    in_blocks = {id(part) for block in repeated_blocks(model) for part in block.modules()}
    found: list[Collective] = []
    for style, module in _split_modules(model, layout.tp_size):
        width_in, width_out = _widths(module)

        def add(kind: Kind, width: int, phase: Phase) -> None:
            size = compute_bytes * num_positions * width
            found.append(Collective(kind, size, ring, phase, False, False, ACTIVATIONS))

        if (kind := _FORWARD.get(style)) is not None:
            add(kind, width_out, "forward")
            if checkpointed and id(module) in in_blocks:
                add(kind, width_out, "backward")
        if (kind := _BACKWARD.get(style)) is not None:
            add(kind, width_in, "backward")
    return tuple(found)


def _split_modules(model: nn.Module, size: int) -> Iterator[tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    for name, style in styles_of(model, size).items():
        if name in modules:
            yield style, modules[name]


def _widths(module: nn.Module) -> tuple[int, int]:
    """Numbers a position, in and out."""
    if isinstance(module, nn.Embedding):
        return 0, module.embedding_dim
    return int(getattr(module, "in_features", 0)), int(getattr(module, "out_features", 0))
