"""Going on with a run: which checkpoint, whether it is of this very run, and the same answer on every process."""

import heapq
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from accel_train.agreement_check import who_lacks
from accel_train.checkpoint import (
    MANIFEST,
    CheckpointStatus,
    Digests,
    check,
    checkpoint_folders,
    newest_valid,
    read_trainer,
    remove_leftovers,
    set_broken_aside,
    step_of,
)
from accel_train.files import digests_of, write_atomically
from accel_train.identity import Change, identity_changes, identity_origins
from accel_train.ownership import RESOLVED_RECIPE, is_resolved_recipe, move_to_previous
from accel_train.recipe import Recipe
from accel_train.rollback_record import ROLLBACKS, read_rollbacks, remove_abandoned, rollbacks_of
from accel_train.snapshot import read_state
from accel_train.state import CheckpointError, Rollback

_FINISHED = ("summary.json", "model")
"""What only the end of a run leaves."""


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from (none: it starts), and newer ones that did not prove themselves."""

    path: Path | None
    broken: tuple[CheckpointStatus, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    """What earlier sittings have gone back on."""
    changes: tuple[Change, ...] = ()
    """In what the recipe differs from the checkpoint's, with the user's consent."""
    previous: Path | None = None
    """Where that was moved which this sitting does not go on from."""


def agree_on_checkpoint(recipe: Recipe, accelerator: Accelerator, identity: Mapping[str, Any]) -> Found:
    """The checkpoint to go on from, found by the main process and told to the others, which hash a part of its files each.

    Raises:
        ValueError: the checkpoint is of another run, or a process does not see it.
        CheckpointError: no checkpoint is valid.
    """
    is_alone = accelerator.num_processes == 1
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            found[0] = find_checkpoint(recipe, identity, digests_of if is_alone else _digests_together)
        except (ValueError, CheckpointError) as error:
            found[1] = error
        except OSError as error:
            found[1] = CheckpointError(f"the checkpoints of {recipe.output_dir} cannot be read: {error}")
    if not is_alone:
        found = _broadcast(found) if accelerator.is_main_process else _help(recipe)
    if found[1] is not None:
        raise found[1]
    result: Found = found[0]
    if is_alone or result.path is None:
        return result
    path, resume = _path_here(recipe, result.path), recipe.checkpoint.resume
    if resume != "auto" and (lacking := who_lacks(path / MANIFEST)):
        raise ValueError(
            f"checkpoint.resume={resume}: {lacking} does not see it; all processes read it: put it where they all can"
        )
    return replace(result, path=path)


def _path_here(recipe: Recipe, path: Path) -> Path:
    """A checkpoint that process 0 names, by the path that this process has for it."""
    if recipe.checkpoint.resume == "auto":
        return Path(recipe.output_dir) / "checkpoints" / path.name
    return Path(recipe.checkpoint.resume).resolve()


def _broadcast(values: list[Any]) -> list[Any]:
    return list(broadcast_object_list(values))


def _digests_together(folder: Path, names: Sequence[str]) -> dict[str, str | OSError]:
    """On process 0, as `digests_of`: each process reads a part of the files."""
    shares = shares_of({name: (folder / name).stat().st_size for name in names}, dist.get_world_size())
    _broadcast([folder, shares])
    found = _digest_share(folder, shares)
    # What another process could not read is for this one to judge, as the others' disks are not the checkpoint's.
    return found | digests_of(folder, [name for name in names if isinstance(found[name], OSError)])


def _help(recipe: Recipe) -> list[Any]:
    """On the others: hash what process 0 gives to this one, until it says what it has found."""
    while True:
        told = _broadcast([None, None])
        if not isinstance(told[0], Path):
            return told
        _digest_share(_path_here(recipe, told[0]), told[1])


def _digest_share(folder: Path, shares: Sequence[Sequence[str]]) -> dict[str, str | OSError]:
    everywhere: list[Any] = [None] * len(shares)
    dist.all_gather_object(everywhere, digests_of(folder, shares[dist.get_rank()]))
    return {name: digest for found in everywhere for name, digest in found.items()}


def shares_of(sizes: Mapping[str, int], num_shares: int) -> list[list[str]]:
    """Return the names of files in shares of about the same number of bytes: the largest first, each to the smallest share."""
    shares: list[list[str]] = [[] for _ in range(num_shares)]
    smallest = [(0, number) for number in range(num_shares)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        num_bytes, number = heapq.heappop(smallest)
        shares[number].append(name)
        heapq.heappush(smallest, (num_bytes + sizes[name], number))
    return shares


def find_checkpoint(recipe: Recipe, identity: Mapping[str, Any], digests: Digests = digests_of) -> Found:
    """The newest valid checkpoint of this very run, or the one the recipe names; `never` sets an old run's aside."""
    folder, resume = Path(recipe.output_dir), recipe.checkpoint.resume
    root = folder / "checkpoints"
    _prove_writable(root)
    remove_leftovers(folder)
    remove_leftovers(root)
    if resume == "never":
        return Found(None, previous=set_aside(folder))
    broken: list[CheckpointStatus] = []
    rollbacks = read_rollbacks(folder)
    if resume == "auto":
        remove_abandoned(root, rollbacks)
        newest, broken = newest_valid(root, digests)
        if newest is None:
            _refuse_finished(folder)
            return Found(None, rollbacks=tuple(rollbacks))
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
    changes = identity_changes(trainer["identity"], trainer.get("origins", {}), identity, origins)
    if changes and not recipe.checkpoint.accept_changes:
        raise ValueError(refusal(path, changes))
    previous = None
    if resume != "auto" and path.parent == root.resolve():
        newer = [found for found in checkpoint_folders(root) if (step_of(found) or 0) > (step_of(path) or 0)]
        previous = move_to_previous(folder, newer, "checkpoints") if newer else None
    elif resume != "auto":
        previous, rollbacks = set_aside(folder), rollbacks_of(path)
    for status in broken:
        set_broken_aside(status.path)
    return Found(path, tuple(broken), tuple(rollbacks), tuple(changes), previous)


def _prove_writable(root: Path) -> None:
    """A folder that cannot be written is found before a model is built, not when the first checkpoint is due."""
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is no folder, and checkpoints are to be written there; move it away")
    try:
        if root.exists():
            write_atomically(root / f".probe-{secrets.token_hex(4)}", b"", durable=False).unlink()
    except OSError as error:
        raise ValueError(f"{root} cannot be written: {error.strerror}; give another output_dir") from error


def _refuse_finished(folder: Path) -> None:
    """A finished run whose checkpoints were removed is no empty folder: a new run in it would replace its model."""
    left = [name for name in _FINISHED if (folder / name).exists()]
    if left:
        raise ValueError(
            f"output_dir={folder} holds {left[0]} of an earlier run, and its checkpoints are gone; give another output_dir; or "
            "--checkpoint.resume never, to start anew and keep the old run in previous-N"
        )


def refusal(path: Path, changes: Sequence[Change]) -> str:
    """Why a run does not go on from a checkpoint: what has changed, who set it, a line each, and what can be done."""
    return "\n".join(
        (
            f"{path} is of another run; since it was written, this has changed:",
            *(f"  {change}" for change in changes),
            "give another output_dir; or --checkpoint.resume never, to start anew and keep the old run beside it; or "
            "--accept-changes, to go on all the same",
        )
    )


def set_aside(run_folder: Path) -> Path | None:
    """Move what an earlier run left into `previous-N/`, so that starting anew loses nothing; returns that folder."""
    names = (
        *("metrics.jsonl", "events.jsonl", "evaluation.json", "adapter", "report.html"),
        *(RESOLVED_RECIPE, "incidents", *_FINISHED, ROLLBACKS),
        "checkpoints",  # last: while they are there, a start after a kill sets aside what is left
    )
    if not any((run_folder / name).exists() for name in (*_FINISHED, ROLLBACKS, "checkpoints")):
        return None
    left = [*run_folder.glob("report-*.png"), *(run_folder / name for name in names if (run_folder / name).exists())]
    if not (run_folder / RESOLVED_RECIPE).exists() and is_resolved_recipe(
        run_folder / "recipe.yaml"
    ):  # an older version's
        left.insert(0, run_folder / "recipe.yaml")
    return move_to_previous(run_folder, left)
