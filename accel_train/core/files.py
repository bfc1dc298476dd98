"""Files that are there whole or not at all, and are still there after a power cut."""

import hashlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

SEEN_WITHIN_SECONDS = 10.0
"""A network file system may answer from a cache for some seconds before it asks its server again."""
HASHING_THREADS = 4
"""Of each process; SHA-256 runs without the interpreter's lock, at 0.5 to 2 GB/s a core."""
SAY_AFTER_SECONDS = 3.0
"""Hashing that takes longer is said on the terminal."""


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> Path:
    """Replace a file in one move, so that a reader or a kill finds the old one or the new one; its mode follows the umask.

    A link stays: what it points to is replaced. A device or a pipe is written into.

    `durable`: so does a power cut, which takes a wait for the disk; without it the file may then be empty.
    """
    if is_written_into(path):
        with path.open("wb") as file:
            file.write(content)
        return path
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(target.parent)
    return path


def is_written_into(path: Path) -> bool:
    """Whether a path is a device, a pipe or a stream of this process, which cannot be replaced by a file."""
    is_stream = str(path.absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return path.exists() and not path.is_dir() and (is_stream or not path.is_file())


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, their names on the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def follow_umask(path: Path) -> None:
    """Give a file the mode that its folder got from the umask: some libraries write files for their owner alone."""
    path.chmod(path.parent.stat().st_mode & 0o666)


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


def sha256(path: Path, given_up: threading.Event | None = None) -> str:
    """Return the digest of a file, in hexadecimal digits; of the part read so far, once it is `given_up`."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while (num_bytes := file.readinto(buffer)) and not (given_up is not None and given_up.is_set()):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def digests_of(folder: Path, names: Sequence[str]) -> dict[str, str | OSError]:
    """Return the digests of files in a folder by name, the largest read first, several at once; an error for one that cannot be read."""
    given_up = threading.Event()

    def digest(name: str) -> str | OSError:
        try:
            return sha256(folder / name, given_up)
        except OSError as error:
            return error

    def size(name: str) -> int:
        with suppress(OSError):
            return (folder / name).stat().st_size
        return 0

    pool = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hashing")
    try:
        futures = {name: pool.submit(digest, name) for name in sorted(names, key=size, reverse=True)}
        _, unfinished = wait(futures.values(), SAY_AFTER_SECONDS)
        if unfinished and os.environ.get("RANK", "0") == "0":
            what = f"{len(names)} files ({sum(map(size, names)) / 1e9:.1f} GB) of {folder}"
            print(f"reading {what} to check them against their digests ...", file=sys.stderr, flush=True)
        return {name: future.result() for name, future in futures.items()}
    finally:
        given_up.set()  # a signal: a thread that reads a large file would hold up the end of this process
        pool.shutdown(wait=False, cancel_futures=True)
