"""Memory of a process and traffic of a step, by the formulas of each strategy: DDP, FSDP2, and DeepSpeed's ZeRO.

FSDP2's formulas hold with and without tensor parallelism. ZeRO's were counted in real runs, with fp32 weights and
autocast. Stages 1 and 2 reduce whole gradients; DeepSpeed 0.19 then keeps a part of them. They gather the weights that
each process has updated. Stage 3 gathers weights for each micro-batch, and reduce-scatters their gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from accel_train.model.fake_step import OF_FSDP2
from accel_train.model.memory_estimate import MemoryPart, total_bytes
from accel_train.model.weights import FP32_BYTES, ModelWeights, WeightGroup, in_shares
from accel_train.parallel.zero import BUCKET_ELEMENTS
from accel_train.plan.place import Layout
from accel_train.plan.traffic import Collective, Kind, Phase, Ring, backward_order

Collectives = Iterator[Collective]

BUCKET_BYTES = 25 * 2**20
"""DDP's buckets (bucket_cap_mb): one is full with the weight that makes it as large, or larger."""
FIRST_BUCKET_BYTES = 2**20
"""Size of DDP's first bucket, so that reducing starts early."""
FRAGMENTATION = 0.05
"""Assumed fraction of temporary memory in a step that is lost between the allocator's blocks."""
NCCL_BUFFER_BYTES = 24 * 2 * 4 * 2**20
"""Estimated bytes of one communicator: 24 channels, each with two neighbors and NCCL_BUFFSIZE (4 MiB)."""
PROCESS_BYTES = 430 * 2**20
"""Bytes of a CPU process without its tensors: interpreter and libraries.

Measured as resident memory on Linux after ten steps of a 6 MiB model. A single process took 428 MiB, and one of two
processes took 432 MiB. Versions: Python 3.11, torch 2.13 (CPU), transformers 5.23.
"""
COMES_AND_GOES = frozenset({"activations", "logits", "exchange", "gathered weights", "whole gradients", "collectives"})
UNCHANGED = ("activations", "logits", "exchange", "CUDA context")
MAX_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters: maximum number of elements that stay gathered from forward to backward."""
PERSISTENT_ELEMENTS = 100_000
"""DeepSpeed's stage3_param_persistence_threshold: weights up to this size are whole on every process between steps."""
GRADIENTS, UPDATED, WEIGHTS = "gradients, fp32", "updated weights, fp32", "weights, fp32"


def _ddp_memory(
    whole: Mapping[str, MemoryPart], layout: Layout, weights: ModelWeights, num_trainable: int, *, accumulates: bool
) -> Iterator[MemoryPart]:
    """Yield the parts of a process under DDP, which holds the `whole` model."""
    yield from (whole[name] for name in ("parameters", "gradients", "optimizer", "averaged weights") if name in whole)
    if layout.world_size > 1:
        how = "the gradients themselves lie in the buckets (gradient_as_bucket_view)"
        if accumulates:
            how = "4 bytes each (fp32): gradients of earlier micro-batches do not lie in the buckets"
        num_bytes = FP32_BYTES * weights.trainable_numel if accumulates else 0
        yield MemoryPart("DDP buckets", num_bytes, "arithmetic", how)


def _ddp_collectives(layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int) -> Collectives:
    """Yield a reduction per bucket of DDP: the last block's gradients come first; nothing overlaps the last bucket."""
    ring = Ring(layout.world_size, 1, layout.gpus_per_node)
    sizes = [0]
    for weight in backward_order(weights):
        if sizes[-1] >= (FIRST_BUCKET_BYTES if len(sizes) == 1 else BUCKET_BYTES):
            sizes.append(0)
        sizes[-1] += reduce_bytes * weight.numel
    for number, size in enumerate(sizes):
        if size and layout.world_size > 1:
            yield Collective("all-reduce", size, ring, "backward", True, number < len(sizes) - 1, "gradients, fp32")


def _fsdp2_memory(
    whole: Mapping[str, MemoryPart], layout: Layout, weights: ModelWeights, num_trainable: int, *, accumulates: bool
) -> Iterator[MemoryPart]:
    """Yield the memory parts of the first process.

    It holds the most, because fsdp2 deals out whole rows and starts there.
    """
    size, split = layout.shard_size, layout.tp_size
    dealt = f"1/{size} of the rows" if split == 1 else f"1/{split} of split layers"
    dealt += f", and 1/{size} of their rows" if split > 1 and size > 1 else ""
    trained = weights.part_numel(size, trainable_only=True)
    sizes = {"parameters": weights.part_bytes(size), "gradients": whole["gradients"].num_bytes}
    for name in ("optimizer", "averaged weights"):
        if name in whole:
            sizes[name] = (whole[name].num_bytes or 0) * trained // num_trainable if num_trainable else 0
    for name, num_bytes in sizes.items():
        share = dealt if split > 1 or name in ("parameters", "gradients") else f"1/{size}"
        part = MemoryPart(name, num_bytes, "arithmetic", f"{whole[name].how}, {share}")
        if layout.strategy.section.cpu_offload:
            on_host = 4 * trained if name == "gradients" else num_bytes or 0
            how = f"in host memory (cpu_offload): {on_host / 2**20:,.1f} MiB of a process"
            part = replace(part, num_bytes=0, how=how)
        yield part
    yield from (whole[name] for name in OF_FSDP2 if name in whole)


def matrix_collectives(layout: Layout, weights: ModelWeights, dtype: str) -> Collectives:
    """Yield Muon's collectives. In each stage, every process orthogonalizes its share of the matrices, in `dtype`.

    For sharded matrices, one all-to-all sends the parts to that process and another one returns the results. For whole
    matrices (DDP), an all-gather among the processes of a machine shares the results. None of these collectives
    overlaps with computing.
    """
    parts = layout.shard_size * layout.tp_size
    kind: Kind = "all-to-all" if parts > 1 else "all-gather"
    sharing = layout.gpus_per_node if layout.strategy.name == "ddp" else parts
    matrices = [each for block in weights.blocks for each in block.weights if each.trainable and each.row_numel > 1]
    # Most matrices are split.
    shapes = [(each.num_rows * layout.tp_size, each.row_numel) for each in matrices]
    ring = Ring(sharing, 1, layout.gpus_per_node)
    for shares in in_shares(matrices, shapes, sharing) if sharing > 1 else ():
        numels = [sum(each.numel for each in share) for share in shares]
        numel = sum(numels) // layout.shard_size if parts > 1 else sharing * max(numels)
        num_bytes = FP32_BYTES * numel // (2 if dtype == "bf16" else 1)
        for _ in range(2 if parts > 1 else 1):
            yield Collective(kind, num_bytes, ring, "backward", True, False, f"updates of matrices, {dtype}")


def _fsdp2_collectives(layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int) -> Collectives:
    """Yield the gathers and reductions of all groups, in the order of a step.

    The first gathers and the last reductions of a backward pass do not overlap with computing. The embedding's weights
    are not gathered for the backward.
    """
    size, reshards = layout.shard_size, layout.strategy.section.reshard_after_forward
    if size == 1:
        return
    shard = Ring(size, layout.tp_size, layout.gpus_per_node)
    copies = Ring(layout.num_copies, size, layout.gpus_per_node)
    compute_bytes = weights.gathered_bytes(compute_bytes)
    dtype = "fp32" if compute_bytes == FP32_BYTES else f"{8 * compute_bytes} bits"

    def gather(group: WeightGroup, phase: Phase, hidden: bool) -> Collectives:
        if num_bytes := size * group.gathered_part_bytes(size, compute_bytes):
            wide = ", some fp32" if any(each.in_fp32 for each in group.weights) and compute_bytes < FP32_BYTES else ""
            yield Collective("all-gather", num_bytes, shard, phase, False, hidden, f"weights, {dtype}{wide}")

    def reduce(group: WeightGroup, hidden: bool) -> Collectives:
        part = reduce_bytes * group.part_numel(size, trainable_only=True)
        if part:
            yield Collective("reduce-scatter", part * size, shard, "backward", False, hidden, "gradients, fp32")
        if part and layout.num_copies > 1:
            purpose = "gradients of the parts, fp32"
            yield Collective("all-reduce", part, copies, "backward", True, hidden, purpose)

    embedding, head = weights.ends
    for group in (weights.rest, embedding):
        yield from gather(group, "forward", False)
    for number, block in enumerate(weights.blocks):
        yield from gather(block, "forward", number > 0)
    yield from gather(head, "forward", True)
    yield from reduce(head, True)
    for number, block in reversed(list(enumerate(weights.blocks))):
        if reshards and number < len(weights.blocks) - 1:
            yield from gather(block, "backward", True)
        yield from reduce(block, number > 0)
    if reshards and weights.blocks:
        yield from gather(weights.blocks[-1], "backward", False)
    for group in (weights.rest, embedding):
        yield from reduce(group, False)


def _zero_memory(
    whole: Mapping[str, MemoryPart], layout: Layout, weights: ModelWeights, num_trainable: int, *, accumulates: bool
) -> Iterator[MemoryPart]:
    """Yield the memory parts of a process as DeepSpeed 0.19 holds them between its calls.

    They are weights, gradients, optimizer state, and the buffers of collectives.
    """
    stage, world_size = layout.strategy.section.zero_stage, layout.world_size
    numel, trainable, share = weights.numel, weights.trainable_numel, f"1/{world_size}"
    part, fp32 = -(-trainable // world_size), whole["parameters"].how
    held = (4 * -(-numel // world_size), share) if stage == 3 else (4 * numel, f"whole in ZeRO stage {stage}")
    yield MemoryPart("parameters", held[0], "arithmetic", f"{fp32}, {held[1]}")
    how = f"{fp32}, {share}: DeepSpeed's copy of the weights updated here"
    yield MemoryPart("updated weights", 4 * part, "arithmetic", how)
    summed = 4 * trainable if stage == 1 else 0
    how = f"{share}, and the whole until they are reduced" if summed else share
    yield MemoryPart("gradients", summed + 4 * part, "arithmetic", f"{whole['gradients'].how}, {how}")
    moments = (whole["optimizer"].num_bytes or 0) // trainable if trainable else 0
    yield MemoryPart("optimizer", moments * part, "arithmetic", f"{whole['optimizer'].how}, {share}")
    if stage == 3:
        live = min(numel, MAX_LIVE_ELEMENTS)
        why = f"{live:,} elements, 4 bytes each: DeepSpeed keeps up to {MAX_LIVE_ELEMENTS:,} from forward to backward"
        yield MemoryPart("gathered weights", 4 * live, "estimate", why)
    bucket = min(BUCKET_ELEMENTS, trainable)
    yield MemoryPart("collectives", 4 * bucket, "estimate", f"outgoing gradients, {bucket:,} elements at once")


def _zero_collectives(layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int) -> Collectives:
    """Yield all large collectives of a step. All elements are fp32, independent of the compute dtype."""
    ring, stage = Ring(layout.world_size, 1, layout.gpus_per_node), layout.strategy.section.zero_stage
    if stage == 3:
        yield from _stage_3(ring, weights)
        return
    # These do not overlap with computing, because overlap_comm is off. A backward pass waits for each bucket.
    for size in _buckets([each.numel for each in backward_order(weights)]):
        yield Collective("all-reduce", 4 * size, ring, "backward", stage == 1, False, GRADIENTS)
    updated = _padded(weights.trainable_numel, ring.size)
    yield Collective("all-gather", 4 * updated, ring, "backward", True, False, UPDATED)


def _stage_3(ring: Ring, weights: ModelWeights) -> Collectives:
    """Yield the collectives of stage 3.

    A model of more than `MAX_LIVE_ELEMENTS` elements is released between forward and backward, and gathered again.
    """
    phases: tuple[Phase, ...] = ("forward",) if weights.numel <= MAX_LIVE_ELEMENTS else ("forward", "backward")
    for phase in phases:
        for number, group in enumerate(weights.groups):
            large = sum(_padded(each.numel, ring.size) for each in group.weights if each.numel > PERSISTENT_ELEMENTS)
            if large:
                yield Collective("all-gather", 4 * large, ring, phase, False, number > 0, WEIGHTS)
    small = sum(_padded(each.numel, ring.size) for each in weights.weights if each.numel <= PERSISTENT_ELEMENTS)
    yield Collective("all-gather", 4 * small, ring, "backward", True, False, UPDATED)
    sizes = _buckets([_padded(each.numel, ring.size) for each in backward_order(weights)])
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        yield Collective("reduce-scatter", 4 * size, ring, "backward", False, not last, GRADIENTS)


def _buckets(sizes: Sequence[int]) -> list[int]:
    """Return the number of elements in each bucket. A bucket is sent when the next weight does not fit."""
    found = [0]
    for size in sizes:
        if found[-1] and found[-1] + size > BUCKET_ELEMENTS:
            found.append(0)
        found[-1] += size
    return [size for size in found if size]


def _padded(numel: int, parts: int) -> int:
    return -(-numel // parts) * parts


MEMORY = {"ddp": _ddp_memory, "fsdp2": _fsdp2_memory, "deepspeed": _zero_memory}
"""By the name of the strategy (`parallel.strategies`): parts of a process, from those of one that holds all."""
COLLECTIVES = {"ddp": _ddp_collectives, "fsdp2": _fsdp2_collectives, "deepspeed": _zero_collectives}


def collectives(
    layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int = FP32_BYTES
) -> tuple[Collective, ...]:
    """Return all large collectives of a step, without the exchanges of split layers and sequences.

    `traffic.neighbour_collectives` returns those exchanges. `compute_bytes` is the element size of gathered weights:
    2 in mixed precision, otherwise 4. `reduce_bytes` is the element size of reduced gradients: always 4 here, while
    other trainers reduce in 16 bits. Step sync, gradient norm, and checks of replica drift are left out: a few bytes
    per step.
    """
    return tuple(COLLECTIVES[layout.strategy.name](layout, weights, compute_bytes, reduce_bytes))


def spread_memory(
    parts: Sequence[MemoryPart],
    layout: Layout,
    weights: ModelWeights,
    num_trainable: int,
    device_type: str,
    *,
    accumulates: bool,
) -> tuple[MemoryPart, ...]:
    """Return the memory parts of one process in this layout. `parts` are the results of `estimate_memory`."""
    whole = {part.name: part for part in parts}
    found = [*MEMORY[layout.strategy.name](whole, layout, weights, num_trainable, accumulates=accumulates)]
    found += (whole[name] for name in UNCHANGED if name in whole)
    if device_type == "cuda":
        found += _of_cuda(found, layout)
    if device_type == "cpu":
        how = "interpreter and libraries: 428 MiB measured with Python 3.11, torch 2.13, transformers 5.23"
        found.append(MemoryPart("Python and torch", PROCESS_BYTES, "estimate", how))
    return tuple(found)


def _of_cuda(found: Sequence[MemoryPart], layout: Layout) -> Iterator[MemoryPart]:
    moving = total_bytes(part for part in found if part.name in COMES_AND_GOES)
    if layout.world_size > 1:
        groups = 3 if 1 < layout.shard_size < layout.world_size else 1 + (layout.tp_size > 1)
        groups += layout.sp_size > 1
        yield MemoryPart("NCCL buffers", groups * NCCL_BUFFER_BYTES, "estimate", f"{groups} x 24 channels x 2 x 4 MiB")
    lost = None if moving is None else round(FRAGMENTATION * moving)
    yield MemoryPart("fragmentation", lost, "estimate", f"assumed {FRAGMENTATION:.0%} of temporary memory in a step")
