"""The training loop: the order of events in a step and between steps. Read this file first."""

import torch

from accel_train.core.errors import Preempted
from accel_train.core.state import StepResult
from accel_train.engine.broken import count_broken
from accel_train.engine.loader import training_batches
from accel_train.engine.run import RunContext
from accel_train.engine.save import raise_save_error, report_saves, save_run, saves_finished
from accel_train.engine.step import Agreement, MicroBatch, StepOutcome, forward_backward, seed_step
from accel_train.recovery.divergence import check_divergence
from accel_train.recovery.out_of_memory import (
    MemoryCare,
    RanOutOfMemory,
    shortage_in,
    undo_step,
    use_smaller_micro_batches,
)
from accel_train.recovery.rollback import RollbackRequested, carry_out, roll_back
from accel_train.recovery.stragglers import StragglerWatch
from accel_train.recovery.unused_parameters import UnusedParameters
from accel_train.runtime.memory import collect_garbage
from accel_train.training.model_selection import evaluate_run
from accel_train.training.output import StepProfiler


def run_steps(run: RunContext) -> None:
    """Run all steps. After a rollback or out of memory, continue from the step that the run was set back to."""
    with saves_finished(run), StepProfiler(run) as profiler:
        while True:
            try:
                if run.state.evaluation_owed:
                    between_steps(run, stopping=False)
                return steps_in_order(run, profiler)
            except RollbackRequested as request:
                roll_back(run, request)
            except UnusedParameters:
                run.undo_forward()
                run.strategy.look_for_unused()
            except RanOutOfMemory as error:
                use_smaller_micro_batches(run, error)


def steps_in_order(run: RunContext, profiler: StepProfiler) -> None:
    """Run the steps from the current step to the end.

    The host reads a step's outcome while the device computes the next gradients. So the guard judges the step before
    the next update. The host waits only if an evaluation, a save, or the end is due.
    """
    state, seed, dims, device = run.state, run.plan.recipe.seed, run.strategy.dims, run.accelerator.device
    agreement = Agreement(run.accelerator, run.plan.task.global_loss, run.counted)
    care, stragglers, has_graphs = MemoryCare(run), StragglerWatch(run), run.plan.recipe.precision.has_cuda_graphs
    last: StepOutcome | None = None  # outcome of the previous step, on its way to the host
    last_batches: list[MicroBatch] = []
    for step, micro_batches in stragglers.reading(profiler.reading(training_batches(run, state.step))):
        run.observer.on_step_begin(step)
        seed_step(seed, step, dims.random_rank, device)
        learning_rate = run.set_learning_rate(step)
        run.statistics.keep()
        agreement.begin(run.signals(micro_batches), last)  # the step's one collective, runs during the first forward
        loss_sum, shortage, reduces = None, "", care.reduces_at_once(step)
        if has_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            loss_sum = forward_backward(run.strategy, micro_batches, agreement, reduce=reduces)
            loss_sum = loss_sum.clone() if has_graphs else loss_sum  # the next replay overwrites it
        except (RuntimeError, MemoryError) as error:
            shortage = shortage_in(run, error)  # only the text, because the error would keep activations alive
        loss_sum, failure = care.after_backward(micro_batches, agreement, loss_sum, shortage)
        previous = agreement.read_last()
        if previous is not None:
            account(run, previous, last_batches)
        if failure is not None:
            raise failure
        assert loss_sum is not None, "there is one, or a failure"
        limits = run.guard.limits
        update = run.strategy.update_within(limits, agreement.share_of_a_target())
        run.statistics.put_back(update.skipped)
        if run.strategy.average is not None:
            run.strategy.average.update(step, update.skipped)
        state.step = step + 1
        gradient_sum, ran_out = run.strategy.gradient_sum(), bool(run.out_of_memory)
        last = agreement.outcome(
            state.step, learning_rate, limits, loss_sum, update, gradient_sum, ran_out_of_memory=ran_out
        )
        last_batches = micro_batches
        stopping = previous is not None and previous.stop_requested
        if stopping or run.calendar.pause_due(state.step):
            settled = account(run, agreement.settle(run.signals(), last), last_batches)
            last = None
            between_steps(run, stopping or settled.stop_requested)
            if state.stopped_early:
                return
        stragglers.compare(state.step)
        collect_garbage(state.step)


def account(run: RunContext, result: StepResult, micro_batches: list[MicroBatch]) -> StepResult:
    """Let the guard judge a step and the observers see it; return the `result`.

    All processes decide from the same numbers, so all take the same branch.
    """
    if result.ran_out_of_memory:
        raise undo_step(run, result)
    count_broken(run, result)
    decision = run.guard.decide(result)
    run.state.num_targets_seen += result.num_targets
    run.observer.on_step(result, result.learning_rate)
    run.health.note(result.step, clean=decision.action == "continue")
    report_saves(run)
    if decision.action != "continue":
        carry_out(run, result, decision, micro_batches)  # raises to roll back or to stop
    if result.save_failed:
        raise_save_error(run)
    return result


def between_steps(run: RunContext, stopping: bool) -> None:
    """Compare weights, evaluate, save, end early, or stop, if due after this step.

    Raises:
        Preempted: some process was asked to stop. Everything is saved.
        CheckpointError: a checkpoint could not be written.
    """
    state, requests, calendar = run.state, run.requests, run.calendar
    if calendar.drift_check_due(state.step, stopping=stopping):
        check_divergence(run)
    is_requested = requests.evaluate and run.plan.can_evaluate
    evaluates = calendar.evaluation_due(state.step) or state.evaluation_owed or is_requested
    improved = evaluates and evaluate_run(run)
    stopping |= state.evaluation_owed  # a stop request cut the evaluation short
    state.stopped_early |= requests.stop  # after the evaluation, because its callbacks may request a stop
    if improved or stopping or state.stopped_early or requests.save or calendar.checkpoint_due(state.step):
        save_run(run, wait=stopping or state.stopped_early or state.step >= run.plan.max_steps)
    requests.stop = requests.save = requests.evaluate = False
    if stopping and state.step < run.plan.max_steps and not state.stopped_early:
        message = f"asked to stop: saved at step {state.step} of {run.plan.max_steps}"
        run.observer.on_event("preempted", state.step, message, peak_memory_bytes=dict(run.memory.peaks))
        raise Preempted(f"{message}; {run.plan.how_to_resume} to resume")
