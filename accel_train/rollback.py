"""Going back: to the newest healthy checkpoint before things went wrong, and past the steps around the onset."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from accel_train.checkpoint import check, checkpoint_folders, step_of
from accel_train.guard import plan_rollback
from accel_train.health import healthy_steps
from accel_train.prepare import Run
from accel_train.rollback_record import remove_abandoned, write_rollbacks
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
        TrainingStopped: there is no healthy checkpoint, or it cannot be read.
    """
    found: list[Any] = [None, None]
    with run.observer.pause():
        if run.accelerator.is_main_process:
            run.saver.wait()
            try:
                found = list(_choose(run, asked))
            except (OSError, CheckpointError) as error:
                found = [None, str(error)]
        if run.accelerator.num_processes > 1:
            broadcast_object_list(found)
        target, rollback = found
        if target is None:
            said = f"{asked.reason}; there is nothing to go back to: {rollback}"
            run.observer.on_event("stop", asked.at_step, said)
            raise TrainingStopped(f"{said}. The checkpoints in {run.output_dir} are from before")
        before = run.state
        state = restore(target, run.inner.model, run.optimizer, run.accelerator, run.average)
    run.optimizer.zero_grad(set_to_none=True)  # of the step whose update will not be made
    state.rollbacks = [*before.rollbacks, rollback]
    state.num_skipped_steps = before.num_skipped_steps
    state.last_incident = before.last_incident
    state.train_seconds = before.train_seconds
    run.go_on_from(state)
    lowered = ""
    if rollback.learning_rate_factor != 1:
        lowered = (
            f"; the learning rate is x{rollback.learning_rate_factor:g} up to step {rollback.lowered_until}, "
            "because it is the second time here"
        )
    run.observer.on_event(
        "rollback",
        asked.at_step,
        f"rollback {rollback.number} of {run.recipe.guard.max_rollbacks} allowed: going on from {target.name}, and passing over "
        f"steps {rollback.skip_first} to {rollback.skip_last}{lowered}",
        **asdict(rollback),
    )


def _choose(run: Run, asked: RollBack) -> tuple[Path | None, Rollback | str]:
    root = run.output_dir / "checkpoints"
    onset = run.state.first_bad_step or asked.at_step
    healthy = healthy_steps(root)
    broken = []
    for folder in reversed(checkpoint_folders(root)):
        step = step_of(folder)
        if step is None or step not in healthy or step >= onset:
            continue
        status = check(folder)
        if status.problem is not None:
            broken.append(f"{folder.name}: {status.problem}")
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
        return folder, rollback
    after = run.recipe.guard.healthy_after_steps
    return None, "; ".join(broken) or f"no checkpoint before step {onset} was followed by {after} clean steps"
