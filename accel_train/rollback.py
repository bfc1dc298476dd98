"""Going back: to the newest healthy checkpoint before things went wrong, and past the steps around the onset."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from accel_train.checkpoint import check, folder_of
from accel_train.guard import plan_rollback
from accel_train.health import healthy_steps
from accel_train.rollback_record import describe, remove_abandoned, take_up, write_rollbacks
from accel_train.run import Run
from accel_train.saving import kept_checkpoints, tell_of_saves
from accel_train.snapshot import restore
from accel_train.state import CheckpointError, Rollback, TrainingStopped


class RollBack(Exception):
    """The guard wants to go back; raised by the loop for itself, on all processes at the same step."""

    def __init__(self, reason: str, at_step: int) -> None:
        super().__init__(reason)
        self.reason, self.at_step = reason, at_step


def roll_back(run: Run, asked: RollBack) -> None:
    """Restore the newest healthy checkpoint on all processes, and pass over the steps that led here.

    The record is on disk before the abandoned checkpoints go, so a kill at any point resumes on the new branch.

    Raises:
        TrainingStopped: there is no healthy checkpoint.
        CheckpointError: it could not be gone back to: the disk does not do its part.
    """
    with run.observer.pause():
        target, rollback = _agree(run, asked)
        before = run.state
        run.let_go_of_gathered_weights()
        state = restore(target, run.inner.model, run.optimizer, run.accelerator, run.average, run.zero_parts)
    run.optimizer.zero_grad(set_to_none=True)  # of the step whose update will not be made
    if run.zero is not None:
        run.zero.drop_gradients()
    take_up(state, [*before.rollbacks, rollback])
    state.train_seconds = before.train_seconds
    run.go_on_from(state)
    run.health.go_back(rollback.to_step)
    said = describe(rollback, run.recipe.guard.max_rollbacks)
    run.observer.on_event("rollback", asked.at_step, said, **asdict(rollback))


def _agree(run: Run, asked: RollBack) -> tuple[Path, Rollback]:
    """What the main process has found, and written down, on all processes."""
    found: list[Any] = [None]
    if run.accelerator.is_main_process:
        run.saver.wait()
        tell_of_saves(run)
        run.health.tag()
        try:
            found[0] = _choose(run, asked)
        except (TrainingStopped, CheckpointError) as error:
            found[0] = error
        except OSError as error:
            found[0] = CheckpointError(f"{asked.reason}; the rollback could not be made: {error}")
    if run.accelerator.num_processes > 1:
        broadcast_object_list(found)
    if isinstance(found[0], Exception):
        run.observer.on_event("stop", asked.at_step, str(found[0]))
        raise found[0]
    target, rollback = found[0]
    return run.output_dir / "checkpoints" / target.name, rollback  # this machine's path


def _choose(run: Run, asked: RollBack) -> tuple[Path, Rollback]:
    root = run.output_dir / "checkpoints"
    onset = run.state.first_bad_step or asked.at_step
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
            run.recipe.guard,
            run.state,
            at_step=asked.at_step,
            to_step=step,
            max_steps=run.max_steps,
            steps_per_epoch=run.order.steps_per_epoch,
        )
        rollbacks = [*run.state.rollbacks, rollback]
        write_rollbacks(run.output_dir, rollbacks)
        remove_abandoned(root, rollbacks)
        return status.path, rollback
    after = run.recipe.guard.healthy_after_steps
    why = "; ".join(broken) or f"no checkpoint before step {onset} was followed by {after} clean steps"
    raise TrainingStopped(f"{asked.reason}; there is nothing to go back to: {why}. {kept_checkpoints(run)}")
