"""The memory of one process under DeepSpeed's ZeRO, as `zero.py` configures it: weights in fp32, computed under autocast."""

from collections.abc import Iterator, Mapping

from accel_train.memory_estimate import MemoryPart
from accel_train.scale.weights import ModelWeights
from accel_train.zero import BUCKET_ELEMENTS

MAX_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters: weights that stay gathered from their forward to their backward."""


def zero_memory(
    known: Mapping[str, MemoryPart], stage: int, world_size: int, weights: ModelWeights
) -> Iterator[MemoryPart]:
    """Weights, gradients, optimizer, and what moves between processes; `known` are those of a process that holds all.

    Counted on the tensors that DeepSpeed 0.19 holds between its calls.
    """
    numel, trainable, share = weights.numel, weights.trainable_numel, f"1/{world_size}"
    part = -(-trainable // world_size)
    bucket = 4 * min(BUCKET_ELEMENTS, trainable)
    fp32 = known["parameters"].how
    if stage == 3:
        yield MemoryPart("parameters", 4 * -(-numel // world_size), "arithmetic", f"{fp32}, {share}")
    else:
        yield MemoryPart("parameters", 4 * numel, "arithmetic", f"{fp32}, whole in ZeRO stage {stage}")
    yield MemoryPart(
        "updated weights", 4 * part, "arithmetic", f"{fp32}, {share}: DeepSpeed's copy of what is updated here"
    )
    whole = 4 * trainable if stage == 1 else 0
    how = f"{share}, and until they are reduced the whole" if whole else share
    yield MemoryPart("gradients", whole + 4 * part, "arithmetic", f"{known['gradients'].how}, {how}")
    moments = (known["optimizer"].num_bytes or 0) // trainable if trainable else 0
    yield MemoryPart("optimizer", moments * part, "arithmetic", f"{known['optimizer'].how}, {share}")
    if stage == 3:
        live = min(numel, MAX_LIVE_ELEMENTS)
        why = f"{live:,} elements, 4 bytes each: DeepSpeed keeps up to {MAX_LIVE_ELEMENTS:,} from forward to backward"
        yield MemoryPart("gathered weights", 4 * live, "estimate", why)
    yield MemoryPart("collectives", bucket, "estimate", f"gradients as they leave, {bucket // 4:,} elements at once")
