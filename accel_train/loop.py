"""The order of things: what happens in a step, and what happens between steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_train.data.cache import DigestCheck
from accel_train.data_group import data_group
from accel_train.drift import check_drift
from accel_train.ending import exits_are_errors
from accel_train.fallback import (
    LeftOut,
    NewSizes,
    RanOutOfMemory,
    StepAgain,
    forward_backward_or_run_out,
    free_memory,
    let_ddp_look,
    nothing_done,
    smaller_micro_batches,
)
from accel_train.finish import continue_unless_stopped, evaluate_run, finish_run
from accel_train.guard import is_passed_over
from accel_train.incident import look_into
from accel_train.loading import step_batches
from accel_train.memory import collect_garbage, garbage_collected_at_steps
from accel_train.prepare import prepare_run
from accel_train.recipe import Recipe
from accel_train.rollback import RollBack, roll_back
from accel_train.run import Run
from accel_train.running_statistics import RunningStatistics
from accel_train.saving import kept_checkpoints, raise_save_error, save_run, saves_finished, tell_of_saves
from accel_train.signals import StopRequest
from accel_train.state import DataError, OutOfMemory, Preempted, Requests, StepResult, TrainingStopped
from accel_train.step import Agreement, MicroBatch, StepOutcome, seed_step
from accel_train.stragglers import StragglerWatch


@dataclass(frozen=True)
class RunResult:
    """What a finished run hands back."""

    output_dir: Path
    summary: dict[str, Any]
    """What summary.json holds: final metrics, totals, wall time, peak memory, throughput."""


@exits_are_errors()
def train(recipe: Recipe) -> RunResult:
    """Train what the recipe says, going on from the newest valid checkpoint of its output folder.

    Raises:
        ValueError: the recipe, the data or the launcher is wrong; said before a model is built.
        TrainingStopped: the guard stopped the run; the last checkpoint is good.
        CheckpointError: no checkpoint could be read or written.
        Preempted: the run was asked to stop, and saved; call it again to go on.
        ExitedEarly: code of the task called `sys.exit()`.
    """
    with StopRequest() as stop:
        return train_run(prepare_run(recipe, stop=stop))


def train_run(run: Run) -> RunResult:
    """Train a prepared run to its end, and write what is left of it: evaluation, weights, summary, report."""
    with run.resources, run.stop as stop, exits_are_errors():
        run.watch()
        continue_unless_stopped(run)
        with run.memory.phase("train"), garbage_collected_at_steps():
            run_steps(run, stop)
        return RunResult(run.output_dir, finish_run(run))


def run_steps(run: Run, stop: StopRequest) -> None:
    """Every step of the run; after a rollback, again from the step that was gone back to; out of memory, in smaller pieces."""
    with saves_finished(run):
        while True:
            try:
                if run.state.evaluation_owed:
                    between_steps(run, stopping=False)
                return steps_in_order(run, stop)
            except RollBack as asked:
                roll_back(run, asked)
            except LeftOut:
                let_ddp_look(run)
            except RanOutOfMemory as told:
                use_smaller_micro_batches(run, told)


def steps_in_order(run: Run, stop: StopRequest) -> None:
    """The steps from here to the end, in the order in which things happen.

    The host queues work and does not wait for it: it reads what came of a step while the device computes the gradients of
    the next one, so the guard speaks before another update is made; and it waits only where something else is due (an
    evaluation, a checkpoint, the end).
    """
    accelerator, state, guard, seed = run.accelerator, run.state, run.guard, run.recipe.seed
    rank, device = data_group(accelerator).random_rank, accelerator.device
    agreement, stragglers = Agreement(accelerator), StragglerWatch(run)
    last: StepOutcome | None = None
    last_batches: list[MicroBatch] = []
    sizes, statistics = NewSizes(run.order), RunningStatistics(run.inner, shared=run.is_sharded)
    for step, micro_batches in stragglers.reading(batches_from(run, state.step)):
        seed_step(seed, step, rank, device)
        learning_rate = run.set_learning_rate(step)
        statistics.keep()
        # One collective a step, under way while the first forward runs.
        agreement.begin(run.wishes(stop.requested, micro_batches), last)
        loss_sum = forward_backward_or_run_out(run, micro_batches, agreement, step, sizes)
        previous = agreement.read_last()
        if previous is not None:
            try:
                account(run, previous, last_batches)
            except RanOutOfMemory as told:  # in the step before: what was computed since is let go, too
                loss_sum = told
        if isinstance(loss_sum, StepAgain):
            statistics.put_back(torch.ones((), device=device))
            raise loss_sum
        limits = guard.limits
        grad_norm, skipped, loss_scale = run.update(limits)
        statistics.put_back(skipped)
        if run.average is not None:
            run.average.update(step, skipped)
        state.step = step + 1
        last = agreement.outcome(
            state.step,
            learning_rate,
            loss_sum,
            grad_norm,
            skipped,
            loss_scale,
            limits.clip,
            gradient_sum=run.gradient_sum_here(),
            ran_out_of_memory=bool(run.no_room),
        )
        last_batches = micro_batches
        stopping = previous is not None and previous.stop_requested
        if stopping or run.pause_due():
            settled = account(run, agreement.settle(run.wishes(stop.requested), last), last_batches)
            last = None
            between_steps(run, stopping or settled.stop_requested)
            if state.stopped_early:
                return
        stragglers.compare(state.step)
        collect_garbage(state.step)


def account(run: Run, result: StepResult, micro_batches: list[MicroBatch]) -> StepResult:
    """Hand a step's outcome to the guard and to whoever watches, and do as the guard says.

    All processes judge the same numbers, so they all take the same branch.

    Raises:
        RanOutOfMemory: the step was not done, and is to be done again.
        RollBack: the run goes on from an earlier checkpoint.
        TrainingStopped: the guard's budget is spent.
        DataError: there is nothing to learn from.
        CheckpointError: a checkpoint could not be written in the background, and not a second time either.
    """
    if result.ran_out_of_memory:
        raise nothing_done(run, result)
    verdict = run.guard.judge(result)
    run.state.num_targets_seen += result.num_targets
    run.observer.on_step(result, result.learning_rate)
    run.health.note(result.step, clean=verdict.action == "go_on")
    tell_of_saves(run)
    if verdict.action != "go_on":
        cause = look_into(run, result, verdict, micro_batches) if verdict.look_into else None
        reason = verdict.reason if cause is None else f"{verdict.reason}. {cause.sentence}"
        incident = None if cause is None else cause.folder_name
        kind = verdict.action if verdict.action != "roll_back" else "skip" if result.skipped else "spike"
        run.observer.on_event(kind, result.step, reason, loss_scale=result.loss_scale, incident=incident)
    if verdict.action == "roll_back":
        raise RollBack(verdict.reason, result.step)
    if verdict.action == "stop" and result.num_targets == 0:
        raise DataError(verdict.reason)
    if verdict.action == "stop":
        raise TrainingStopped(f"{verdict.reason}. {kept_checkpoints(run)}")
    if result.save_failed:
        raise_save_error(run)
    return result


def use_smaller_micro_batches(run: Run, told: RanOutOfMemory) -> None:
    """Go on from the step that ran out of memory with smaller micro-batches: the same samples, the same loss.

    Raises:
        OutOfMemory: they hold one sample already, or the data comes in batches of its own.
    """
    free_memory(run.optimizer, run.accelerator.device)
    sizes, step = run.sizes, run.state.step + 1
    who = " and ".join(f"process {rank}" for rank in told.ranks)
    held = f"{who} ran out of memory in step {step} with {_samples(sizes.per_device_batch_size)} per micro-batch"
    smaller = smaller_micro_batches(sizes) if run.data.step_batches is None else None
    if smaller is None:
        raise OutOfMemory(f"{held} ({told.said})" if told.said else held)
    run.sizes = smaller
    if run.remembered is not None:
        run.remembered.write(smaller.per_device_batch_size, f"because {held}")
    run.accelerator.gradient_accumulation_steps = smaller.gradient_accumulation_steps
    run.observer.on_event("out_of_memory", step, f"{held}; going on with {smaller.reason}", ranks=told.ranks)


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def between_steps(run: Run, stopping: bool) -> None:
    """What is due at this step: evaluate, save, end the run early, or stop and be run again.

    Raises:
        Preempted: some process was asked to stop; everything is saved.
        CheckpointError: a checkpoint could not be written.
    """
    state, asked = run.state, run.requests or Requests()
    if run.drift_check_due(stopping):
        check_drift(run)
    due = run.evaluation_due() or state.evaluation_owed or (asked.evaluate and run.can_evaluate)
    improved = due and evaluate_run(run)
    stopping |= state.evaluation_owed
    state.stopped_early |= asked.stop
    if improved or stopping or state.stopped_early or asked.save or run.checkpoint_due():
        save_run(run, wait=stopping or state.stopped_early or state.step >= run.max_steps)
    asked.stop = asked.save = asked.evaluate = False
    if stopping and state.step < run.max_steps and not state.stopped_early:
        said = f"asked to stop: saved at step {state.step} of {run.max_steps}"
        run.observer.on_event("preempted", state.step, said, peak_memory_bytes=dict(run.memory.peaks))
        again = (
            "run the same command again" if run.recipe.checkpoint.resume == "auto" else "set checkpoint.resume to auto"
        )
        raise Preempted(f"{said}; {again} to go on")


def batches_from(run: Run, first_step: int) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Each step from `first_step` (0-based) to the end, less those that a rollback passes over, with its micro-batches."""
    if run.state.stopped_early:
        return iter(())
    batches = step_batches(
        run.data,
        run.order,
        run.sizes,
        first_step=first_step,
        max_steps=run.max_steps,
        rank=data_group(run.accelerator).rank,
        device=run.accelerator.device,
        num_workers=run.num_workers,
        pin_memory=run.pin_memory,
        timeout_seconds=run.data_timeout_seconds,
        passed_over=lambda step: is_passed_over(step + 1, run.state.rollbacks),
        in_lockstep=run.is_sharded,
    )
    return batches if run.digest_check is None else checked_batches(run, run.digest_check, batches, first_step)


def checked_batches(
    run: Run, check: DigestCheck, batches: Iterator[tuple[int, list[MicroBatch]]], first_step: int
) -> Iterator[tuple[int, list[MicroBatch]]]:
    """The same batches, while their files are compared with their digests: at the latest the epoch's end waits for that.

    Raises:
        DataError: a file differs from its digest.
    """
    check.start()
    next_epoch = int(run.order.epoch_at(first_step)) + 1
    for step, micro_batches in batches:
        if check.is_running and run.order.epoch_at(step) >= next_epoch:
            check.wait()
        check.raise_if_damaged()
        yield step, micro_batches
    if check.is_running and run.order.epoch_at(run.max_steps) < next_epoch:
        names = ", ".join(str(path) for path in run.data.large_files)
        run.observer.note(f"not all of {names} was compared with its digest: the steps were done before")
        return
    check.wait()
    check.raise_if_damaged()
