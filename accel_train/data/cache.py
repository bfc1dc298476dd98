"""The folder of token shards: its files, the lock of the process that builds, and the checks of a build.

CACHE/text/KEY/            published in one rename: train.bin, eval.bin, meta.json, tokenizer/
CACHE/text/KEY.lock        held by the one process that builds KEY
CACHE/text/KEY.building/   a build under way, or what a killed one left; the next removes it
CACHE/text/digests.json    digests of source files, by path, size and time of change
CACHE/text/latest/         the newest KEY of each recipe, to notice that a source changed
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock

from accel_train.core.errors import DataError
from accel_train.core.files import sha256, sync, write_atomically
from accel_train.core.json_io import write_plain_json
from accel_train.recipe.data import Data

CHECKED_AT_OPENING_BYTES = 2**28
"""Files of up to this size are compared with their digests when they are opened (0.6 s), larger ones while a run trains."""

# A file written again within the clock's grain keeps its time of change: such young digests are not trusted (as in git).
_SETTLED_SECONDS = 2.0


def cache_root(data: Data) -> Path:
    """Return `data.cache_dir`, else the user's cache folder; it may not be there yet."""
    return user_cache() if data.cache_dir is None else Path(data.cache_dir).expanduser().absolute()


def user_cache() -> Path:
    """Return $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train; the folder may not be there yet."""
    return Path(os.environ.get("ACCEL_TRAIN_CACHE") or "~/.cache/accel_train").expanduser().absolute()


def cache_folder(data: Data) -> Path:
    """Return the folder of token shards, and make it.

    Raises:
        ValueError: the folder cannot be made, or not be written to.
    """
    folder = cache_root(data) / "text"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"data.cache_dir: cannot make the folder {folder} ({error}); name another") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"data.cache_dir: {folder} cannot be written to; name another")
    return folder


def lock(path: Path) -> BaseFileLock:
    """Return a lock that is released when its process dies; file systems without locks raise, rather than pretend."""
    return FileLock(path, fallback_to_soft=False)


def file_digests(files: Sequence[Path], cache: Path, advance: Callable[[float], object]) -> list[str]:
    """Return the SHA-256 of each file; files that did not change since the last time are not read again.

    `advance` is called with the bytes read.
    """
    sidecar = cache / "digests.json"
    with lock(cache / "digests.lock"):  # of several processes one reads the files, and the others its result
        known: dict[str, list[Any]] = read_json(sidecar) or {}
        settled_before_ns = time.time_ns() - int(_SETTLED_SECONDS * 1e9)

        def digest(file: Path) -> tuple[str, list[Any]]:
            path = str(file.resolve())
            stamp = stamp_of(file)
            if known.get(path, [])[:2] == stamp:
                return path, known[path]
            value = sha256(file)
            advance(stamp[0])
            return path, [*stamp, value]

        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
            found = list(threads.map(digest, files))
        settled = {path: entry for path, entry in found if entry[1] < settled_before_ns}
        if any(known.get(path) != entry for path, entry in settled.items()):
            write_plain_json(sidecar, known | settled)
    return [entry[2] for _, entry in found]


def stamp_of(file: Path) -> list[int]:
    """Return a file's size in bytes and time of change in nanoseconds."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def note_latest(cache: Path, recipe_digest: str, key: str) -> str | None:
    """Remember the newest key of a recipe; return the one before, if it was another."""
    path = cache / "latest" / recipe_digest
    path.parent.mkdir(exist_ok=True)
    before = path.read_text() if path.exists() else None
    if before != key:
        write_atomically(path, key.encode())
    return before if before != key else None


def read_valid_meta(folder: Path) -> dict[str, Any] | None:
    """Return the content of meta.json if each file has its listed size, and its digest unless it is large; else None."""
    meta = read_json(folder / "meta.json")
    if meta is None or not {"files", "sha256"} <= meta.keys():
        return None
    for name, num_bytes in meta["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != num_bytes:
            return None
        if num_bytes <= CHECKED_AT_OPENING_BYTES and sha256(path) != meta["sha256"].get(name):
            return None
    return meta


def digests_of_large_files(folder: Path, meta: Mapping[str, Any]) -> dict[Path, str]:
    """Return the SHA-256 by path of the files that `read_valid_meta` does not read."""
    sizes = meta["files"]
    return {folder / name: digest for name, digest in meta["sha256"].items() if sizes[name] > CHECKED_AT_OPENING_BYTES}


class DigestCheck:
    """Compares files with their digests in a thread, while a run trains on them."""

    def __init__(self, digests: Mapping[Path, str]) -> None:
        self._digests, self._stopped = digests, threading.Event()
        self._thread = threading.Thread(target=self._compare, name="digests", daemon=True)
        self._damage: str | None = None

    def start(self) -> None:
        """Start the thread, unless it has started."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def is_running(self) -> bool:
        """True while some file is not yet compared."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until all files are compared."""
        self._thread.join()

    def stop(self) -> None:
        """Leave the rest unread."""
        self._stopped.set()

    def raise_if_damaged(self) -> None:
        """Raise a DataError if a file differs from its digest, or cannot be read."""
        if self._damage is not None:
            raise DataError(self._damage)

    def _compare(self) -> None:
        for path, digest in self._digests.items():
            try:
                if sha256(path, self._stopped) != digest and not self._stopped.is_set():
                    self._damage = f"{path} is damaged (it differs from its digest); remove {path.parent}, and run again: it is made anew"
            except FileNotFoundError:  # removed since it was mapped: what is trained on can no longer be compared
                continue
            except OSError as error:
                self._damage = f"{path} cannot be read ({error.strerror}); remove {path.parent}, and run again"


def complete(building: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Write meta.json for a finished build, with sizes and digests, and wait until all its files are on the disk."""
    files = {path.relative_to(building).as_posix(): path for path in sorted(building.rglob("*")) if path.is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    meta = {**meta, "files": sizes, "sha256": {name: sha256(path) for name, path in files.items()}}
    write_plain_json(building / "meta.json", meta)
    for path in building.rglob("*"):
        sync(path)
    return meta


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
