"""Resuming a run: which checkpoint, whether it is of this very run, and the same answer on every process."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from accel_train.checkpoint.fingerprint import (
    Change,
    Settings,
    identity_changes,
    identity_origins,
    setting_changes,
)
from accel_train.checkpoint.rollback_log import ROLLBACKS, read_rollbacks, remove_abandoned, rollbacks_of
from accel_train.checkpoint.store import (
    MANIFEST,
    CheckpointStatus,
    Digests,
    changed_descriptions,
    check,
    checkpoint_folders,
    newest_valid,
    read_trainer,
    remove_leftovers,
    set_broken_aside,
    step_of,
)
from accel_train.checkpoint.trainer_state import read_state
from accel_train.core.errors import CheckpointError
from accel_train.core.files import digests_of, move_to_previous, write_atomically
from accel_train.core.ownership import RUN_NAMES
from accel_train.core.state import Rollback
from accel_train.recipe.schema import Recipe
from accel_train.runtime.consistency import who_lacks
from accel_train.runtime.process_group import on_main
from accel_train.runtime.signals import StopRequest

BY_ITSELF = ("auto", "unchanged")
"""Values of `checkpoint.resume` with which a run looks for its newest checkpoint."""
_FINISHED = ("summary.json", "model")
"""Files that only the end of a run leaves."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from (none: it starts), and newer ones that are damaged."""

    path: Path | None
    broken: tuple[CheckpointStatus, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    """Rollbacks of earlier launches."""
    changes: tuple[Change, ...] = ()
    """Accepted differences from the checkpoint's recipe; without a checkpoint, the cause of the new run."""
    changed: tuple[str, ...] = ()
    """Files of the checkpoint that were changed since it was saved, and that a resume does without."""
    previous: Path | None = None
    """The folder to which newer files were moved that this launch does not resume from."""


def agree_on_checkpoint(
    recipe: Recipe, accelerator: Accelerator, identity: Mapping[str, Any], settings: Settings
) -> ResumePoint:
    """Return the checkpoint to resume from: the main process finds it, and each process hashes a share of its files.

    Raises:
        ValueError: the checkpoint is of another run, or a process does not see it.
        CheckpointError: no checkpoint is valid.
    """
    is_alone = accelerator.num_processes == 1

    def find() -> ResumePoint:
        try:
            return find_checkpoint(recipe, identity, digests_of if is_alone else _digests_together, settings)
        except OSError as error:
            raise CheckpointError(f"the checkpoints of {recipe.output_dir} cannot be read: {error}") from error
        finally:
            if not is_alone:
                with StopRequest.held():
                    broadcast_object_list([None, None])  # nothing is left to hash

    if not accelerator.is_main_process:
        _help(recipe)
    result = on_main(find)
    if is_alone or result.path is None:
        return result
    path, resume = _path_here(recipe, result.path), recipe.checkpoint.resume
    if resume not in BY_ITSELF and (lacking := who_lacks(path / MANIFEST)):
        raise ValueError(
            f"checkpoint.resume={resume}: {lacking} does not see it; all processes read it: put it where they all can"
        )
    return replace(result, path=path)


def _path_here(recipe: Recipe, path: Path) -> Path:
    """Return this process's path of a checkpoint that process 0 names."""
    if recipe.checkpoint.resume in BY_ITSELF:
        return Path(recipe.output_dir) / "checkpoints" / path.name
    return Path(recipe.checkpoint.resume).resolve()


def _digests_together(folder: Path, names: Sequence[str]) -> dict[str, str | OSError]:
    """Return `digests_of` the files, on process 0: each process reads a share of them."""
    shares = shares_of({name: (folder / name).stat().st_size for name in names}, dist.get_world_size())
    with StopRequest.held():
        broadcast_object_list([folder, shares])
        found = _digest_share(folder, shares)
    # What another process could not read is for this one to judge, as the others' disks are not the checkpoint's.
    return found | digests_of(folder, [name for name in names if isinstance(found[name], OSError)])


def _help(recipe: Recipe) -> None:
    """On the others: hash the files that process 0 gives to this one, until nothing is left."""
    while True:
        folder, shares = broadcast_object_list([None, None])
        if folder is None:
            return
        _digest_share(_path_here(recipe, folder), shares)


def _digest_share(folder: Path, shares: Sequence[Sequence[str]]) -> dict[str, str | OSError]:
    everywhere: list[Any] = [None] * len(shares)
    dist.all_gather_object(everywhere, digests_of(folder, shares[dist.get_rank()]))
    return {name: digest for found in everywhere for name, digest in found.items()}


def shares_of(sizes: Mapping[str, int], num_shares: int) -> list[list[str]]:
    """Return the names of files in shares of about the same number of bytes: the largest first, each to the smallest share."""
    shares: list[list[str]] = [[] for _ in range(num_shares)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        min(shares, key=lambda share: sum(sizes[each] for each in share)).append(name)
    return shares


def find_checkpoint(
    recipe: Recipe, identity: Mapping[str, Any], digests: Digests = digests_of, settings: Settings | None = None
) -> ResumePoint:
    """Return the newest valid checkpoint of this run, or the one that the recipe names.

    `never` archives those of an old run; so does `unchanged`, where the identity or the settings differ.
    """
    folder, resume = Path(recipe.output_dir), recipe.checkpoint.resume
    root = folder / "checkpoints"
    _prove_writable(root)
    remove_leftovers(folder)
    remove_leftovers(root)
    if resume == "never":
        return ResumePoint(None, previous=set_aside(folder))
    broken: list[CheckpointStatus] = []
    rollbacks = read_rollbacks(folder)
    if resume in BY_ITSELF:
        remove_abandoned(root, rollbacks)
        newest, broken = newest_valid(root, digests)
        if newest is None:
            _refuse_finished(folder)
            return ResumePoint(None, rollbacks=tuple(rollbacks))
        path = newest
    else:
        path = Path(resume).resolve()
        status = check(path, digests)
        if status.problem is not None:
            raise CheckpointError(
                f"checkpoint.resume={resume}: {status.problem}; `accel-train verify RUN` lists what is valid"
            )
    trainer = read_trainer(path)
    read_state(path)  # before anything is built
    origins = identity_origins(recipe, identity)
    changes = identity_changes(trainer["identity"], trainer["origins"], identity, origins)
    if resume == "unchanged" and not recipe.checkpoint.accept_changes:
        changes += [] if settings is None else setting_changes(trainer, settings)
        # A folder of another task was probably given by mistake.
        if changes and all(change.name != "task" for change in changes):
            return ResumePoint(None, changes=tuple(changes), previous=set_aside(folder))
    if changes and not recipe.checkpoint.accept_changes:
        raise ValueError(refusal(path, changes))
    previous = None
    if resume not in BY_ITSELF and path.parent == root.resolve():
        newer = [found for found in checkpoint_folders(root) if (step_of(found) or 0) > (step_of(path) or 0)]
        previous = move_to_previous(folder, newer, "checkpoints") if newer else None
    elif resume not in BY_ITSELF:
        previous, rollbacks = set_aside(folder), rollbacks_of(path)
    for status in broken:
        set_broken_aside(status.path)
    changed = tuple(changed_descriptions(path))
    return ResumePoint(path, tuple(broken), tuple(rollbacks), tuple(changes), changed, previous)


def _prove_writable(root: Path) -> None:
    """Refuse a folder that cannot be written before a model is built, not when the first checkpoint is due."""
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is no folder, and checkpoints are to be written there; move it away")
    try:
        if root.exists():
            write_atomically(root / f".probe-{secrets.token_hex(4)}", b"", durable=False).unlink()
    except OSError as error:
        raise ValueError(f"{root} cannot be written: {error.strerror}; give another output_dir") from error


def _refuse_finished(folder: Path) -> None:
    """Refuse the folder of a finished run whose checkpoints were removed: a new run would replace its model."""
    left = [name for name in _FINISHED if (folder / name).exists()]
    if left:
        raise ValueError(
            f"output_dir={folder} holds {left[0]} of an earlier run, and its checkpoints are gone; give another output_dir; or "
            "--checkpoint.resume never, to start anew and keep the old run in previous-N"
        )


def refusal(path: Path, changes: Sequence[Change]) -> str:
    """Return why a run does not resume from a checkpoint: what has changed and who set it, a line each, and what to do."""
    return "\n".join(
        (
            f"{path} is of another run; since it was written, this has changed:",
            *(f"  {change}" for change in changes),
            "give another output_dir; or --checkpoint.resume never, to start anew and keep the old run next to it; or "
            "--accept-changes, to resume all the same",
        )
    )


def set_aside(run_folder: Path) -> Path | None:
    """Move what an earlier run left into `previous-N/`, so that starting anew loses nothing; returns that folder."""
    # The checkpoints are last: while they are there, a start after a kill sets aside what is left.
    names = ["profile", *(name for name in RUN_NAMES if not name.startswith("."))]
    if not any((run_folder / name).exists() for name in (*_FINISHED, ROLLBACKS, "checkpoints")):
        return None
    return move_to_previous(run_folder, [run_folder / name for name in names if (run_folder / name).exists()])
