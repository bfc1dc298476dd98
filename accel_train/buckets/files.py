"""Data in a bucket: its files are copied to the cache and read there, or read by ranges (`RemoteFile`)."""

import io
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from glob import has_magic
from itertools import takewhile
from pathlib import Path, PosixPath
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from accel_train.buckets.store import LOCK_SECONDS, Stamp, Store, is_of_store
from accel_train.core.errors import SettingError
from accel_train.core.files import make_folders, user_cache, write_atomically
from accel_train.core.json_io import json_digest
from accel_train.core.redaction import shown_as

READ_AHEAD_BYTES = (1 << 20) + (1 << 16)
"""Bytes after a position that a request also reads: a shard of text, and the lines at its ends."""


class RemoteFile(PosixPath):
    """A file of a bucket that is read by ranges. Its path is that of its copy, which is not made."""

    folder = below = ""
    """URL of its folder, and its name there."""
    stamp: Stamp = 0, ""

    def __reduce__(self) -> Any:
        return type(self), self.parts, vars(self)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat_result([0] * 6 + [self.stamp[0]] + [0] * 3)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return True

    def has_changed(self) -> bool:
        """Return whether the file differs from the one that was listed."""
        return self.stamp not in self.store.stamps(self.below).values()

    def open(self, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
        from fsspec.spec import AbstractBufferedFile

        raw = AbstractBufferedFile(None, "", block_size=READ_AHEAD_BYTES if buffering else 0, size=self.stamp[0])
        raw.cache.fetcher = partial(self.store.read_range, self.below)
        file: Any = io.BufferedReader(raw) if buffering else raw
        return file if "b" in mode else io.TextIOWrapper(file, *text, **options)

    def parquet(self) -> Any:
        """Return the opened parquet file. Its metadata, which may be as large as a row group, are read once."""
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(
            self.open("rb", buffering=0), metadata=_footer(self, self.stamp), pre_buffer=False
        )

    @property
    def store(self) -> Store:
        """The store, for this process."""
        return _store(self.folder, os.getpid())


@lru_cache(maxsize=64)
def _footer(file: RemoteFile, stamp: Stamp) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(file.open("rb", buffering=0))


@lru_cache(maxsize=64)
def _store(url: str, process: int) -> Store:
    """Return the store of a process. Clients do not work in a forked process."""
    store = Store(url)
    # Credentials were checked when the files were listed.
    store.limit_seconds, store.on_failure = LOCK_SECONDS, print
    return store


def remote_files(name: str) -> list[RemoteFile]:
    """Return the files of a name in a bucket, without hidden ones, in the order of local files.

    Raises:
        SettingError: no file is there, or the bucket cannot be read.
    """
    folder = "/".join(takewhile(lambda part: not has_magic(part), name.split("/")))
    pattern = name[len(folder) + 1 :]
    files = []
    for below, stamp in Store(folder).stamps(pattern, "glob" if pattern else "find").items():
        if "/." not in f"/{below}":
            file = RemoteFile(local_files(folder), below)
            file.folder, file.below, file.stamp = folder, below, stamp
            files.append(file)
    if not files:
        raise SettingError("no file is there", "Check the name", name, ("data.train", "data.eval"))
    return sorted(files, key=None if pattern else str)


def local_files(name: str) -> str:
    """Return the path of the copy of a file, folder, or pattern in a bucket. Other names are returned unchanged."""
    if not is_of_store(name):
        return name
    scheme, _, rest = name.partition("://")
    folder = f"{user_cache()}/files/{scheme}/"
    # A path begins with one slash.
    shown_as[folder] = f"{scheme}://{rest[: rest.startswith('/')]}"
    return folder + rest.lstrip("/")


def fetch_files(name: str) -> str:
    """Return `local_files`, after copying the files that are not there or have changed in the bucket.

    Raises:
        SettingError: no file is there, or the bucket cannot be read.
    """
    if not is_of_store(name):
        return name
    files = remote_files(name)
    kept = user_cache() / "files" / ".stamps" / json_digest(files[0].folder)
    make_folders(kept)
    store = Store(files[0].folder)
    # One process copies, and the others wait.
    with FileLock(kept / "lock"):
        for file in tqdm([*_left(files, kept)], f"copying {name}", unit=" files", disable=None, leave=False):
            path = Path(file)
            staging = path.with_name(f".{path.name}.part")
            make_folders(path.parent)
            store.get(file.below, staging)
            os.replace(staging, path)
            write_atomically(kept / json_digest(file.below), str(file.stamp).encode())
        if files[0].folder == name:
            for path in {*Path(local_files(name)).rglob("*")} - {*files}:
                if path.is_file():
                    path.unlink()
    return local_files(name)


def _left(files: Sequence[RemoteFile], kept: Path) -> Iterator[RemoteFile]:
    """Yield the files whose copies are missing, or of another content."""
    for file in files:
        of_copy = kept / json_digest(file.below)
        if not Path(file).is_file() or not of_copy.is_file() or of_copy.read_text() != str(file.stamp):
            yield file
