"""What a run has gone back on: kept in its folder, so that no resume takes up a branch that was given up."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from accel_train.checkpoint import checkpoint_folders, remove, step_of
from accel_train.files import write_atomically
from accel_train.snapshot import read_trainer
from accel_train.state import CheckpointError, Rollback

ROLLBACKS = "rollbacks.json"


def write_rollbacks(run_folder: Path, rollbacks: Sequence[Rollback]) -> None:
    """Replace the record: written before anything else is changed, so that a kill at any point resumes on the new branch."""
    write_atomically(run_folder / ROLLBACKS, json.dumps([asdict(each) for each in rollbacks], indent=1).encode())


def read_rollbacks(run_folder: Path) -> list[Rollback]:
    """What was gone back on, oldest first.

    Raises:
        CheckpointError: the record cannot be read: without it, steps that were given up could come back.
    """
    path = run_folder / ROLLBACKS
    if not path.exists():
        return []
    try:
        return [Rollback(**record) for record in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); it says which steps are passed over. Move it away to go on without"
        ) from error


def remove_abandoned(root: Path, rollbacks: Sequence[Rollback]) -> None:
    """Remove the checkpoints of branches that were given up: made before a rollback, and after the step it went back to."""
    for folder in checkpoint_folders(root):
        step = step_of(folder) or 0
        if any(step > each.to_step for each in rollbacks[_known_to(folder) :]):
            remove(folder)


def _known_to(folder: Path) -> int:
    """How many rollbacks the run had behind it when it wrote a checkpoint; one that cannot be read knows of none."""
    try:
        return len(read_trainer(folder)["state"].get("rollbacks", ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
