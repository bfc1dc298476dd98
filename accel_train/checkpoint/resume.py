"""Resume a run: find the checkpoint, check that it belongs to the run, and agree on it across processes."""

import heapq
import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from pydantic import TypeAdapter, ValidationError

from accel_train.checkpoint.fingerprint import (
    Change,
    Settings,
    identity_changes,
    identity_origins,
    setting_changes,
    until,
    upgraded,
)
from accel_train.checkpoint.rollback_log import ROLLBACKS, read_rollbacks, remove_abandoned, rollbacks_of
from accel_train.checkpoint.store import (
    MANIFEST,
    TRAINER,
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
from accel_train.core.errors import CheckpointError, SettingError, setting_error
from accel_train.core.files import digests_of, move_to_previous, write_atomically
from accel_train.core.json_io import read_plain_json
from accel_train.core.ownership import RUN_NAMES
from accel_train.core.state import JsonRecord, Rollback, TrainState
from accel_train.recipe.schema import Recipe
from accel_train.runtime.consistency import who_lacks
from accel_train.runtime.process_group import on_main
from accel_train.runtime.signals import StopRequest
from accel_train.task import FirstFingerprint

BY_ITSELF = ("auto", "unchanged")
"""Values of `checkpoint.resume` with which a run finds its newest checkpoint."""
_FINISHED = ("summary.json", "model")
"""Files that only a finished run leaves."""
_STATE = TypeAdapter(TrainState)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from (None: start a new run), and newer damaged checkpoints."""

    path: Path | None
    broken: tuple[CheckpointStatus, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    """Rollbacks of earlier launches."""
    changes: tuple[Change, ...] = ()
    """Accepted differences from the checkpoint's recipe. Without a checkpoint, the reason for a new run."""
    changed: tuple[str, ...] = ()
    """Changed files of the checkpoint that a resume does not need."""
    previous: Path | None = None
    """Folder with newer files, moved because this launch does not resume from them."""


def agree_on_checkpoint(
    recipe: Recipe,
    accelerator: Accelerator,
    identity: JsonRecord,
    settings: Settings,
    first_fingerprint: FirstFingerprint,
) -> ResumePoint:
    """Return the checkpoint to resume from. The main process finds it, and each process hashes a share of its files.

    `first_fingerprint` is the fingerprint of the data in the first format (`TaskData.first_fingerprint`).

    Raises:
        ValueError: the checkpoint belongs to another run, or a process does not see it.
        CheckpointError: no checkpoint is valid.
    """
    is_alone = accelerator.num_processes == 1

    def find() -> ResumePoint:
        try:
            digests = digests_of if is_alone else _digests_together
            return find_checkpoint(recipe, identity, digests, settings, first_fingerprint)
        except OSError as error:
            raise CheckpointError(f"the checkpoints of {recipe.output_dir} cannot be read: {error}") from error
        finally:
            if not is_alone:
                with StopRequest.held():
                    # Nothing is left to hash.
                    broadcast_object_list([None, None])

    if not accelerator.is_main_process:
        _help(recipe)
    result = on_main(find)
    if is_alone or result.path is None:
        return result
    path, resume = _path_here(recipe, result.path), recipe.checkpoint.resume
    if resume not in BY_ITSELF and (lacking := who_lacks(path / MANIFEST)):
        remedy = "Put it on storage that all processes can read"
        raise setting_error("checkpoint.resume", resume, f"{lacking} does not see this checkpoint", remedy)
    return replace(result, path=path)


def _path_here(recipe: Recipe, path: Path) -> Path:
    """Return this process's path of a checkpoint that process 0 names."""
    if recipe.checkpoint.resume in BY_ITSELF:
        return Path(recipe.output_dir) / "checkpoints" / path.name
    return Path(recipe.checkpoint.resume).resolve()


def _digests_together(folder: Path, names: Sequence[str]) -> dict[str, str | OSError]:
    """Return `digests_of` the files, on process 0. Each process reads a share."""
    shares = shares_of({name: (folder / name).stat().st_size for name in names}, dist.get_world_size())
    with StopRequest.held():
        broadcast_object_list([folder, shares])
        found = _digest_share(folder, shares)
    # Process 0 decides on files that another process could not read. Only its own view of the checkpoint counts.
    return found | digests_of(folder, [name for name in names if isinstance(found[name], OSError)])


def _help(recipe: Recipe) -> None:
    """Hash the files that process 0 assigns, until nothing is left. Runs on all other processes."""
    while True:
        folder, shares = broadcast_object_list([None, None])
        if folder is None:
            return
        _digest_share(_path_here(recipe, folder), shares)


def _digest_share(folder: Path, shares: Sequence[Sequence[str]]) -> dict[str, str | OSError]:
    everywhere: list[Any] | None = [None] * len(shares) if dist.get_rank() == 0 else None
    dist.gather_object(digests_of(folder, shares[dist.get_rank()]), everywhere)
    return {name: digest for found in everywhere or () for name, digest in found.items()}


def shares_of(sizes: Mapping[str, int], num_shares: int) -> list[list[str]]:
    """Return file names in shares of about equal bytes. Largest files first, each goes to the smallest share."""
    shares: list[list[str]] = [[] for _ in range(num_shares)]
    loads = [(0, number) for number in range(num_shares)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        num_bytes, number = loads[0]
        shares[number].append(name)
        heapq.heapreplace(loads, (num_bytes + sizes[name], number))
    return shares


def find_checkpoint(
    recipe: Recipe, identity: JsonRecord, digests: Digests, settings: Settings, first_fingerprint: FirstFingerprint
) -> ResumePoint:
    """Return the newest valid checkpoint of this run, or the checkpoint that the recipe names.

    `never` archives the checkpoints of an old run. `unchanged` does so if the fingerprint or the settings differ.
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
                f"checkpoint.resume={resume}: {status.problem}. Run `accel-train verify RUN` to list valid checkpoints"
            )
    trainer = read_trainer(path)
    # Checked before anything is built.
    read_state(path)
    origins = identity_origins(recipe, identity)
    saved = upgraded(trainer["identity"], identity, first_fingerprint)
    step = step_of(path) or 0
    changes = identity_changes(until(saved, step), trainer["origins"], until(identity, step), origins, recipe)
    if resume == "unchanged" and not recipe.checkpoint.accept_changes:
        changes += setting_changes(trainer, settings, recipe)
        # A folder of another task was probably given by mistake.
        if changes and all(change.name != "task" for change in changes):
            return ResumePoint(None, changes=tuple(changes), previous=set_aside(folder))
    if changes and not recipe.checkpoint.accept_changes:
        raise SettingError(refusal(path, changes), settings=tuple(change.name for change in changes))
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
    """Check that the checkpoint folder is writable, before a model is built.

    Otherwise, the error would appear only at the first checkpoint.
    """
    if root.exists() and not root.is_dir():
        raise SettingError("checkpoints are written here, but it is not a folder", "Move it away", at=str(root))
    try:
        if root.exists():
            write_atomically(root / f".probe-{secrets.token_hex(4)}", b"", durable=False).unlink()
    except OSError as error:
        problem = f"{root} cannot be written: {error.strerror}"
        raise SettingError(problem, "Use another output_dir", settings=("output_dir",)) from error


def _refuse_finished(folder: Path) -> None:
    """Refuse the folder of a finished run without checkpoints, because a new run would replace its model."""
    left = [name for name in _FINISHED if (folder / name).exists()]
    if left:
        raise SettingError(
            f"the folder contains {left[0]} of an earlier run, but its checkpoints are gone",
            "Use another output_dir, or set --checkpoint.resume never to start a new run and keep the old one in "
            "previous-N",
            f"output_dir={folder}",
            ("output_dir", "checkpoint.resume"),
        )


def refusal(path: Path, changes: Sequence[Change]) -> str:
    """Return why a run cannot resume from a checkpoint: changes with their origins, one per line, and the fix."""
    return "\n".join(
        (
            f"{path} belongs to another run. Changes since it was written:",
            *(f"  {change}" for change in changes),
            "Use another output_dir, set --checkpoint.resume never to start a new run and keep the old one next to it, "
            "or add --accept-changes to resume anyway",
        )
    )


def set_aside(run_folder: Path) -> Path | None:
    """Move the files of an earlier run into `previous-N/`, and return that folder or None."""
    # Checkpoints come last: if a kill interrupts the moves, the next start finds them and moves the rest.
    names = ["profile", *(name for name in RUN_NAMES if not name.startswith("."))]
    if not any((run_folder / name).exists() for name in (*_FINISHED, ROLLBACKS, "checkpoints")):
        return None
    return move_to_previous(run_folder, [run_folder / name for name in names if (run_folder / name).exists()])


def read_state(folder: Path) -> TrainState:
    """Return the counters of a checkpoint after checking that a run can have had them.

    Raises:
        CheckpointError: a counter has the wrong type or range, or the step is not the saved step.
    """
    trainer = read_trainer(folder)
    try:
        saved_step = read_plain_json(folder / MANIFEST)["step"]
        state = _STATE.validate_json(json.dumps(trainer["state"]), strict=True)
        unknown = trainer["state"].keys() - {field.name for field in fields(TrainState)}
        last = trainer["identity"]["schedule.max_steps"]
        problems = [f"{name} is unknown" for name in sorted(unknown)]
        # Only losses, metrics and logarithms may be negative.
        signed = ("losses", "grad_norms", "best_metric", "best_loss", "last_loss")
        counters = asdict(state)
        for name, value in counters.pop("untrained").items():
            if not math.isfinite(value):
                problems.append(f"untrained.{name}={value} is out of range")
        for name, value in _numbers(counters):
            if not math.isfinite(value) or (value < 0 and name not in signed):
                problems.append(f"{name}={value} is out of range")
        if state.step != saved_step:
            problems.append(f"step={state.step}, but the checkpoint belongs to step {saved_step}")
        if state.step > last:
            problems.append(f"step={state.step}, but the last step of the run is {last}")
        scaler = trainer["scaler"] or {}
        for name, value in scaler.items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                problems.append(f"scaler.{name}={value!r} is out of range")
    except ValidationError as error:
        first = error.errors()[0]
        problems = [f"{'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise CheckpointError(f"{folder / TRAINER}: invalid run state: {problems[0]} (of {len(problems)})")
    return state


def _numbers(tree: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from _numbers(each)
            elif each is not None:
                yield name, each
