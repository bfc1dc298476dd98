"""What a run has gone back on: kept in its folder, so that no resume takes up a branch that was given up."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from accel_train.checkpoint import checkpoint_folders, read_json, read_trainer, remove, step_of
from accel_train.files import write_atomically
from accel_train.state import CheckpointError, Rollback, TrainState

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
        return [Rollback(**record) for record in read_json(path)]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); it says which steps are passed over. Move it away to go on without"
        ) from error


def rollbacks_of(folder: Path) -> list[Rollback]:
    """What the run that wrote a checkpoint had gone back on until then.

    Raises:
        CheckpointError: it is not what a run writes.
    """
    try:
        return [Rollback(**each) for each in read_trainer(folder)["state"].get("rollbacks", ())]
    except TypeError as error:
        raise CheckpointError(f"{folder}: its rollbacks cannot be read ({error})") from error


def abandoned(root: Path, rollbacks: Sequence[Rollback]) -> list[Path]:
    """The checkpoints of branches that were given up: made before a rollback, and after the step it went back to."""
    if not rollbacks:
        return []
    return [
        folder
        for folder in checkpoint_folders(root)
        if any((step_of(folder) or 0) > each.to_step for each in rollbacks[_known_to(folder, rollbacks) :])
    ]


def remove_abandoned(root: Path, rollbacks: Sequence[Rollback]) -> None:
    """Remove what was given up, the newest first: where this is cut short, the rest is found again."""
    for folder in reversed(abandoned(root, rollbacks)):
        remove(folder)


def _known_to(folder: Path, rollbacks: Sequence[Rollback]) -> int:
    """How many rollbacks the run had behind it when it wrote a checkpoint; one that cannot be read is broken, and stays."""
    try:
        return len(rollbacks_of(folder))
    except CheckpointError:
        return len(rollbacks)


def take_up(state: TrainState, rollbacks: Sequence[Rollback]) -> None:
    """Tell restored counters of the rollbacks that came after them: the same right after one, and on a resume after a kill."""
    if len(rollbacks) > len(state.rollbacks):
        state.last_incident = rollbacks[-1].at_step
        state.num_skipped_steps = rollbacks[-1].num_skipped_steps
    state.rollbacks = list(rollbacks)


def describe(rollback: Rollback, max_rollbacks: int) -> str:
    """A rollback in a sentence."""
    lowered = ""
    if rollback.learning_rate_factor != 1:
        lowered = (
            f"; the learning rate is x{rollback.learning_rate_factor:g} up to step {rollback.lowered_until}, "
            "because it is the second time here"
        )
    return (
        f"rollback {rollback.number} of {max_rollbacks} allowed: going on from step {rollback.to_step}, and passing over "
        f"steps {rollback.skip_first} to {rollback.skip_last}{lowered}"
    )
