"""Apply the guard's decision about a bad step.

A rollback restores the newest known-good checkpoint from before the problem, and skips the steps around its onset.
"""

from dataclasses import asdict

from accel_train.checkpoint.health import healthy_steps
from accel_train.checkpoint.rollback_log import apply_rollbacks, describe, remove_abandoned, write_rollbacks
from accel_train.checkpoint.store import check, folder_of
from accel_train.core.errors import CheckpointError, DataError, TrainingStopped
from accel_train.core.format import format_count
from accel_train.core.state import Rollback, StepResult
from accel_train.core.work import working
from accel_train.engine.run import RunContext, make_guard
from accel_train.engine.save import kept_checkpoints, report_saves, restore
from accel_train.engine.step import MicroBatch
from accel_train.guard.guard import Decision, plan_rollback
from accel_train.recovery.investigate import diagnose
from accel_train.runtime.process_group import on_main


class RollbackRequested(Exception):
    """Raised by the loop and caught by the loop when the guard rolls back, on all processes at the same step."""

    def __init__(self, reason: str, at_step: int) -> None:
        super().__init__(reason)
        self.reason, self.at_step = reason, at_step


def carry_out(run: RunContext, result: StepResult, decision: Decision, micro_batches: list[MicroBatch]) -> None:
    """Report a bad step with its cause, and raise the guard's decision. A skipped step needs nothing else.

    Raises:
        RollbackRequested: the run continues from an earlier checkpoint.
        TrainingStopped: the guard's budget is spent.
        DataError: the step has no targets, so there is nothing to learn from.
    """
    action, reason, incident = decision.action, decision.reason, None
    if action == "high":
        return
    if decision.needs_diagnosis:
        incident, cause = diagnose(run, result, decision, micro_batches)
        reason = f"{reason}. {cause}" if cause else reason
    kind = action if action != "roll_back" else "skip" if result.skipped else "spike"
    run.observer.on_event(kind, result.step, reason, names_step=True, loss_scale=result.loss_scale, incident=incident)
    if action == "roll_back":
        raise RollbackRequested(decision.reason, result.step)
    if action == "stop" and result.num_targets == 0:
        raise DataError(decision.reason)
    if action == "stop":
        raise TrainingStopped(f"{decision.reason}. {kept_checkpoints(run)}")


def roll_back(run: RunContext, request: RollbackRequested) -> None:
    """Restore the newest known-good checkpoint on all processes, and skip the steps that led to the rollback.

    The record is on disk before the abandoned checkpoints are removed. So after a kill at any point, the run resumes on
    the new branch.

    Raises:
        TrainingStopped: no known-good checkpoint exists.
        CheckpointError: the disk fails.
    """
    with run.observer.pause("recovery"), working("rolling back"):
        try:
            name, rollback = on_main(lambda: _choose(run, request))
        except (TrainingStopped, CheckpointError) as error:
            run.observer.on_event("stop", request.at_step, str(error), names_step=True)
            raise
        before = run.state
        folder = run.saver.root / name
        state = restore(run.strategy, folder, run.plan.recipe.optimizer.name)
    run.strategy.drop_gradients()  # gradients of the step that is not applied
    apply_rollbacks(state, [*before.rollbacks, rollback])
    state.train_seconds = before.train_seconds
    run.state, run.guard = state, make_guard(run.plan, state)
    run.health.go_back(rollback.to_step)
    message = describe(rollback, run.plan.recipe.guard.max_rollbacks)
    run.observer.on_event("rollback", request.at_step, message, **asdict(rollback))


def _choose(run: RunContext, request: RollbackRequested) -> tuple[str, Rollback]:
    """Return the checkpoint's name and the rollback, after recording the rollback."""
    run.saver.wait()
    report_saves(run)
    run.health.tag()
    root = run.saver.root
    onset = run.state.first_bad_step or request.at_step
    broken = []
    try:
        for step in sorted(healthy_steps(root), reverse=True):
            if step >= onset:
                continue
            status = check(folder_of(root, step))
            if status.problem is not None:
                broken.append(f"{status.path.name}: {status.problem}")
                run.observer.on_event("checkpoint_invalid", step, f"{status.path.name} is not used: {status.problem}")
                continue
            rollback = plan_rollback(
                run.plan.recipe.guard,
                run.state,
                at_step=request.at_step,
                to_step=step,
                max_steps=run.plan.max_steps,
                steps_per_epoch=run.plan.order.steps_per_epoch,
            )
            rollbacks = [*run.state.rollbacks, rollback]
            write_rollbacks(run.plan.output_dir, rollbacks)
            remove_abandoned(root, rollbacks)
            return status.path.name, rollback
        after = run.plan.recipe.guard.healthy_after_steps
        why = (
            "; ".join(broken)
            or f"no checkpoint before step {onset} was followed by {format_count(after, 'clean step')}"
        )
        raise TrainingStopped(f"{request.reason}; cannot roll back: {why}. {kept_checkpoints(run)}")
    except OSError as error:
        raise CheckpointError(f"{request.reason}; the rollback failed: {error}") from error
