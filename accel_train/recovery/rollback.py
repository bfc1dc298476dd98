"""Roll back: restore the newest healthy checkpoint from before a bad step, and skip the steps around the onset."""

from dataclasses import asdict

from accel_train.checkpoint.health import healthy_steps
from accel_train.checkpoint.rollback_log import apply_rollbacks, describe, remove_abandoned, write_rollbacks
from accel_train.checkpoint.store import check, folder_of
from accel_train.core.errors import CheckpointError, TrainingStopped
from accel_train.core.state import Rollback
from accel_train.engine.run import RunContext, make_guard
from accel_train.engine.save import kept_checkpoints, report_saves, restore
from accel_train.guard.guard import plan_rollback
from accel_train.runtime.process_group import on_main


class RollBack(Exception):
    """Raised by the loop for itself where the guard rolls back, on all processes at the same step."""

    def __init__(self, reason: str, at_step: int) -> None:
        super().__init__(reason)
        self.reason, self.at_step = reason, at_step


def roll_back(run: RunContext, request: RollBack) -> None:
    """Restore the newest healthy checkpoint on all processes, and skip the steps that led here.

    The record is on disk before the abandoned checkpoints go, so a kill at any point resumes on the new branch.

    Raises:
        TrainingStopped: there is no healthy checkpoint.
        CheckpointError: the disk fails.
    """
    with run.observer.pause():
        try:
            name, rollback = on_main(lambda: _choose(run, request))
        except (TrainingStopped, CheckpointError) as error:
            run.observer.on_event("stop", request.at_step, str(error))
            raise
        before = run.state
        state = restore(run.strategy, run.plan.output_dir / "checkpoints" / name)
    run.strategy.drop_gradients()  # of the step that has no update
    apply_rollbacks(state, [*before.rollbacks, rollback])
    state.train_seconds = before.train_seconds
    run.state, run.guard = state, make_guard(run.plan, state)
    run.health.go_back(rollback.to_step)
    message = describe(rollback, run.plan.recipe.guard.max_rollbacks)
    run.observer.on_event("rollback", request.at_step, message, **asdict(rollback))


def _choose(run: RunContext, request: RollBack) -> tuple[str, Rollback]:
    """Return the checkpoint's name and the rollback, once it is recorded."""
    run.saver.wait()
    report_saves(run)
    run.health.tag()
    try:
        return _record(run, request)
    except OSError as error:
        raise CheckpointError(f"{request.reason}; the rollback could not be made: {error}") from error


def _record(run: RunContext, request: RollBack) -> tuple[str, Rollback]:
    root = run.plan.output_dir / "checkpoints"
    onset = run.state.first_bad_step or request.at_step
    broken = []
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
    why = "; ".join(broken) or f"no checkpoint before step {onset} was followed by {after} clean steps"
    raise TrainingStopped(f"{request.reason}; there is no checkpoint to roll back to: {why}. {kept_checkpoints(run)}")
