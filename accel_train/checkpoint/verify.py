"""Implement `accel-train verify RUN`: compare each checkpoint with its digests, and name the one to resume from."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from accel_train.checkpoint.health import healthy_steps
from accel_train.checkpoint.rollback_log import abandoned, read_rollbacks
from accel_train.checkpoint.store import CheckpointStatus, changed_descriptions, check, checkpoint_folders
from accel_train.checkpoint.weight_files import (
    NO_DIGESTS,
    accept_weights,
    changes_in,
    damaged_weights,
    has_digests,
)


@dataclass(frozen=True)
class Verified:
    """The verified checkpoints of a run."""

    statuses: Sequence[CheckpointStatus]
    """Status of each checkpoint, oldest first."""
    healthy: Collection[int]
    """Steps of known-good checkpoints, usable for a rollback."""
    changed: Mapping[Path, Sequence[str]]
    """Changed files of valid checkpoints that a resume does not need."""
    abandoned: Collection[Path]
    """Checkpoints of a branch abandoned by a rollback. The next start removes them."""
    models: Mapping[Path, Mapping[str, str]]
    """What is wrong with the files of each written model (`model/`, `adapter/`), by name."""

    @property
    def newest(self) -> Path | None:
        """Return the checkpoint that a resume would use, or None."""
        usable = [each.path for each in self.statuses if each.problem is None and each.path not in self.abandoned]
        return usable[-1] if usable else None


def verify(run_folder: Path, *, accepts_weights: bool = False) -> Verified:
    """Verify every file of every checkpoint of a run and of its written model. Also takes a model folder alone.

    `accepts_weights` notes the digests of the model's files as they are.

    Raises:
        ValueError: the folder is neither a run folder nor a model folder.
        CheckpointError: the record of rollbacks cannot be read.
    """
    root = run_folder / "checkpoints"
    is_model = (run_folder / "config.json").is_file()
    if not (root.is_dir() or is_model):
        raise ValueError(f"{run_folder} does not contain a checkpoints folder. Give the output_dir of a run")
    folders = [run_folder] if is_model else [run_folder / name for name in ("model", "adapter")]
    folders = [folder for folder in folders if folder.is_dir()]
    for folder in folders if accepts_weights else ():
        accept_weights(folder)
    models = {folder: changes_in(folder) for folder in folders}
    if is_model:
        return Verified((), (), {}, (), models)
    statuses = [check(folder) for folder in checkpoint_folders(root)]
    changed = {each.path: changed_descriptions(each.path) for each in statuses if each.problem is None}
    return Verified(statuses, healthy_steps(root), changed, abandoned(root, read_rollbacks(run_folder)), models)


def model_problem(verified: Verified) -> str | None:
    """Return the first weight file of a written model that differs from the run's, with the fix, or None."""
    return next(filter(None, starmap(damaged_weights, verified.models.items())), None)


def format_verified(verified: Verified) -> str:
    """Return the table that the command prints."""
    width = max((len(status.path.name) for status in verified.statuses), default=10)
    lines = [f"{'checkpoint'.ljust(width)}  {'step':>10}  state"]
    for status in verified.statuses:
        state = status.problem or ("ok, healthy" if status.step in verified.healthy else "ok")
        if found := verified.changed.get(status.path):
            state += f" (changed since the save: {', '.join(found)})"
        if status.path in verified.abandoned:
            state += ", abandoned by a rollback"
        lines.append(f"{status.path.name.ljust(width)}  {status.step:>10}  {state}")
    for folder, problems in verified.models.items():
        found = "; ".join(f"{name} {problem}" for name, problem in problems.items())
        state = found or ("ok" if has_digests(folder) else NO_DIGESTS)
        lines.append(f"{f'{folder.name}/'.ljust(width)}  {'':>10}  {state}")
    if verified.newest is not None:
        lines.append(f"a resume would use {verified.newest.name}")
    return "\n".join(lines)
