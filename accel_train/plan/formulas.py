"""Memory of a process and traffic of a step, by the formulas of each strategy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from accel_train.model.memory_estimate import MemoryPart
from accel_train.model.weights import FP32_BYTES, ModelWeights
from accel_train.plan import fsdp2, zero
from accel_train.plan.place import Layout
from accel_train.plan.traffic import Collective, Ring, backward_order

BUCKET_BYTES = 25 * 2**20
"""DDP's buckets (bucket_cap_mb): one is full with the weight that makes it as large, or larger."""
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


def _ddp_memory(
    whole: Mapping[str, MemoryPart], layout: Layout, weights: ModelWeights, compute_bytes: int
) -> Iterator[MemoryPart]:
    """Yield the parts of a process under DDP, which holds the `whole` model."""
    yield from (whole[name] for name in ("parameters", "gradients", "optimizer", "averaged weights") if name in whole)
    if layout.world_size > 1:
        how = "the gradients lie in DDP's buckets (gradient_as_bucket_view): no others"
        yield MemoryPart("DDP buckets", 0, "arithmetic", how)


def _ddp_collectives(
    layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int
) -> Iterator[Collective]:
    """Yield a reduction per bucket of DDP: the last block's gradients come first; nothing overlaps the last bucket."""
    ring = Ring(layout.world_size, 1, layout.gpus_per_node)
    sizes = [0]
    for weight in backward_order(weights):
        if sizes[-1] >= BUCKET_BYTES:
            sizes.append(0)
        sizes[-1] += reduce_bytes * weight.numel
    for number, size in enumerate(sizes):
        if size and layout.world_size > 1:
            yield Collective("all-reduce", size, ring, "backward", True, number < len(sizes) - 1, "gradients, fp32")


MEMORY = {"ddp": _ddp_memory, "fsdp2": fsdp2.memory, "deepspeed": zero.memory}
"""By the name of the strategy (`parallel.strategies`): parts of a process, from those of one that holds all."""
COLLECTIVES = {"ddp": _ddp_collectives, "fsdp2": fsdp2.collectives, "deepspeed": zero.collectives}


def collectives(
    layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int = FP32_BYTES
) -> tuple[Collective, ...]:
    """Return all large collectives of a step, without the exchanges of split layers and sequences.

    `traffic_model_parallel.py` returns those exchanges. `compute_bytes` is the element size of gathered weights: 2 in
    mixed precision, otherwise 4. `reduce_bytes` is the element size of reduced gradients: always 4 here, while other
    trainers reduce in 16 bits. Step sync, gradient norm, and checks of replica drift are left out: a few bytes per
    step.
    """
    return tuple(COLLECTIVES[layout.strategy.name](layout, weights, compute_bytes, reduce_bytes))


def spread_memory(
    parts: Sequence[MemoryPart], layout: Layout, weights: ModelWeights, compute_bytes: int, device_type: str
) -> tuple[MemoryPart, ...]:
    """Return the memory parts of one process in this layout. `parts` describe a process that holds the whole model."""
    whole = {part.name: part for part in parts}
    found = [*MEMORY[layout.strategy.name](whole, layout, weights, compute_bytes)]
    for name in UNCHANGED:
        if name in whole:
            part = whole[name]
            if layout.tp_size > 1 and name == "activations":
                how = "of whole layers: an upper bound, for what splitting them saves is not modelled"
                part = replace(part, how=f"{part.how}, {how}")
            found.append(part)
    if device_type == "cuda":
        found += _of_cuda(found, layout)
    if device_type == "cpu":
        how = "interpreter and libraries: 428 MiB measured with Python 3.11, torch 2.13, transformers 5.23"
        found.append(MemoryPart("Python and torch", PROCESS_BYTES, "estimate", how))
    return tuple(found)


def _of_cuda(found: Sequence[MemoryPart], layout: Layout) -> Iterator[MemoryPart]:
    moving = [part.num_bytes for part in found if part.name in COMES_AND_GOES]
    if layout.world_size > 1:
        groups = 3 if 1 < layout.shard_size < layout.world_size else 1 + (layout.tp_size > 1)
        groups += layout.sp_size > 1
        yield MemoryPart("NCCL buffers", groups * NCCL_BUFFER_BYTES, "estimate", f"{groups} x 24 channels x 2 x 4 MiB")
    lost = None if None in moving else round(FRAGMENTATION * sum(size for size in moving if size is not None))
    yield MemoryPart("fragmentation", lost, "estimate", f"assumed {FRAGMENTATION:.0%} of what comes and goes in a step")
