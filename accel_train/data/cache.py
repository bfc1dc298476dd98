"""The cache of data: token shards and kept values, their files, the build lock, limit, and integrity checks.

CACHE/text/KEY/            published in one rename: train.bin, eval.bin, meta.json, tokenizer/
CACHE/text/KEY.lock        held by the one process that builds KEY
CACHE/text/KEY.building/   unfinished build; the next build removes what a killed build left
CACHE/text/digests.json    digests of source files, by path, size and modification time
CACHE/text/pinned/         digests of large token files that runs read where they lie, by the digest of samples
CACHE/text/latest/         newest KEY of each recipe, to detect a changed source
CACHE/kept/KEY/            encoded rows, digests of images (`data/text/kept.py`); with KEY.lock, KEY.building/
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from shutil import rmtree
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from accel_train.buckets.files import RemoteFile
from accel_train.core.errors import DataError
from accel_train.core.files import sha256, sync, user_cache, write_atomically
from accel_train.core.json_io import json_digest, parse_json, write_plain_json
from accel_train.core.state import JsonRecord
from accel_train.recipe.data import Data

CHECKED_AT_OPENING_BYTES = 2**28
"""Size limit in bytes for checking a file when it is opened (0.6 s). Larger files are checked during training."""

# A file rewritten within the clock's resolution keeps its modification time. Digests this young are not trusted (git
# does the same).
SETTLED_SECONDS = 2.0
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def cache_root(data: Data) -> Path:
    """Return `data.cache_dir`, or the user's cache folder by default. The folder may not exist yet."""
    return user_cache() if data.cache_dir is None else Path(data.cache_dir).expanduser().absolute()


def cache_folder(data: Data) -> Path:
    """Create the folder of token shards and return it.

    Raises:
        ValueError: the folder cannot be created or is not writable.
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
    """Return a lock that the operating system releases when its process dies.

    File systems without locks raise an error instead of falling back to a soft lock.
    """
    return FileLock(path, fallback_to_soft=False)


def evict(root: Path, limit: int) -> None:
    """Remove the token shards and kept values that were used longest ago, until `limit` bytes are left in a cache.

    The sizes of shards stay as NAME.size. A process that has opened a file still reads it.
    """
    # One process removes, and the others go on.
    with suppress(Timeout, FileNotFoundError), lock(root / "evict.lock").acquire(timeout=0):
        found = [(stamp_of(path), path) for path in root.glob("text/*/shards/*/*.bin")]
        for path in root.glob("kept/*/"):
            found += [([sum(file.stat().st_size for file in path.iterdir()), stamp_of(path)[1]], path)]
        left = sum(size for (size, _), _ in found)
        # Other processes wait for the last one, whatever the limit is.
        for (size, _), path in sorted(found, key=lambda each: each[0][1])[:-1]:
            if left > limit:
                if path.suffix == ".bin":
                    write_atomically(path.with_suffix(".size"), str(size).encode(), durable=False)
                    path.unlink(missing_ok=True)
                else:
                    with lock(path.with_suffix(".lock")).acquire(timeout=0):
                        rmtree(path)
                left -= size


def file_digests(files: Sequence[Path], cache: Path, advance: Callable[[float], object]) -> list[str]:
    """Return the SHA-256 of each file. Files unchanged since the last call are not read again.

    `advance` is called with the number of bytes read.
    """
    sidecar = cache / "digests.json"
    # One process reads the files; the others read its result.
    with lock(cache / "digests.lock"):
        known: dict[str, list[Any]] = read_json(sidecar) or {}
        settled_before_ns = time.time_ns() - int(SETTLED_SECONDS * 1e9)

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


def sample_digest(file: Path) -> str:
    """Return a digest of a file's size and of samples of its content, in milliseconds for a file of any size.

    The store of a remote file knows its digest.
    """
    if isinstance(file, RemoteFile):
        return json_digest(file.stamp)
    num_bytes = file.stat().st_size
    digest = hashlib.sha256(str(num_bytes).encode())
    with file.open("rb") as opened:
        # Of a small file, the samples overlap.
        content = BytesIO(opened.read()) if num_bytes <= _NUM_SAMPLES * _SAMPLE_BYTES else opened
        for number in range(_NUM_SAMPLES):
            content.seek(max(num_bytes - _SAMPLE_BYTES, 0) * number // (_NUM_SAMPLES - 1))
            digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def stamp_of(file: Path) -> list[int]:
    """Return a file's size in bytes and modification time in nanoseconds."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def note_latest(cache: Path, recipe_digest: str, key: str) -> str | None:
    """Store the newest key of a recipe. Return the previous key if it differs, or None."""
    path = cache / "latest" / recipe_digest
    path.parent.mkdir(exist_ok=True)
    before = path.read_text() if path.exists() else None
    if before != key:
        write_atomically(path, key.encode())
    return before if before != key else None


def read_valid_meta(folder: Path) -> JsonRecord | None:
    """Return the content of meta.json if every file matches its listed size and digest, or None.

    Files over `CHECKED_AT_OPENING_BYTES` are checked by size only.
    """
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
    """A thread that compares files with their digests while a run trains on them.

    A path in place of a digest names the file that keeps the digest, once a run has read the whole file.
    """

    def __init__(self, digests: Mapping[Path, str | Path]) -> None:
        self._digests, self._stopped = digests, threading.Event()
        self._stamps = {path: stamp_of(path) for path, digest in digests.items() if isinstance(digest, Path)}
        self._thread = threading.Thread(target=self._compare, name="digests", daemon=True)
        self._damage: str | None = None

    def start(self) -> None:
        """Start the thread if it has not started."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return whether some files are not compared yet."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until all files are compared."""
        self._thread.join()

    def stop(self) -> None:
        """Stop without reading the remaining files."""
        self._stopped.set()

    def raise_if_damaged(self) -> None:
        """Raise DataError if a file differs from its digest or cannot be read."""
        if self._damage is not None:
            raise DataError(self._damage)

    def _compare(self) -> None:
        for path, known in self._digests.items():
            again = f"remove {path.parent}, and run again"
            try:
                found = sha256(path, self._stopped)
                if self._stopped.is_set():
                    return
                if isinstance(known, Path):
                    again = f"restore it, or remove {known} and start a new run"
                    self._compare_source(path, known, found, again)
                elif found != known:
                    self._damage = f"{path} is damaged (it differs from its digest); {again}: it will be made again"
            # Removed after it was mapped. The mapped data can no longer be compared.
            except FileNotFoundError:
                continue
            except OSError as error:
                self._damage = f"{path} cannot be read ({error.strerror}); {again}"

    def _compare_source(self, path: Path, pin: Path, found: str, again: str) -> None:
        if stamp_of(path) != self._stamps[path]:
            self._damage = f"{path} was written while a run trained on it; {again}"
        elif not pin.is_file():
            pin.parent.mkdir(exist_ok=True)
            write_atomically(pin, found.encode())
        elif pin.read_text() != found:
            self._damage = f"{path} has changed since a run read it (it differs from its digest); {again}"


def complete(building: Path, meta: JsonRecord) -> JsonRecord:
    """Write meta.json with sizes and digests for a finished build, and flush all its files to disk."""
    files = {path.relative_to(building).as_posix(): path for path in sorted(building.rglob("*")) if path.is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    meta = {**meta, "files": sizes, "sha256": {name: sha256(path) for name, path in files.items()}}
    write_plain_json(building / "meta.json", meta)
    for path in building.rglob("*"):
        sync(path)
    return meta


def read_json(path: Path) -> JsonRecord | None:
    """Return a JSON object, or None if the file is missing, not readable, or not an object."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
