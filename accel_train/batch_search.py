"""The largest micro-batch that fits: measured on the device before the first step, agreed on by all processes, remembered.

Only where the recipe leaves both per_device_batch_size and gradient_accumulation_steps open; the global batch stays what it is,
and accumulation follows. Each process measures two small micro-batches, fits a line through their memory, and proves the
largest size that leaves head-room by a real forward and backward. Processes speak to each other before and after, and not in
between, so that one that runs out of memory keeps nobody waiting.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator

from accel_train.batch_record import Remembered, remembered_for
from accel_train.batch_trial import Cost, Trials, room_of
from accel_train.batching import BatchSizes, divisors, is_open, resolve_batch
from accel_train.data_group import data_group, is_sharded
from accel_train.memory import is_out_of_memory
from accel_train.state import Choice

FIRST_SIZES = (2, 4)
"""The line through memory begins with these: batch norm refuses a single sample."""


@dataclass(frozen=True)
class FittedBatch:
    """The batch sizes of a run, and how they were come by."""

    sizes: BatchSizes
    choices: dict[str, Choice[Any]]
    remembered: Remembered | None = None
    """Where the answer is kept; none where there was nothing to look for."""


class Answer(NamedTuple):
    """What one process has found out by itself."""

    size: int
    reason: str


def fit_micro_batch(trials: Trials, sizes: BatchSizes) -> FittedBatch:
    """The largest micro-batch that fits on every process, where the recipe leaves it open; else the sizes as they are.

    Where each process has an answer already, remembered or because it has no limit, nothing is tried.
    """
    recipe, accelerator = trials.recipe, trials.accelerator
    if not is_open(recipe.batch) or trials.data.step_batches is not None:
        return FittedBatch(sizes, {})
    share = sizes.global_batch_size // sizes.world_size
    remembered, answer = _known_answer(trials, sizes, share)
    everywhere = gather(0 if answer is None else answer.size, accelerator)
    if 0 in everywhere:
        if remembered is not None:
            answer = search(trials, share)
        assert answer is not None, "a process without a limit knows at once"
        everywhere = gather(answer.size, accelerator)
        if remembered is not None:
            answer = answer._replace(reason=f"{answer.reason}; {remembered.write(min(everywhere), answer.reason)}")
    assert answer is not None, "everybody has one"
    size, reason = min(everywhere), answer.reason
    if size < answer.size:
        reason = f"process {everywhere.index(size)} holds no more; here {answer.size}: {reason}"
    if size != sizes.per_device_batch_size:
        update = {"global_batch_size": sizes.global_batch_size, "per_device_batch_size": size}
        group = data_group(accelerator)
        batch, processes = recipe.batch.model_copy(update=update), sizes.world_size * group.num_sharing
        sizes = resolve_batch(batch, processes, group.num_sharing, group.shared_by)
    accelerator.gradient_accumulation_steps = sizes.gradient_accumulation_steps
    return FittedBatch(sizes, {"batch.per_device_batch_size": Choice(size, reason)}, remembered)


def _known_answer(trials: Trials, sizes: BatchSizes, share: int) -> tuple[Remembered | None, Answer | None]:
    """What is known without a trial, and where what will be found is kept; no place where there is nothing to find."""
    device, room = trials.device, room_of(trials.device)
    if share == 1:
        return None, Answer(1, "a process has one sample a step")
    if room is None:
        why = "no limit on its address space (ulimit -v)" if device.type == "cpu" else "no say in how much is free"
        return None, Answer(share, f"all of a process's samples at once; not searched, for {device.type} has {why}")
    remembered = remembered_for(
        trials.recipe,
        trials.inner,
        sizes,
        trials.collated(1),
        mixed_precision=trials.accelerator.mixed_precision,
        device=device,
        device_bytes=room.total,
    )
    kept = remembered.read()
    return remembered, None if kept is None else Answer(*kept)


def gather(number: int, accelerator: Accelerator) -> list[int]:
    """A number of each process, on all of them: one small collective."""
    numbers = torch.zeros(accelerator.num_processes, dtype=torch.int64, device=accelerator.device)
    numbers[accelerator.process_index] = number
    if accelerator.num_processes > 1:
        dist.all_reduce(numbers)
    return [int(each) for each in numbers.tolist()]


def search(trials: Trials, share: int) -> Answer:
    """What this process can hold of its `share` of a step, found without a word to any other."""
    name = torch.cuda.get_device_name(trials.device) if trials.device.type == "cuda" else trials.device.type
    try:
        if not is_sharded(trials.accelerator):
            with trials.as_in_a_step():
                if trials.device.type == "cuda":
                    trials.measure(FIRST_SIZES[0])  # loads kernels and workspaces, which stay and are no part of a line
                return _largest(trials, share, trials.measure, 0, f"measured on {name}")
        how = f"estimated for {name}: forwards of a model that is spread over processes wait for each other, so none is tried"
        return _largest(trials, share, trials.estimate, trials.bytes_when_spread(), how)
    except (RuntimeError, MemoryError, TypeError) as error:
        if is_out_of_memory(error):
            return Answer(1, f"measured on {name}: weights, gradients and optimizer leave no room for more")
        if not is_sharded(trials.accelerator):
            raise
        why = str(error).strip().partition("\n")[0][:80]
        return Answer(
            share, f"all of a process's samples at once; not searched: this model does not run without values: {why}"
        )


def _largest(
    trials: Trials, share: int, measure: Callable[[int], Cost | None], num_static_bytes: int, how: str
) -> Answer:
    room = room_of(trials.device)
    assert room is not None, "asked before"
    headroom = math.ceil(trials.recipe.batch.memory_headroom * room.total)
    candidates = divisors(share)
    size, peak = largest_that_fits(candidates, room.free - num_static_bytes - headroom, measure, headroom)
    told = "" if peak is None else f", {_gib(room.total - room.free + num_static_bytes + peak)}"
    larger = [candidate for candidate in candidates if candidate > size]
    more = f"; {larger[0]} would leave less than {trials.recipe.batch.memory_headroom:.0%} free" if larger else ""
    return Answer(size, f"{how}{told} of {_gib(room.total)} GiB{more}")


def largest_that_fits(
    candidates: Sequence[int], room: int, measure: Callable[[int], Cost | None], headroom: int = 0
) -> tuple[int, int | None]:
    """The largest candidate whose tensors are within `room`, and their bytes (None where the smallest is left, which nobody tried).

    `measure` gives the cost of a size, or None where memory ran out; the device has to have `headroom` left at the worst moment.
    The line through the two largest sizes that are known says what to try next, and nothing counts that was not tried.
    """
    known: dict[int, int] = {}
    low, high = candidates[0], candidates[-1] + 1

    def fits(size: int) -> bool:
        cost = measure(size)
        if cost is None:
            return False
        known[size] = cost.tensors
        return cost.tensors <= room and (cost.least_free is None or cost.least_free >= headroom)

    for size in FIRST_SIZES:
        if size < min(high, candidates[-1]) and not fits(size):
            high = size
    while fitting := [size for size in candidates if low < size < high and predict(known, size) <= room]:
        size = fitting[-1]
        if size in known or fits(size):
            low = size
        else:
            high = size
    return low, known.get(low)


def predict(known: dict[int, int], size: int) -> float:
    """Bytes of a micro-batch, by the line through the two largest sizes that are known; 0 where there are no two."""
    if len(known) < 2:
        return 0.0
    first, second = sorted(known)[-2:]
    slope = (known[second] - known[first]) / (second - first)
    return known[second] + max(slope, 0.0) * (size - second)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
