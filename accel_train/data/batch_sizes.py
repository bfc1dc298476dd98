"""Batch arithmetic: the samples of a step and their division among processes."""

import math
from dataclasses import dataclass

from accel_train.core.format import format_count
from accel_train.recipe.schema import Batch

DEFAULT_GLOBAL_BATCH_SIZE = 32


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of a run.

    global batch = per-device batch x accumulation steps x processes, always.
    """

    global_batch_size: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    per_device_eval_batch_size: int
    world_size: int
    """Processes that read different samples. Tensor- and sequence-parallel peers count once."""
    reason: str


def is_open(batch: Batch) -> bool:
    """Return whether a recipe leaves the split of the global batch into micro-batches to the run."""
    return batch.per_device_batch_size == "auto" and batch.gradient_accumulation_steps == "auto"


def resolve_batch(
    batch: Batch, world_size: int, num_sharing: int = 1, shared_by: str = "parallel.tp_size"
) -> BatchSizes:
    """Return the batch sizes of a recipe, with open sizes filled in.

    Any two of global_batch_size, per_device_batch_size and gradient_accumulation_steps determine the third. If only one
    is set, accumulation is 1 until `batch_search.py` has found the largest micro-batch that fits. The global size is 32
    if neither it nor per_device_batch_size is set. Of `num_sharing` processes that read the same samples (tensor and
    sequence parallelism), one counts. `shared_by` is the setting that makes them share.

    Raises:
        ValueError: the sizes contradict each other or do not divide; the message names the nearest valid sizes.
    """
    assert world_size >= 1, world_size
    assert world_size % num_sharing == 0, (world_size, num_sharing)
    world_size //= num_sharing
    total = batch.global_batch_size
    per_device = None if batch.per_device_batch_size == "auto" else batch.per_device_batch_size
    accumulation = None if batch.gradient_accumulation_steps == "auto" else batch.gradient_accumulation_steps
    is_default = total is None and per_device is None
    if is_default:
        total = DEFAULT_GLOBAL_BATCH_SIZE

    if total is None:
        assert per_device is not None
        accumulation = accumulation or 1
        total = per_device * accumulation * world_size
    elif per_device is None:
        accumulation = accumulation or 1
        default = " (the default)" if is_default else ""
        per_device = _third_size(total, world_size, "gradient_accumulation_steps", accumulation, default)
    elif accumulation is None:
        accumulation = _third_size(total, world_size, "per_device_batch_size", per_device)
    elif total != per_device * accumulation * world_size:
        product = per_device * accumulation * world_size
        raise ValueError(
            f"global_batch_size={total} is not per_device_batch_size {per_device} x gradient_accumulation_steps "
            f"{accumulation} x {_processes(world_size)} = {product}; set global_batch_size to {product}, "
            "or leave one of the three out"
        )

    eval_size = batch.per_device_eval_batch_size
    reason = f"{total} = {per_device} per device x {accumulation} accumulation x {_processes(world_size)}"
    if num_sharing > 1:
        reason += (
            f", each with {num_sharing - 1} more that read{'s' * (num_sharing == 2)} the same samples ({shared_by})"
        )
    return BatchSizes(
        global_batch_size=total,
        per_device_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=2 * per_device if eval_size == "auto" else eval_size,
        world_size=world_size,
        reason=reason + (f"; {total} is the default" if is_default else ""),
    )


def _third_size(total: int, world_size: int, setting: str, given: int, default: str = "") -> int:
    """Return the third size for a global batch if `setting` is given.

    Raises:
        ValueError: the sizes do not divide; the message names the nearest sizes that do.
    """
    unit = world_size * given
    if total % unit == 0:
        return total // unit
    factors, below = _processes(world_size), total // unit * unit
    remedies = [_alternatives([size for size in (below, below + unit) if size > 0])]
    if setting == "gradient_accumulation_steps":
        world_sizes = [w for w in divisors(total) if total % (w * given) == 0]
        remedies += [f"or run on {_alternatives(world_sizes)} processes"] if world_sizes else []
    if setting == "per_device_batch_size" or given > 1:
        factors += f" x {setting} {given} = {unit}"
        fitting = divisors(total // world_size) if total % world_size == 0 else []
        nearest = [size for size in fitting if size < given][-1:] + [size for size in fitting if size > given][:1]
        remedies += [f"or {setting} {_alternatives(nearest)}"] if nearest else []
    raise ValueError(f"global_batch_size={total}{default} is not divisible by {factors}; try {', '.join(remedies)}")


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _alternatives(numbers: list[int]) -> str:
    """Return numbers as text: `1, 2 or 4`."""
    *rest, last = [str(number) for number in numbers]
    return f"{', '.join(rest)} or {last}" if rest else last


def _processes(world_size: int) -> str:
    return format_count(world_size, "process", "processes")
