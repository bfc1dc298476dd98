"""Files that are there whole or not at all, and are still there after a power cut."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SEEN_WITHIN_SECONDS = 10.0
"""A network file system may answer from a cache for some seconds before it asks its server again."""


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> Path:
    """Replace a file in one move, so that a reader or a kill finds the old one or the new one (mode 0600).

    `durable`: so does a power cut, which takes a wait for the disk; without it the file may then be empty.
    """
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)
    return path


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents (mode 0700), their names on the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
        sync(folder.parent)


@contextmanager
def private_files() -> Iterator[None]:
    """Inside, whatever anybody in this process creates is for its owner alone: files 0600, folders 0700."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_seen(path: Path, num_bytes: int | None = None) -> bool:
    """Return whether this process sees a file that another one has written, of this size if given; waits for slow file systems."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while True:
        with suppress(OSError):
            if path.stat().st_size == num_bytes or num_bytes is None:
                return True
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # makes a network file system ask for names that are new
        time.sleep(0.1)
