"""Batch arithmetic: how many samples a step reads, who forwards them, and what the learning rate makes of it."""

import math
from dataclasses import dataclass

from accel_train.recipe import Batch
from accel_train.recipe_optimizer import LRScaling
from accel_train.state import Choice

DEFAULT_GLOBAL_BATCH_SIZE = 32


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a run: global = per device x accumulation x processes, always."""

    global_batch_size: int
    """Samples per step over all processes."""
    per_device_batch_size: int
    """Samples one process forwards at once (a micro-batch)."""
    gradient_accumulation_steps: int
    """Micro-batches per process and step."""
    per_device_eval_batch_size: int
    world_size: int
    """Processes that read different samples: all of them, but for tensor and sequence parallelism."""
    reason: str


def is_open(batch: Batch) -> bool:
    """Whether a recipe leaves it to the run how the global batch is cut into micro-batches."""
    return batch.per_device_batch_size == "auto" and batch.gradient_accumulation_steps == "auto"


def resolve_batch(
    batch: Batch, world_size: int, num_sharing: int = 1, shared_by: str = "parallel.tp_size"
) -> BatchSizes:
    """Fill in the batch sizes that the recipe leaves open, and refuse those that do not multiply out.

    Any two of global_batch_size, per_device_batch_size and gradient_accumulation_steps give the third. One alone:
    accumulation is 1 (until a run has looked for the largest micro-batch that fits, `batch_search.py`); without
    per_device_batch_size, the global size is 32 unless it is said. Of `num_sharing` processes that read the same samples
    (tensor and sequence parallelism) one counts; `shared_by` is the setting that makes them.

    Raises:
        ValueError: the sizes contradict each other or do not divide; the text has the nearest ones that do.
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
        per_device = _per_device_size(total, accumulation, world_size, is_default)
    elif accumulation is None:
        accumulation = _accumulation_steps(total, per_device, world_size)
    elif total != per_device * accumulation * world_size:
        raise _contradiction(total, per_device, accumulation, world_size)

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


def scale_learning_rate(learning_rate: float, scaling: LRScaling, sizes: BatchSizes) -> Choice[float]:
    """The peak learning rate for this global batch; the reason is the formula with its numbers.

    linear: learning_rate x global_batch_size / base_batch_size (Goyal et al. 2017, arXiv 1706.02677; for SGD).
    sqrt: learning_rate x sqrt(global_batch_size / base_batch_size) (Krizhevsky 2014, arXiv 1404.5997; for Adam:
    Malladi et al. 2022, arXiv 2205.10287). none: as written.
    """
    base = scaling.base_batch_size
    product = (
        f"{sizes.per_device_batch_size} per device x {sizes.gradient_accumulation_steps} accumulation x "
        f"{_processes(sizes.world_size)}"
    )
    if scaling.rule == "linear":
        value = learning_rate * sizes.global_batch_size / base
        return Choice(value, f"linear: {learning_rate:g} x ({product}) / {base} = {value:g}")
    if scaling.rule == "sqrt":
        value = learning_rate * math.sqrt(sizes.global_batch_size / base)
        return Choice(value, f"sqrt: {learning_rate:g} x sqrt(({product}) / {base}) = {value:g}")
    return Choice(
        learning_rate,
        f"none: {learning_rate:g} as written, not scaled with the global batch of {sizes.global_batch_size} ({product})",
    )


def _per_device_size(total: int, accumulation: int, world_size: int, is_default: bool) -> int:
    unit = world_size * accumulation
    if total % unit == 0:
        return total // unit
    said = f"global_batch_size={total}" + (" (the default)" if is_default else "")
    if accumulation == 1:
        parts = _processes(world_size)
    else:
        parts = f"{_processes(world_size)} x gradient_accumulation_steps {accumulation} = {unit}"
    remedies = [_alternatives(_nearest_multiples(total, unit))]
    world_sizes = [w for w in divisors(total) if total % (w * accumulation) == 0]
    if world_sizes:
        remedies.append(f"or run on {_alternatives(world_sizes)} processes")
    if accumulation > 1 and total % world_size == 0:
        steps = _nearest_divisors(total // world_size, accumulation)
        remedies.append(f"or gradient_accumulation_steps {_alternatives(steps)}")
    raise ValueError(f"{said} is not divisible by {parts}; try {', '.join(remedies)}")


def _accumulation_steps(total: int, per_device: int, world_size: int) -> int:
    unit = world_size * per_device
    if total % unit == 0:
        return total // unit
    remedies = [_alternatives(_nearest_multiples(total, unit))]
    if total % world_size == 0:
        sizes = _nearest_divisors(total // world_size, per_device)
        remedies.append(f"or per_device_batch_size {_alternatives(sizes)}")
    raise ValueError(
        f"global_batch_size={total} is not divisible by {_processes(world_size)} x per_device_batch_size {per_device} "
        f"= {unit}; try {', '.join(remedies)}"
    )


def _contradiction(total: int, per_device: int, accumulation: int, world_size: int) -> ValueError:
    product = per_device * accumulation * world_size
    return ValueError(
        f"global_batch_size={total} is not per_device_batch_size {per_device} x gradient_accumulation_steps "
        f"{accumulation} x {_processes(world_size)} = {product}; set global_batch_size to {product}, "
        "or leave one of the three out"
    )


def _nearest_multiples(number: int, unit: int) -> list[int]:
    below = number // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """The largest divisor below `wanted` and the smallest above it, where there are such."""
    all_of_them = divisors(number)
    below, above = [d for d in all_of_them if d < wanted], [d for d in all_of_them if d > wanted]
    return below[-1:] + above[:1]


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _alternatives(numbers: list[int]) -> str:
    """`1, 2 or 4`."""
    *rest, last = [str(number) for number in numbers]
    return f"{', '.join(rest)} or {last}" if rest else last


def _processes(world_size: int) -> str:
    return f"{world_size} process" + ("" if world_size == 1 else "es")
