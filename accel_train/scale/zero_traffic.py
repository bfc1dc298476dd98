"""What the processes send each other in a step under DeepSpeed's ZeRO, as `zero.py` configures it; counted on real ones.

Stages 1 and 2 sum whole gradients (DeepSpeed 0.19 keeps a part of what it has summed), and gather what each process has updated.
Stage 3 gathers weights for each micro-batch, and scatters the sums of their gradients.
"""

from collections.abc import Iterator, Sequence

from accel_train.scale.layout import Layout
from accel_train.scale.traffic import FP32_BYTES, Collective, Phase, Ring
from accel_train.scale.weights import ModelWeights, Weight
from accel_train.scale.zero_memory import MAX_LIVE_ELEMENTS
from accel_train.zero import BUCKET_ELEMENTS

PERSISTENT_ELEMENTS = 100_000
"""DeepSpeed's stage3_param_persistence_threshold: weights up to this size are whole on every process between steps."""
GRADIENTS, UPDATED, WEIGHTS = "gradients, fp32", "updated weights, fp32", "weights, fp32"


def zero_collectives(stage: int, layout: Layout, weights: ModelWeights) -> tuple[Collective, ...]:
    """All large collectives of a step; left out, as elsewhere, is what the processes agree with."""
    if layout.world_size == 1:
        return ()
    ring = Ring(layout.world_size, 1, layout.gpus_per_node)
    return tuple(_stage_3(ring, weights) if stage == 3 else _stages_1_and_2(stage, ring, weights))


def _stages_1_and_2(stage: int, ring: Ring, weights: ModelWeights) -> Iterator[Collective]:
    """Nothing runs beside these (overlap_comm is off): a backward pass waits for each bucket."""
    for size in _buckets([each.numel for each in _backward_order(weights)]):
        yield Collective("all-reduce", FP32_BYTES * size, ring, "backward", stage == 1, False, GRADIENTS)
    updated = FP32_BYTES * _padded(weights.trainable_numel, ring.size)
    yield Collective("all-gather", updated, ring, "backward", True, False, UPDATED)


def _stage_3(ring: Ring, weights: ModelWeights) -> Iterator[Collective]:
    """Of a model of more than `MAX_LIVE_ELEMENTS`, weights are let go between forward and backward, and gathered again."""
    phases: tuple[Phase, ...] = ("forward",) if weights.numel <= MAX_LIVE_ELEMENTS else ("forward", "backward")
    for phase in phases:
        for number, group in enumerate(weights.groups):
            large = sum(_padded(each.numel, ring.size) for each in group.weights if each.numel > PERSISTENT_ELEMENTS)
            if large:
                yield Collective("all-gather", FP32_BYTES * large, ring, phase, False, number > 0, WEIGHTS)
    every = [each for group in weights.groups for each in group.weights]
    small = sum(_padded(each.numel, ring.size) for each in every if each.numel <= PERSISTENT_ELEMENTS)
    yield Collective("all-gather", FP32_BYTES * small, ring, "backward", True, False, UPDATED)
    sizes = _buckets([_padded(each.numel, ring.size) for each in _backward_order(weights)])
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        yield Collective("reduce-scatter", FP32_BYTES * size, ring, "backward", False, not last, GRADIENTS)


def _backward_order(weights: ModelWeights) -> list[Weight]:
    groups = (*reversed(weights.blocks), weights.root)
    return [each for group in groups for each in reversed(group.weights) if each.trainable]


def _buckets(sizes: Sequence[int]) -> list[int]:
    """Elements that are summed at once: a bucket is sent before one is put into it that it has no room for."""
    found = [0]
    for size in sizes:
        if found[-1] and found[-1] + size > BUCKET_ELEMENTS:
            found.append(0)
        found[-1] += size
    return [size for size in found if size]


def _padded(numel: int, parts: int) -> int:
    return -(-numel // parts) * parts
