"""Memory of a process and traffic of a step under DDP: every process holds the whole model."""

from collections.abc import Iterator, Mapping

from accel_train.model.memory_estimate import MemoryPart
from accel_train.model.weights import ModelWeights, Weight
from accel_train.plan.place import Layout
from accel_train.plan.traffic import Collective, Ring

BUCKET_BYTES = 25 * 2**20
"""Size of DDP's buckets (bucket_cap_mb), in bytes. The weight that reaches this size completes a bucket."""


def memory(
    whole: Mapping[str, MemoryPart], layout: Layout, weights: ModelWeights, compute_bytes: int
) -> Iterator[MemoryPart]:
    """Yield the memory parts of a process that holds the `whole` model."""
    yield from (whole[name] for name in ("parameters", "gradients", "optimizer", "averaged weights") if name in whole)
    if layout.world_size > 1:
        how = "the gradients lie in DDP's buckets (gradient_as_bucket_view): no others"
        yield MemoryPart("DDP buckets", 0, "arithmetic", how)


def collectives(layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int) -> Iterator[Collective]:
    """Yield a reduction for each bucket, starting with the last block's gradients.

    The last bucket does not overlap with computing.
    """
    ring = Ring(layout.world_size, 1, layout.gpus_per_node)
    sizes = [0]
    for weight in backward_order(weights):
        if sizes[-1] >= BUCKET_BYTES:
            sizes.append(0)
        sizes[-1] += reduce_bytes * weight.numel
    for number, size in enumerate(sizes):
        if size and layout.world_size > 1:
            yield Collective("all-reduce", size, ring, "backward", True, number < len(sizes) - 1, "gradients, fp32")


def backward_order(weights: ModelWeights) -> list[Weight]:
    """Return the trainable weights in the order in which a backward pass computes their gradients."""
    groups = (*reversed(weights.blocks), weights.root)
    return [each for group in groups for each in reversed(group.weights) if each.trainable]
