"""Track file ownership: accel_train only replaces or removes unchanged files that it wrote.

A folder made by the program has `.accel_train.json`. In `model/`, `adapter/`, an export or a folder of masks, it lists
the files with sizes, and digests up to 1 MiB. `digests` has the SHA-256 of larger files, for checks of the content.
`accepted` has digests of files that the user has changed on purpose. In a run folder, it marks the folder as a run.
There it holds a digest of each file written for a user outside of these folders, at any path.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accel_train.core.files import (
    digests_of,
    follow_umask,
    is_written_into,
    move_to_previous,
    read_regular,
    sha256,
    write_atomically,
)
from accel_train.core.json_io import parse_json, write_plain_json
from accel_train.core.state import JsonRecord
from accel_train.core.version import __version__

MARKER = ".accel_train.json"
FORMAT = 1
DIGESTED_BYTES = 2**20
RECIPE_FILE = "recipe.resolved.yaml"
RUN_NAMES = (
    "model", "adapter", "summary.json", "evaluation.json", "examples.json", "report.html", "incidents",
    RECIPE_FILE, "metrics.jsonl", "events.jsonl", "launches.jsonl", "trackers.json", "rollbacks.json",
    "checkpoints", ".lock", ".lock.holder", MARKER,
)  # fmt: skip
"""Names that a run writes in its folder."""


def claim(run_folder: Path) -> None:
    """Mark a folder as a run's folder before anything else is written. Calls `check_claim` first."""
    check_claim(run_folder)
    with _changing(run_folder) as record:
        record["claimed"] = True


def check_claim(run_folder: Path) -> None:
    """Check that a run in this folder would only overwrite files that a run wrote.

    Raises:
        ValueError: it would overwrite others; the message names the first file or folder.
    """
    if not run_folder.is_dir() or _read(run_folder).get("claimed") or _has_checkpoints(run_folder):
        return
    for name in RUN_NAMES:
        is_marker_of_ours = name == MARKER and _read(run_folder)
        if _holds_something(run_folder / name) and not is_marker_of_ours:
            raise ValueError(
                f"output_dir={run_folder} holds {name}, which accel_train did not write. This run would replace it. "
                "Move it away, or give another output_dir."
            )


def _has_checkpoints(folder: Path) -> bool:
    """Return whether a folder has a run's checkpoints. A copy of a run folder may lack the hidden marker file."""
    return any((path.parent / "trainer.json").is_file() for path in folder.glob("checkpoints/step-*/manifest.json"))


def check_file(path: Path, home: Path, what: str) -> None:
    """Check that writing a file would not replace a user's file. `home` is the run folder that keeps the digests.

    Raises:
        ValueError: it would, or the file cannot be written. The message begins with `what`.
    """
    if is_written_into(path):
        return
    target = path.resolve() if path.is_symlink() else path
    _check_parent(target, what)
    if target.is_dir():
        raise ValueError(f"{what} is a folder. Give a file.")
    if not _is_ours(target, home):
        raise ValueError(
            f"{what} was not written by this run, or has changed since. Move it away, or give another name."
        )


def _check_parent(target: Path, what: str) -> None:
    if not target.parent.is_dir():
        raise ValueError(f"{what}: folder {target.parent} does not exist. Create it first.")
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"{what}: folder {target.parent} is not writable. Give another folder.")


def write_file(path: Path, content: bytes, home: Path) -> Path:
    """Write a user-visible file atomically, note its digest in `home`, and return its path.

    If a foreign file appeared there after `check_file`, it moves to `previous-N/` in the same folder.
    """
    if is_written_into(path):
        return write_atomically(path, content)
    if not _is_ours(path, home):
        # If the path is a link, the link moves, not its target.
        move_to_previous(path.parent, [path])
    # The digest is noted before the file is written. After a kill in between, the digests of both versions are known.
    # In a read-only run folder, the note is skipped and the file counts as the user's.
    with suppress(OSError), _changing(home) as record:
        key, known = _key(path.resolve(), home), record.get("written", {})
        digests = [*known.get(key, [])[-1:], hashlib.sha256(content).hexdigest()]
        record["written"] = {**known, key: digests}
    return write_atomically(path, content)


def _is_ours(path: Path, home: Path) -> bool:
    target = path.resolve()
    if not os.path.lexists(target):
        return True
    with suppress(OSError):
        return target.is_file() and sha256(target) in _read(home).get("written", {}).get(_key(target, home), ())
    return False


def _key(target: Path, home: Path) -> str:
    root = home.resolve()
    return target.relative_to(root).as_posix() if target.is_relative_to(root) else str(target)


def check_folder(target: Path, what: str) -> None:
    """Check that a folder can be replaced: it only has files that accel_train wrote and that did not change.

    Raises:
        ValueError: it has others (the message names the first), or the folder cannot be made.
    """
    _check_parent(target, what)
    if os.path.lexists(target) and not target.is_dir():
        raise ValueError(f"{what} is a file. Give a folder.")
    problem = _foreign_in(target)
    if problem is not None:
        raise ValueError(
            f"{what} holds {problem}, which accel_train did not write, or which has changed since. "
            "Move it away, or give a new or empty folder."
        )
    staging = staging_of(target)
    if os.path.lexists(staging) and not _read(staging):
        raise ValueError(f"{staging} was not created by accel_train, which needs this name. Move it away.")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `target` in one rename, unless it stays empty or an error occurs.

    A foreign folder at `target` moves to `previous-N/` in the same parent folder.
    """
    staging, old = staging_of(target), target.with_name(f".trash-{target.name}")
    # Left by a killed process.
    for leftover in (staging, old):
        if os.path.lexists(leftover) and not _read(leftover):
            move_to_previous(target.parent, [leftover])
        shutil.rmtree(leftover, ignore_errors=True)
    staging.mkdir()
    try:
        _save(staging, {"staging": True})
        yield staging
        files = {path.relative_to(staging).as_posix(): _facts(path) for path in _files_of(staging)}
        if not files:
            shutil.rmtree(staging)
            return
        for name in files:
            follow_umask(staging / name)
        large = digests_of(staging, [name for name, (_, digest) in files.items() if digest is None])
        _save(staging, {"files": files, "digests": {name: str(digest) for name, digest in large.items()}})
        if _foreign_in(target) is not None:
            move_to_previous(target.parent, [target])
        elif target.exists():
            target.rename(old)
        staging.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def noted_digests(folder: Path) -> dict[str, set[str]]:
    """Return the SHA-256 of each file that `replacing` wrote to a folder, and others that the user has accepted.

    The set is empty for a large file of an older version, and for a file whose removal the user has accepted.
    """
    record, noted = _read(folder), dict[str, set[str]]()
    for kind in ("files", "digests", "accepted"):
        found = record.get(kind)
        for name, facts in found.items() if isinstance(found, dict) else ():
            digest = facts[-1] if kind == "files" and isinstance(facts, list) and facts else facts
            noted.setdefault(name, set()).update([digest] if isinstance(digest, str) else [])
            if kind == "accepted" and digest is None:
                noted[name].clear()
    return noted


def accept_files(folder: Path, digests: Mapping[str, str | None]) -> None:
    """Note the digests of files that the user has changed, and None for removed ones. The files stay the user's."""
    with _changing(folder) as record:
        record["accepted"] = {**record.get("accepted", {}), **digests}


def staging_of(target: Path) -> Path:
    """Return the staging folder that `replacing` uses."""
    return target.with_name(f".tmp-{target.name}")


def _foreign_in(folder: Path) -> str | None:
    """Return the first file in a folder that its marker does not list or that differs from the marker, or None."""
    if folder.is_symlink() or not folder.is_dir():
        return folder.name if os.path.lexists(folder) else None
    record = _read(folder)
    accepted, listed = record.get("accepted", {}), record.get("files", {})
    names = ((path, path.relative_to(folder).as_posix()) for path in _files_of(folder))
    foreign = (
        name
        for path, name in names
        if path.is_symlink() or not path.is_file() or name in accepted or _facts(path) != listed.get(name)
    )
    return next(foreign, None)


def _files_of(folder: Path) -> list[Path]:
    found = (path for path in sorted(folder.rglob("*")) if path != folder / MARKER)
    return [path for path in found if path.is_symlink() or not path.is_dir()]


def _facts(path: Path) -> list[Any]:
    return [size := path.stat().st_size, sha256(path) if size <= DIGESTED_BYTES else None]


def _holds_something(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return any(path.iterdir())
    return path.is_symlink() or (path.exists() and (not path.is_file() or path.stat().st_size > 0))


def _read(folder: Path) -> JsonRecord:
    try:
        record = parse_json(read_regular(folder / MARKER))
        return record if record["program"] == "accel_train" and record["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _save(folder: Path, record: JsonRecord) -> None:
    if (folder / MARKER).exists() and not _read(folder):
        raise OSError(f"{folder / MARKER} was not written by accel_train")
    head = {"format": FORMAT, "program": "accel_train", "version": __version__}
    write_plain_json(folder / MARKER, {**record, **head})


@contextmanager
def _changing(folder: Path) -> Iterator[JsonRecord]:
    """Yield the record of a folder's marker, and save it if the block has assigned another value to a name.

    Other processes wait meanwhile, if the file system supports locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        found = _read(folder)
        record = {**found}
        yield record
        if record != found:
            _save(folder, record)
    finally:
        os.close(descriptor)
