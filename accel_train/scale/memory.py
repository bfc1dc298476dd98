"""The memory of one process when the model is spread over several, part by part."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from accel_train.memory_estimate import MemoryPart
from accel_train.recipe import Parallel
from accel_train.scale.layout import Layout
from accel_train.scale.weights import ModelWeights
from accel_train.scale.zero_memory import zero_memory

FRAGMENTATION = 0.05
"""Of what comes and goes in a step, lost between the allocator's blocks: assumed."""
NCCL_BUFFER_BYTES = 24 * 2 * 4 * 2**20
"""Of one communicator: 24 channels, each with two neighbours and NCCL_BUFFSIZE (4 MiB): an estimate."""
PROCESS_BYTES = 430 * 2**20
"""Of a process on CPU beside its tensors: interpreter and libraries. Resident with Python 3.11, torch 2.13 (CPU) and transformers
5.23 on Linux, at the end of ten steps of a model of 6 MiB: 428 MiB alone, 432 as one of two processes."""
COMES_AND_GOES = frozenset({"activations", "logits", "exchange", "gathered weights", "whole gradients", "collectives"})
UNCHANGED = ("activations", "logits", "exchange", "CUDA context")


def spread_memory(
    parts: Sequence[MemoryPart],
    section: Parallel,
    layout: Layout,
    weights: ModelWeights,
    compute_bytes: int,
    device_type: str,
) -> tuple[MemoryPart, ...]:
    """The parts of a process that holds the whole model, as they are where the model is spread, and what this adds.

    Of all processes it is the first one's, which holds most: rows are dealt out whole, beginning there.
    """
    known = {part.name: part for part in parts}
    is_zero, in_parts = (
        section.strategy == "deepspeed" and layout.world_size > 1,
        layout.shard_size * layout.tp_size > 1,
    )
    if is_zero:
        found = [*zero_memory(known, section.zero_stage, layout.world_size, weights)]
    else:
        found = [*(_shards(known, section, layout, weights) if in_parts else _wholes(known))]
    if layout.shard_size > 1:
        found += _gathered(section, layout.shard_size, weights, compute_bytes)
    elif layout.world_size > 1 and not in_parts and not is_zero:
        how = "the gradients lie in DDP's buckets (gradient_as_bucket_view): none beside them"
        found.append(MemoryPart("DDP buckets", 0, "arithmetic", how))
    found += [_upper_bound(known[name], layout) for name in UNCHANGED if name in known]
    if device_type == "cuda":
        found += _of_cuda(found, layout)
    if device_type == "cpu":
        how = "interpreter and libraries: 428 MiB measured with Python 3.11, torch 2.13, transformers 5.23"
        found.append(MemoryPart("Python and torch", PROCESS_BYTES, "estimate", how))
    return tuple(found)


def _wholes(known: dict[str, MemoryPart]) -> Iterator[MemoryPart]:
    yield from (known[name] for name in ("parameters", "gradients", "optimizer", "averaged weights") if name in known)


def _shards(
    whole: dict[str, MemoryPart], section: Parallel, layout: Layout, weights: ModelWeights
) -> Iterator[MemoryPart]:
    size, split = layout.shard_size, layout.tp_size
    dealt = f"1/{size} of the rows" if split == 1 else f"of split layers 1/{split}"
    dealt += f", and of that 1/{size} of the rows" if split > 1 and size > 1 else ""
    held = [weights.part_numel(size, trainable_only=only) for only in (False, True)]
    for name, numel in zip(("parameters", "gradients"), held, strict=True):
        yield _on_host(MemoryPart(name, 4 * numel, "arithmetic", f"{whole[name].how}, {dealt}"), section)
    trainable = (whole["gradients"].num_bytes or 0) // 4
    for name in ("optimizer", "averaged weights"):
        if name in whole:
            num_bytes = (whole[name].num_bytes or 0) // trainable * held[1] if trainable else 0
            how = f"{whole[name].how}, {dealt if split > 1 else f'1/{size}'}"
            yield _on_host(MemoryPart(name, num_bytes, "arithmetic", how), section)


def _upper_bound(part: MemoryPart, layout: Layout) -> MemoryPart:
    """Activations are found for whole layers; what splitting them saves is not modelled."""
    if layout.tp_size == 1 or part.name != "activations":
        return part
    return replace(
        part, how=f"{part.how}, of whole layers: an upper bound, for what splitting them saves is not modelled"
    )


def _on_host(part: MemoryPart, section: Parallel) -> MemoryPart:
    if not section.cpu_offload:
        return part
    mib = (part.num_bytes or 0) / 2**20
    return MemoryPart(part.name, 0, part.kind, f"in host memory (cpu_offload): {mib:,.1f} MiB of a process")


def _gathered(section: Parallel, size: int, weights: ModelWeights, compute_bytes: int) -> Iterator[MemoryPart]:
    compute_bytes = weights.gathered_bytes(compute_bytes)
    blocks = sorted((size * block.part_numel(size) for block in weights.blocks), reverse=True)
    root = size * weights.root.part_numel(size)
    trained = max((size * block.part_numel(size, trainable_only=True) for block in weights.blocks), default=0)
    trained_root = size * weights.root.part_numel(size, trainable_only=True)
    at_once = blocks[:2] if section.reshard_after_forward else blocks
    if blocks:
        off = "" if section.reshard_after_forward else " (reshard_after_forward off)"
        one, of_weights = "a block", f"{len(at_once)} blocks{off} and the rest of the model"
        of_gradients = "of 1 block and the rest of the model"
    else:
        one = "the model"
        of_weights = of_gradients = "all of them, for the model repeats no block"
    each = f"{compute_bytes} bytes each"
    yield MemoryPart("gathered weights", compute_bytes * (root + sum(at_once)), "arithmetic", f"{of_weights}, {each}")
    until = f"{of_gradients}, {each}, until they are reduced"
    yield MemoryPart("whole gradients", compute_bytes * (trained + trained_root), "arithmetic", until)
    largest = blocks[0] if blocks else root
    reduced = 4 * (trained or trained_root) + 4 * (trained or trained_root) // size
    moving = f"{one}'s weights as they arrive, {one}'s gradients as they leave (fp32)"
    yield MemoryPart("collectives", compute_bytes * largest + reduced, "estimate", moving)


def _of_cuda(found: Sequence[MemoryPart], layout: Layout) -> Iterator[MemoryPart]:
    moving = [part.num_bytes for part in found if part.name in COMES_AND_GOES]
    if layout.world_size > 1:
        groups = 3 if 1 < layout.shard_size < layout.world_size else 1 + (layout.tp_size > 1)
        groups += layout.sp_size > 1
        yield MemoryPart("NCCL buffers", groups * NCCL_BUFFER_BYTES, "estimate", f"{groups} x 24 channels x 2 x 4 MiB")
    lost = None if None in moving else round(FRAGMENTATION * sum(size for size in moving if size is not None))
    yield MemoryPart("fragmentation", lost, "estimate", f"assumed {FRAGMENTATION:.0%} of what comes and goes in a step")
