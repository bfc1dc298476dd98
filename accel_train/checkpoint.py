"""Checkpoint folders: written aside, synced, published by one rename, proved by digests, rotated last.

A folder `step-00000100` either is complete and matches its manifest, or is not used. Only safetensors and JSON are
written or read, so opening a checkpoint runs no code. Order is by step number: clocks and file times play no part.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.files import sync
from accel_train.state import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_STEP_FOLDER = re.compile(r"step-(\d{8,})")

Writer = Callable[[Path], None]
"""Writes one file at the path it is given."""


@dataclass(frozen=True)
class CheckpointStatus:
    """What `verify` found of one folder; no problem means that a resume can use it."""

    path: Path
    step: int
    problem: str | None


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name, None for any other name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def checkpoint_folders(root: Path) -> list[Path]:
    """Published checkpoints under `root`, oldest step first."""
    if not root.is_dir():
        return []
    found = [(step, folder) for folder in root.iterdir() if (step := step_of(folder)) is not None and folder.is_dir()]
    return [folder for _, folder in sorted(found)]


def publish(root: Path, step: int, writers: Mapping[str, Writer]) -> Path:
    """Write a checkpoint so that a kill, a full disk or a power cut leaves the old ones or the whole new one.

    Raises:
        CheckpointError: it could not be written; what was written of it is removed, older checkpoints are untouched.
    """
    final = root / f"step-{step:08d}"
    aside = root / f".tmp-{final.name}-{os.getpid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        files: dict[str, dict[str, Any]] = {}
        for name, write in writers.items():
            path = aside / name
            write(path)
            path.chmod(0o600)
            sync(path)
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        manifest = aside / MANIFEST
        manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1), encoding="utf-8")
        manifest.chmod(0o600)
        sync(manifest)
        sync(aside)
        if final.exists():  # a broken one of the same step: this one takes its place
            remove(final)
        aside.rename(final)
        sync(root)
    except Exception as error:  # safetensors and the file system raise their own kinds; each leaves the old checkpoints
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {step} could not be written to {root}: {error}") from error
    return final


def rotate(root: Path, keep: int, spared_steps: Collection[int | None] = ()) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and the spared ones (the best, say); returns what was removed."""
    folders = checkpoint_folders(root)
    doomed = [folder for folder in folders[:-keep] if step_of(folder) not in spared_steps]
    for folder in doomed:
        remove(folder)
    return doomed


def remove_leftovers(root: Path) -> None:
    """Remove what a killed run left half-written or half-removed; call it only while the run folder is locked."""
    if root.is_dir():
        for entry in root.iterdir():
            if entry.name.startswith((".tmp-", ".trash-")):
                shutil.rmtree(entry, ignore_errors=True)


def check(folder: Path) -> CheckpointStatus:
    """Hold a checkpoint folder against its manifest: names, sizes, SHA-256."""
    step = step_of(folder)
    return CheckpointStatus(folder, -1 if step is None else step, _problem(folder, step))


def _problem(folder: Path, step: int | None) -> str | None:
    if not folder.is_dir():
        return "there is no such folder"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, and this version reads {FORMAT}"
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        manifest_step = int(manifest["step"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if step is not None and manifest_step != step:
        return f"{MANIFEST} is of step {manifest_step}"
    present = {entry.name for entry in folder.iterdir()} - {MANIFEST}
    for name, (size, digest) in files.items():
        path = folder / name
        if name != path.name or name in ("", ".", ".."):
            return f"{MANIFEST} names {name!r}, which is no plain file name"
        if name not in present or path.is_symlink() or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if _sha256(path) != digest:
            return f"{name} differs from its digest"
    extra = present - set(files)
    return f"{sorted(extra)[0]} is not in {MANIFEST}" if extra else None


def newest_valid(root: Path) -> tuple[Path | None, list[CheckpointStatus]]:
    """The newest checkpoint that proves itself, and the newer ones that do not.

    Raises:
        CheckpointError: there are checkpoints, and none is valid.
    """
    broken: list[CheckpointStatus] = []
    for folder in reversed(checkpoint_folders(root)):
        status = check(folder)
        if status.problem is None:
            return folder, broken
        broken.append(status)
    if broken:
        listed = "; ".join(f"{status.path.name}: {status.problem}" for status in broken)
        raise CheckpointError(
            f"no checkpoint in {root} is valid ({listed}); to start anew, give --checkpoint.resume never"
        )
    return None, []


def verify_run(run_folder: Path) -> list[CheckpointStatus]:
    """Every checkpoint of a run, oldest first; the last one without a problem is what a resume uses.

    Raises:
        ValueError: the folder holds no run.
    """
    root = run_folder / "checkpoints"
    if not root.is_dir():
        raise ValueError(f"{run_folder} holds no checkpoints folder; give the output_dir of a run")
    return [check(folder) for folder in checkpoint_folders(root)]


def remove(folder: Path) -> None:
    """Remove a checkpoint folder.

    It is renamed first: a kill half-way leaves rubbish under a name that is never read, not half a checkpoint.
    """
    trash = folder.with_name(f".trash-{folder.name}-{os.getpid()}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
