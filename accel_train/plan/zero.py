"""Memory of a process and traffic of a step under DeepSpeed's ZeRO, with fp32 weights and autocast.

The formulas were counted in real runs. Stages 1 and 2 reduce whole gradients; DeepSpeed 0.19 then keeps a part of them.
They gather the weights that each process has updated. Stage 3 gathers weights for each micro-batch, and reduce-scatters
their gradients.
"""

from collections.abc import Iterator, Mapping, Sequence

from accel_train.model.memory_estimate import MemoryPart
from accel_train.model.weights import ModelWeights
from accel_train.parallel.zero import BUCKET_ELEMENTS
from accel_train.plan.place import Layout
from accel_train.plan.traffic import Collective, Phase, Ring, backward_order

MAX_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters: maximum number of elements that stay gathered from forward to backward."""
PERSISTENT_ELEMENTS = 100_000
"""DeepSpeed's stage3_param_persistence_threshold: weights up to this size are whole on every process between steps."""
GRADIENTS, UPDATED, WEIGHTS = "gradients, fp32", "updated weights, fp32", "weights, fp32"


def memory(
    whole: Mapping[str, MemoryPart], layout: Layout, weights: ModelWeights, compute_bytes: int
) -> Iterator[MemoryPart]:
    """Yield the memory parts of a process as DeepSpeed 0.19 holds them between its calls.

    They are weights, gradients, optimizer state, and the buffers of collectives.
    """
    stage, world_size = layout.strategy.section.zero_stage, layout.world_size
    numel, trainable, share = weights.numel, weights.trainable_numel, f"1/{world_size}"
    part, fp32 = -(-trainable // world_size), whole["parameters"].how
    held = (4 * -(-numel // world_size), share) if stage == 3 else (4 * numel, f"whole in ZeRO stage {stage}")
    yield MemoryPart("parameters", held[0], "arithmetic", f"{fp32}, {held[1]}")
    how = f"{fp32}, {share}: DeepSpeed's copy of what is updated here"
    yield MemoryPart("updated weights", 4 * part, "arithmetic", how)
    summed = 4 * trainable if stage == 1 else 0
    how = f"{share}, and until they are reduced the whole" if summed else share
    yield MemoryPart("gradients", summed + 4 * part, "arithmetic", f"{whole['gradients'].how}, {how}")
    moments = (whole["optimizer"].num_bytes or 0) // trainable if trainable else 0
    yield MemoryPart("optimizer", moments * part, "arithmetic", f"{whole['optimizer'].how}, {share}")
    if stage == 3:
        live = min(numel, MAX_LIVE_ELEMENTS)
        why = f"{live:,} elements, 4 bytes each: DeepSpeed keeps up to {MAX_LIVE_ELEMENTS:,} from forward to backward"
        yield MemoryPart("gathered weights", 4 * live, "estimate", why)
    bucket = min(BUCKET_ELEMENTS, trainable)
    yield MemoryPart("collectives", 4 * bucket, "estimate", f"gradients as they leave, {bucket:,} elements at once")


def collectives(layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int) -> Iterator[Collective]:
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


def _stage_3(ring: Ring, weights: ModelWeights) -> Iterator[Collective]:
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
