"""Yield the micro-batches of each step, from the data order to the device."""

from collections import deque
from collections.abc import Iterator

from accel_train.data.cache import DigestCheck
from accel_train.data.samples import Drawn, SeededReads
from accel_train.engine.loader import checked_count, read_batches, to_device
from accel_train.engine.run import RunContext
from accel_train.engine.step import MicroBatch
from accel_train.guard.guard import is_skipped_by_rollback

Steps = Iterator[tuple[int, list[MicroBatch]]]
"""Iterator of 0-based steps with their micro-batches on the device."""


def training_batches(run: RunContext, first_step: int) -> Steps:
    """Yield this process's micro-batches of each step from `first_step` on, without the steps that a rollback skips.

    Raises:
        DataError: a large file differs from its digest, or a batch has no count of targets.
    """
    if run.state.stopped_early:
        return run.observer.reading(iter(()))
    batches = _read_order(run, first_step) if run.plan.data.step_batches is None else _read_stream(run, first_step)
    if run.digest_check is not None:
        batches = _checked(run, run.digest_check, batches, first_step)
    return run.observer.reading(batches)


def _is_skipped(run: RunContext, step: int) -> bool:
    return bool(run.state.rollbacks) and is_skipped_by_rollback(step + 1, run.state.rollbacks)


def _read_stream(run: RunContext, first_step: int) -> Steps:
    data, device, pin = run.plan.data, run.accelerator.device, run.plan.reading.pin_memory
    assert data.step_batches is not None
    for step, own in enumerate(data.step_batches(first_step), start=first_step):
        if not _is_skipped(run, step):
            yield step, [(to_device(batch, device, pin=pin), checked_count(count)) for batch, count in own]


def _read_order(run: RunContext, first_step: int) -> Steps:
    """Yield steps that contain only this process's slice of each global batch. Skipped steps are not read.

    A process without samples in a short step forwards a sample of another process and counts no targets. It does so
    because processes meet in the backward pass. With a sharded model, processes also meet in each forward, so every
    process forwards the same number of micro-batches.
    """
    data, order, sizes = run.plan.data, run.plan.order, run.sizes
    is_drawn, all_forward_alike = data.draw is not None or data.seeds_reading, not run.strategy.is_replicated
    dataset = data.train
    if data.draw is not None:
        dataset = Drawn(data.draw, order.seed, order.num_samples)
    elif data.seeds_reading:
        dataset = SeededReads(dataset, order.seed, order.num_samples)
    step_samples = order.step_draws if is_drawn else order.step_samples
    # Number of micro-batches and of fillers, for each step that the readers have started. Readers run ahead.
    counts: deque[tuple[int, int]] = deque()

    def steps() -> Iterator[int]:
        return (step for step in range(first_step, run.plan.max_steps) if not _is_skipped(run, step))

    def index_lists() -> Iterator[list[int]]:
        for step in steps():
            share = order.rank_micro_batches(
                step, run.strategy.dims.rank, sizes.world_size, sizes.per_device_batch_size, as_draws=is_drawn
            )
            wanted = 1
            if all_forward_alike and len(share) < sizes.gradient_accumulation_steps:
                largest_share = -(-len(step_samples(step)) // sizes.world_size)
                wanted = -(-largest_share // sizes.per_device_batch_size)
            fillers = max(wanted - len(share), 0)
            counts.append((len(share), fillers))
            yield from share
            if fillers:
                yield from [step_samples(step)[:1].tolist()] * fillers

    micro_batches = read_batches(dataset, data.collate, index_lists(), run.accelerator.device, run.plan.reading)
    for step in steps():
        first = next(micro_batches)  # readers append to `counts` before they read
        count, fillers = counts.popleft()
        share = [first, *(next(micro_batches) for _ in range(count + fillers - 1))]
        yield step, [*share[:count], *((batch, 0) for batch, _ in share[count:])]


def _checked(run: RunContext, check: DigestCheck, batches: Steps, first_step: int) -> Steps:
    """Compare large files with their digests while batches are read. The end of the epoch waits for the comparison."""
    check.start()
    epoch_at = run.plan.order.epoch_at
    next_epoch = int(epoch_at(first_step)) + 1
    for step, micro_batches in batches:
        if check.is_running and epoch_at(step) >= next_epoch:
            check.wait()
        check.raise_if_damaged()
        yield step, micro_batches
    if check.is_running and epoch_at(run.plan.max_steps) < next_epoch:
        names = ", ".join(str(path) for path in run.plan.data.large_files)
        run.observer.note(f"not all of {names} was compared with its digest: the steps were done before")
        return
    check.wait()
    check.raise_if_damaged()
