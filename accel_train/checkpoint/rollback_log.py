"""The rollbacks of a run, stored in its folder, so that no resume continues an abandoned branch."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from accel_train.checkpoint.store import checkpoint_folders, read_trainer, remove, step_of
from accel_train.core.errors import CheckpointError
from accel_train.core.json_io import read_plain_json, write_plain_json
from accel_train.core.state import Rollback, TrainState

ROLLBACKS = "rollbacks.json"


def write_rollbacks(run_folder: Path, rollbacks: Sequence[Rollback]) -> None:
    """Replace the record of rollbacks.

    Write it before any other change. A kill at any later point then resumes on the new branch.
    """
    write_plain_json(run_folder / ROLLBACKS, [asdict(each) for each in rollbacks])


def read_rollbacks(run_folder: Path) -> list[Rollback]:
    """Return the rollbacks of a run, oldest first.

    Raises:
        CheckpointError: the record cannot be read. Without it, abandoned steps could come back.
    """
    path = run_folder / ROLLBACKS
    if not path.exists():
        return []
    try:
        return [Rollback(**record) for record in read_plain_json(path)]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). It lists the skipped steps. Move it away to resume without it"
        ) from error


def rollbacks_of(folder: Path) -> list[Rollback]:
    """Return the rollbacks that a run had made when it wrote a checkpoint.

    Raises:
        CheckpointError: the checkpoint does not have the expected content.
    """
    try:
        return [Rollback(**each) for each in read_trainer(folder)["state"]["rollbacks"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: its rollbacks cannot be read ({error})") from error


def abandoned(root: Path, rollbacks: Sequence[Rollback]) -> list[Path]:
    """Return the checkpoints of abandoned branches: written before a rollback, and after the step it returned to."""
    if not rollbacks:
        return []
    return [
        folder
        for folder in checkpoint_folders(root)
        if any((step_of(folder) or 0) > each.to_step for each in rollbacks[_known_to(folder, rollbacks) :])
    ]


def remove_abandoned(root: Path, rollbacks: Sequence[Rollback]) -> None:
    """Remove the abandoned checkpoints, newest first. If this is interrupted, the next start finds the rest."""
    for folder in reversed(abandoned(root, rollbacks)):
        remove(folder)


def _known_to(folder: Path, rollbacks: Sequence[Rollback]) -> int:
    """Return the number of rollbacks before a checkpoint was written. A broken checkpoint counts all and is kept."""
    try:
        return len(rollbacks_of(folder))
    except CheckpointError:
        return len(rollbacks)


def apply_rollbacks(state: TrainState, rollbacks: Sequence[Rollback]) -> None:
    """Add later rollbacks to restored counters, after a rollback and on a resume after a kill."""
    if len(rollbacks) > len(state.rollbacks):
        state.last_incident = rollbacks[-1].at_step
        state.num_skipped_steps = rollbacks[-1].num_skipped_steps
    state.rollbacks = list(rollbacks)


def describe(rollback: Rollback, max_rollbacks: int) -> str:
    """Return a rollback as a sentence."""
    lowered = ""
    if rollback.learning_rate_factor != 1:
        lowered = (
            f"; the learning rate is x{rollback.learning_rate_factor:g} up to step {rollback.lowered_until}, "
            "because this is the second rollback in this region"
        )
    return (
        f"rollback {rollback.number} of at most {max_rollbacks}: resuming from step {rollback.to_step} and skipping "
        f"steps {rollback.skip_first} to {rollback.skip_last}{lowered}"
    )
