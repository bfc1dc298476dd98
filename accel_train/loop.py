"""The order of things: what happens in a step, and what happens between steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.finish import evaluate_run, finish_run, save_run
from accel_train.guard import judge
from accel_train.loading import step_batches
from accel_train.memory import collect_garbage, garbage_collected_at_steps
from accel_train.prepare import Run, prepare_run
from accel_train.recipe import Recipe
from accel_train.signals import StopRequest
from accel_train.state import Preempted, Requests, StepResult, TrainingStopped
from accel_train.step import Agreement, MicroBatch, StepOutcome, forward_backward, seed_step, update_unless_nonfinite


@dataclass(frozen=True)
class RunResult:
    """What a finished run hands back."""

    output_dir: Path
    summary: dict[str, Any]
    """What summary.json holds: final metrics, totals, wall time, peak memory, throughput."""


def train(recipe: Recipe) -> RunResult:
    """Train what the recipe says, going on from the newest valid checkpoint of its output folder.

    Raises:
        ValueError: the recipe, the data or the launcher is wrong; said before a model is built.
        TrainingStopped: the guard stopped the run; the last checkpoint is good.
        CheckpointError: no checkpoint could be read or written.
        Preempted: the run was asked to stop, and saved; call it again to go on.
    """
    return train_run(prepare_run(recipe))


def train_run(run: Run) -> RunResult:
    """Train a prepared run to its end, and write what is left of it: evaluation, weights, summary, report."""
    with run.resources, StopRequest() as stop:
        with run.memory.phase("train"), garbage_collected_at_steps():
            run_steps(run, stop)
        return RunResult(run.output_dir, finish_run(run))


def run_steps(run: Run, stop: StopRequest) -> None:
    """Every step of the run, in the order in which things happen.

    The host queues work and does not wait for it: it reads what came of a step while the device computes the next one, and
    waits only where something else is due (an evaluation, a checkpoint, the end).
    """
    recipe, state, scaler = run.recipe, run.state, run.accelerator.scaler
    agreement = Agreement(run.accelerator)
    last: StepOutcome | None = None
    for step, micro_batches in enumerate(batches_from(run, state.step), start=state.step):
        seed_step(recipe.seed, step, run.accelerator.process_index, run.accelerator.device)
        learning_rate = run.set_learning_rate(step)
        # One collective a step, under way while the first forward runs.
        agreement.begin(sum(num_targets for _, num_targets in micro_batches), stop.requested, last)
        loss_sum = forward_backward(run.accelerator, run.module, micro_batches, agreement)
        grad_norm, skipped, loss_scale = update_unless_nonfinite(
            run.optimizer, run.parameters, recipe.optimizer.max_grad_norm, scaler
        )
        if run.average is not None:
            run.average.update(step, skipped)
        state.step = step + 1
        previous = agreement.read_last()
        last = agreement.outcome(state.step, learning_rate, loss_sum, grad_norm, skipped, loss_scale)
        if previous is not None:
            account(run, previous)
        stopping = previous is not None and previous.stop_requested
        if stopping or run.pause_due():
            stopping |= account(run, agreement.settle(stop.requested, last)).stop_requested
            last = None
            between_steps(run, stopping)
            if state.stopped_early:
                return
        collect_garbage(state.step)


def account(run: Run, result: StepResult) -> StepResult:
    """Hand a step's outcome to the guard and to whoever watches; returns it.

    Raises:
        TrainingStopped: the guard's budget is spent; all processes judge the same numbers, so all stop.
    """
    verdict = judge(result, run.state, run.recipe.guard)
    run.state.num_targets_seen += result.num_targets
    run.observer.on_step(result, result.learning_rate)
    if verdict.action != "go_on":
        run.observer.on_event(verdict.action, result.step, verdict.reason, loss_scale=result.loss_scale)
    if verdict.action == "stop":
        raise TrainingStopped(f"{verdict.reason}. The checkpoints in {run.output_dir} are from before")
    return result


def between_steps(run: Run, stopping: bool) -> None:
    """What is due at this step: evaluate, save, end the run early, or stop and be run again.

    Raises:
        Preempted: some process was asked to stop; everything is saved.
        CheckpointError: a checkpoint could not be written.
    """
    state, asked = run.state, run.requests or Requests()
    improved = (run.evaluation_due() or (asked.evaluate and run.can_evaluate)) and evaluate_run(run)
    state.stopped_early |= asked.stop
    if improved or stopping or state.stopped_early or asked.save or run.checkpoint_due():
        save_run(run)
    asked.stop = asked.save = asked.evaluate = False
    if stopping and state.step < run.max_steps and not state.stopped_early:
        run.observer.on_event("preempted", state.step, f"asked to stop: saved at step {state.step} of {run.max_steps}")
        raise Preempted(
            f"asked to stop: saved at step {state.step} of {run.max_steps}; run the same command again to go on"
        )


def batches_from(run: Run, first_step: int) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step from `first_step` (0-based) to the end."""
    if run.state.stopped_early:
        return iter(())
    return step_batches(
        run.data,
        run.order,
        run.sizes,
        first_step=first_step,
        max_steps=run.max_steps,
        rank=run.accelerator.process_index,
        device=run.accelerator.device,
        num_workers=run.num_workers,
        pin_memory=run.pin_memory,
    )
