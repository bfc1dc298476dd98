"""Memory of a process and traffic of a step under FSDP2, with and without tensor parallelism."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from accel_train.model.memory_estimate import MemoryPart
from accel_train.model.weights import FP32_BYTES, ModelWeights, WeightGroup, in_rounds
from accel_train.plan.place import Layout
from accel_train.plan.traffic import Collective, Kind, Phase, Ring


def memory(
    whole: Mapping[str, MemoryPart], layout: Layout, weights: ModelWeights, compute_bytes: int
) -> Iterator[MemoryPart]:
    """Yield the memory parts of the first process.

    It holds the most, because fsdp2 deals out whole rows and starts there.
    """
    size, split = layout.shard_size, layout.tp_size
    dealt = f"1/{size} of the rows" if split == 1 else f"of split layers 1/{split}"
    dealt += f", and of that 1/{size} of the rows" if split > 1 and size > 1 else ""
    trained = weights.part_numel(size, trainable_only=True)
    trainable = (whole["gradients"].num_bytes or 0) // 4
    sizes = {"parameters": weights.part_bytes(size), "gradients": 4 * trained}
    for name in ("optimizer", "averaged weights"):
        if name in whole:
            sizes[name] = (whole[name].num_bytes or 0) * trained // trainable if trainable else 0
    for name, num_bytes in sizes.items():
        share = dealt if split > 1 or name in ("parameters", "gradients") else f"1/{size}"
        part = MemoryPart(name, num_bytes, "arithmetic", f"{whole[name].how}, {share}")
        if layout.strategy.section.cpu_offload:
            how = f"in host memory (cpu_offload): {num_bytes / 2**20:,.1f} MiB of a process"
            part = replace(part, num_bytes=0, how=how)
        yield part
    if size > 1:
        yield from _gathered(layout, weights, weights.gathered_bytes(compute_bytes))


def matrix_collectives(layout: Layout, weights: ModelWeights) -> Iterator[Collective]:
    """Yield Muon's collectives. In each round, every process orthogonalizes one matrix.

    For sharded matrices, one all-to-all sends the parts to that process and another one returns the results. For whole
    matrices (DDP on one machine), an all-gather shares the results. None of these collectives overlaps with computing.
    """
    parts = layout.shard_size * layout.tp_size
    sharing = layout.world_size if layout.strategy.name == "ddp" and layout.num_nodes == 1 else parts
    matrices = [each for block in weights.blocks for each in block.weights if each.trainable and each.row_numel > 1]
    costs = [each.numel * min(each.num_rows, each.row_numel) for each in matrices]
    ring = Ring(sharing, 1, layout.gpus_per_node)
    for some in in_rounds(matrices, costs, sharing) if sharing > 1 else ():
        numels = [each.numel for each in some]
        kind: Kind = "all-to-all" if parts > 1 else "all-gather"
        num_bytes = FP32_BYTES * (sum(numels) // layout.shard_size if parts > 1 else sharing * max(numels))
        for _ in range(2 if parts > 1 else 1):
            yield Collective(kind, num_bytes, ring, "backward", True, False, "updates of matrices, fp32")


def _gathered(layout: Layout, weights: ModelWeights, compute_bytes: int) -> Iterator[MemoryPart]:
    size, reshards = layout.shard_size, layout.strategy.section.reshard_after_forward
    blocks = sorted((size * block.part_numel(size) for block in weights.blocks), reverse=True)
    root = size * weights.root.part_numel(size)
    trained = max((size * block.part_numel(size, trainable_only=True) for block in weights.blocks), default=0)
    trained_root = size * weights.root.part_numel(size, trainable_only=True)
    at_once = blocks[:2] if reshards else blocks
    one, of_weights = (
        "a block",
        f"{len(at_once)} blocks{'' if reshards else ' (reshard_after_forward off)'} and the rest of the model",
    )
    of_gradients = "of 1 block and the rest of the model"
    if not blocks:
        one = "the model"
        of_weights = of_gradients = "all of them, for the model repeats no block"
    each = f"{compute_bytes} bytes each"
    yield MemoryPart("gathered weights", compute_bytes * (root + sum(at_once)), "arithmetic", f"{of_weights}, {each}")
    until = f"{of_gradients}, {each}, until they are reduced"
    yield MemoryPart("whole gradients", compute_bytes * (trained + trained_root), "arithmetic", until)
    reduced = 4 * (trained or trained_root) + 4 * (trained or trained_root) // size
    moving = f"{one}'s weights as they arrive, {one}'s gradients as they leave (fp32)"
    largest = blocks[0] if blocks else root
    yield MemoryPart("collectives", compute_bytes * largest + reduced, "estimate", moving)


def collectives(layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int) -> Iterator[Collective]:
    """Yield the gathers and reductions of all blocks and the rest of the model, in the order of a step.

    The first gather and the last reduction of a backward pass do not overlap with computing.
    """
    size, reshards = layout.shard_size, layout.strategy.section.reshard_after_forward
    if size == 1:
        return
    shard = Ring(size, layout.tp_size, layout.gpus_per_node)
    copies = Ring(layout.num_copies, size, layout.gpus_per_node)
    compute_bytes = weights.gathered_bytes(compute_bytes)
    dtype = "fp32" if compute_bytes == FP32_BYTES else f"{8 * compute_bytes} bits"

    def gather(group: WeightGroup, phase: Phase, hidden: bool) -> Collective:
        num_bytes = compute_bytes * size * group.part_numel(size)
        return Collective("all-gather", num_bytes, shard, phase, False, hidden, f"weights, {dtype}")

    def reduce(group: WeightGroup, hidden: bool) -> Iterator[Collective]:
        part = reduce_bytes * group.part_numel(size, trainable_only=True)
        if part:
            yield Collective("reduce-scatter", part * size, shard, "backward", False, hidden, "gradients, fp32")
        if part and layout.num_copies > 1:
            purpose = "gradients of the parts, fp32"
            yield Collective("all-reduce", part, copies, "backward", False, hidden, purpose)

    yield gather(weights.root, "forward", False)
    for number, block in enumerate(weights.blocks):
        yield gather(block, "forward", number > 0)
    for number, block in reversed(list(enumerate(weights.blocks))):
        if reshards and number < len(weights.blocks) - 1:
            yield gather(block, "backward", True)
        yield from reduce(block, number > 0)
    if reshards and weights.blocks:
        yield gather(weights.blocks[-1], "backward", False)
    yield from reduce(weights.root, False)
