"""Checkpoint folders: staged, synced, published in one rename, verified by digests, and rotated last.

A folder `step-00000100` is used only if it is complete and matches its manifest. Only safetensors and JSON are written
and read, so opening a checkpoint runs no code. Checkpoints are ordered by step number, not by file times.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.core.errors import CheckpointError
from accel_train.core.files import digests_of, follow_umask, is_seen, make_folders, publish_folder, sha256, sync
from accel_train.core.json_io import read_plain_json, write_plain_json

MANIFEST, TRAINER = "manifest.json", "trainer.json"
STATE_FILES = (TRAINER, "shards.json", "trainer_state.json", "scheduler.json")
"""Files that a resume reads, in addition to safetensors files. Others only describe the model."""
FORMAT = 1
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""Suffixes of files that could run code on loading."""
_STEP_FOLDER = re.compile(r"step-(\d{8,20})")
_LEFT_FOLDER = re.compile(r"\.(tmp|trash)-(step-\d{8}|model$|adapter$)")
_LEFT_FILE = re.compile(
    r"\.(\.accel_train\.json|\.lock\.holder|\.probe[^.]*|(metrics|summary|evaluation[^.]*|rollbacks|healthy|trackers"
    r"|recipe\.resolved|report|find-lr|predictions)\.[a-z]+)\.\w+\.tmp|\.shared-\w+\.tmp"
)
"""Temporary names that only this program uses. Other files in the run folder belong to the user."""

Writer = Callable[[Path], object]
"""Function that writes one file to the given path."""
FileFacts = dict[str, Any]
"""Facts about a file in the manifest: bytes, sha256."""
Digests = Callable[[Path, Sequence[str]], Mapping[str, str | OSError]]
"""Function like `files.digests_of`: digests of files in a folder by name, or the error for a file."""


Files = dict[str, tuple[int, int, int]]
"""Files below a folder by relative path: size, modification time, inode."""


class GivenUp(Exception):
    """Raised when a save is no longer wanted. Its partial files are removed."""


@dataclass(frozen=True)
class CheckpointStatus:
    """The result of `check` for one folder. If `problem` is None, a resume can use it."""

    path: Path
    step: int
    problem: str | None


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for any other name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def checkpoint_folders(root: Path) -> list[Path]:
    """Return the published checkpoints under `root`, oldest step first."""
    if not root.is_dir():
        return []
    found = [(step, folder) for folder in root.iterdir() if (step := step_of(folder)) is not None and folder.is_dir()]
    return [folder for _, folder in sorted(found)]


def steps_of(root: Path) -> list[int]:
    """Return the steps of the published checkpoints, oldest first."""
    return [step for folder in checkpoint_folders(root) if (step := step_of(folder)) is not None]


def publish(
    root: Path,
    step: int,
    writers: Mapping[str, Writer],
    *,
    given_up: Callable[[], bool] = lambda: False,
    others: Callable[[Path], Mapping[str, FileFacts]] = lambda folder: {},
) -> Path:
    """Write a checkpoint atomically, and return its folder.

    A kill, a full disk or a power cut leaves the old checkpoints or the complete new one. `others` writes and syncs
    more files into the given folder, and returns their facts.

    Raises:
        CheckpointError: the checkpoint could not be written. Partial files are removed; older checkpoints stay.
        GivenUp: `given_up` returned True. It is called before each file.
    """
    final = folder_of(root, step)
    try:
        make_folders(root)
        with publish_folder(final, root / f".tmp-{final.name}-{os.getpid()}") as staging:
            _go_on_unless(given_up())
            files = {**others(staging)}
            for name, write in writers.items():
                _go_on_unless(given_up())
                make_folders((staging / name).parent)
                write(staging / name)
                files[name] = facts_of(staging / name)
                if (inner := (staging / name).parent) != staging:
                    sync(inner)
            _check_written(staging, files)
            manifest = staging / MANIFEST
            manifest.write_text(
                json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1), encoding="utf-8"
            )
            sync(manifest)
            _go_on_unless(given_up())
            longer = _make_way(final)
    except GivenUp:
        raise
    # safetensors and the file system raise their own types. Each leaves the old checkpoints.
    except Exception as error:
        raise CheckpointError(f"checkpoint of step {step} could not be written to {root}: {error}") from error
    if longer.exists():
        # The new checkpoint is published. Rotation will remove the other.
        with suppress(OSError):
            remove(longer)
    return final


def _check_written(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """Check that process 0 sees the files of other processes, before older checkpoints are removed."""
    for name, facts in files.items():
        if not is_seen(folder / name, facts["bytes"]):
            raise CheckpointError(
                f"{name} was written ({facts['bytes']} bytes), but process 0 does not see it. Use an output_dir that "
                "all machines share"
            )


def facts_of(path: Path) -> FileFacts:
    """Sync a new file, and return its size and digest."""
    follow_umask(path)
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _go_on_unless(given_up: bool) -> None:
    if given_up:
        raise GivenUp


def _make_way(final: Path) -> Path:
    """Rename an existing checkpoint of this step to a longer name of the same step, and return that name.

    The longer name stays valid until the new checkpoint is published.
    """
    longer = final.with_name(f"step-{step_of(final):020d}")
    if final.exists():
        if longer.exists():
            remove(longer)
        final.rename(longer)
    return longer


def rotate(
    root: Path,
    keep: int,
    spared_steps: Collection[int | None] = (),
    on_kept: Callable[[Path], object] = lambda folder: None,
) -> list[Path]:
    """Remove all checkpoints except the newest `keep` and the spared steps (such as the best). Return those removed.

    `on_kept` is called with each folder that `remove` leaves.

    Raises:
        OSError: a checkpoint could not be removed; the others are removed.
    """
    doomed = [folder for folder in checkpoint_folders(root)[:-keep] if step_of(folder) not in spared_steps]
    failure: OSError | None = None
    for folder in doomed:
        try:
            if (kept := remove(folder)) is not None:
                on_kept(kept)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure
    return doomed


def remove_leftovers(folder: Path) -> None:
    """Remove partial files of a killed run. Call this only while the run folder is locked."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if _LEFT_FOLDER.match(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
            elif _LEFT_FILE.fullmatch(entry.name):  # from files.write_atomically and agreement_check
                with suppress(OSError):
                    entry.unlink()


def set_broken_aside(folder: Path) -> Path:
    """Rename a broken checkpoint, so that it is neither counted by rotation nor verified again."""
    return folder.rename(free_path(folder.with_name(f"broken-{folder.name}")))


def free_path(path: Path) -> Path:
    """Return the path, with a number after its name if the path exists."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def check(folder: Path, digests: Digests = digests_of) -> CheckpointStatus:
    """Check the files of a checkpoint that a resume reads against the manifest: names, sizes, SHA-256."""
    step = step_of(folder)
    try:
        problem = _problem(folder, step, digests)
    except OSError as error:
        problem = f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    return CheckpointStatus(folder, -1 if step is None else step, problem)


def _problem(folder: Path, step: int | None, digests: Digests) -> str | None:
    if folder.is_symlink() or not folder.is_dir():
        return "it is a symbolic link" if folder.is_symlink() else "the folder does not exist"
    if not (folder / MANIFEST).exists():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_plain_json(folder / MANIFEST)
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, but this version reads {FORMAT}"
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        manifest_step = int(manifest["step"])
        added = set(map(str, manifest.get("added", [])))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if step is not None and manifest_step != step:
        return f"{MANIFEST} belongs to step {manifest_step}"
    present = {entry.name for entry in folder.iterdir()} - {MANIFEST}
    strict = [name for name in files if not describes(name)]
    for name in files:
        path = folder / name
        parts = Path(name).parts
        is_inside = len(parts) == 1 or path.parent.resolve().is_relative_to(folder.resolve())
        if not is_inside or ".." in parts or str(Path(name)) != name or name == ".":
            return f"{MANIFEST} names {name!r}, which is not a file of the checkpoint"
        if describes(name):
            if path.suffix == ".json" and _is_plain_file(path) and not _is_json(path):
                return f"{name} is not JSON"
            continue
        if parts[0] not in present or not _is_plain_file(path):
            return f"{name} is missing"
        if path.stat().st_size != files[name][0]:
            return f"{name} has {path.stat().st_size} bytes, not {files[name][0]}"
    found = digests(folder, strict)
    for name in strict:
        if isinstance(result := found[name], OSError):
            raise result
        if result != files[name][1]:
            return f"{name} differs from its digest"
    extra = {name for name in present if not describes(name)} - files.keys() - added
    return f"{sorted(extra)[0]} is not in {MANIFEST}" if extra else None


def _is_json(path: Path) -> bool:
    try:
        read_plain_json(path)
    except ValueError:
        return False
    return True


def describes(name: str) -> bool:
    """Return whether a resume does not need this file. Such a file describes how to load the weights elsewhere."""
    return not name.endswith((".safetensors", *PICKLES)) and name not in STATE_FILES


def changed_descriptions(folder: Path) -> list[str]:
    """Return the files of a valid checkpoint that were changed, added or removed, and that a resume does not need."""
    manifest = read_plain_json(folder / MANIFEST)
    files, added = manifest["files"], set(manifest.get("added", []))
    named = [name for name in files if describes(name)]
    found = digests_of(folder, [name for name in named if (folder / name).exists() and _is_plain_file(folder / name)])
    changed = {
        name
        for name in named
        if found.get(name) != files[name]["sha256"] or (folder / name).stat().st_size != files[name]["bytes"]
    }
    foreign = {name for name in files_below(folder) if name not in files and name not in added} - {MANIFEST}
    foreign |= {entry.name for entry in folder.iterdir() if entry.is_dir() and not any(entry.iterdir())}
    return sorted(changed | foreign)


def files_below(folder: Path) -> Files:
    """Return the files in a folder and its subfolders, without following links."""
    found: Files = {}
    for where, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        for name in (*names, *links):
            facts = (path := Path(where) / name).lstat()
            found[path.relative_to(folder).as_posix()] = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
    return found


def accept_changes(folder: Path, before: Files) -> list[str]:
    """Accept the files that a callback changed in a checkpoint since `before`, and note them in the manifest.

    Returns:
        Changed files of weights or state. Their digests stay, so that a resume refuses the checkpoint.
    """
    now = files_below(folder)
    touched = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    if not touched:
        return []
    manifest = read_plain_json(folder / MANIFEST)
    files, added = manifest["files"], set(manifest.get("added", []))
    broken = []
    for name in sorted(set(touched) - {MANIFEST}):
        if name not in files:
            added = added | {name} if name in now else added - {name}
        elif describes(name):
            files.pop(name)
            if name in now:
                files[name] = facts_of(folder / name)
        elif name not in now or sha256(folder / name) != files[name]["sha256"]:
            broken.append(name)
    write_plain_json(folder / MANIFEST, {**manifest, "files": files, "added": sorted(added)})
    return broken


def newest_valid(root: Path, digests: Digests = digests_of) -> tuple[Path | None, list[CheckpointStatus]]:
    """Return the newest valid checkpoint, and the newer invalid ones.

    Raises:
        CheckpointError: checkpoints exist, but all are invalid.
    """
    broken: list[CheckpointStatus] = []
    for folder in reversed(checkpoint_folders(root)):
        status = check(folder, digests)
        if status.problem is None:
            return folder, broken
        broken.append(status)
    if broken:
        listed = "; ".join(f"{status.path.name}: {status.problem}" for status in broken)
        raise CheckpointError(
            f"{root}: all checkpoints are invalid ({listed}). Set --checkpoint.resume never to start a new run "
            "(in a program: train() without resume_from_checkpoint)"
        )
    return None, []


def remove(folder: Path) -> Path | None:
    """Remove the files of a checkpoint that its manifest names. Return the folder with other files, or None.

    The folder is renamed first, so that a kill leaves no partial checkpoint under a valid name.
    """
    try:
        manifest = read_plain_json(folder / MANIFEST)
        named = {MANIFEST, *manifest["files"], *manifest.get("added", [])}
    except (OSError, ValueError, KeyError, TypeError):
        return set_broken_aside(folder)
    if files_below(folder).keys() <= named:
        trash = folder.with_name(f".trash-{folder.name}-{os.getpid()}")
        shutil.rmtree(trash, ignore_errors=True)
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
        return None
    kept = folder.rename(free_path(folder.with_name(f"kept-{folder.name}")))
    for name in files_below(kept).keys() & named:
        with suppress(OSError):
            (kept / name).unlink()
    return kept


def read_trainer(folder: Path) -> dict[str, Any]:
    """Return the JSON part of a checkpoint: counters, loss scale, fingerprint.

    Raises:
        CheckpointError: the file does not have the expected content.
    """
    try:
        trainer = read_plain_json(folder / TRAINER)
        for name in ("state", "identity", "settings", "origins"):
            if not isinstance(trainer[name], dict):
                raise TypeError(f"{name} must be an object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / TRAINER} cannot be read ({type(error).__name__}: {error})") from error
    return trainer


def _is_plain_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)
