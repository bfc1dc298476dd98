"""Write files and folders atomically and durably, and compute their digests."""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_train.core.terminal import is_main

SEEN_WITHIN_SECONDS = 10.0
"""Most seconds to wait for a file to appear. A network file system may answer from its cache for some seconds."""
TAIL_BYTES = 2**16
"""Size of the parts in which a file of lines is read from its end."""
HASHING_THREADS = 4
"""Hashing threads per process. SHA-256 releases the GIL and runs at 0.5 to 2 GB/s per core."""
REPORT_AFTER_SECONDS = 3.0
"""Seconds of hashing after which a message is printed."""


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> Path:
    """Replace a file atomically: a reader or a kill finds the old or the new content. The mode follows the umask.

    A link stays, and its target is replaced. A device or pipe is written to directly. With `durable`, a power cut also
    leaves old or new content, at the cost of a wait for the disk. Without `durable`, a power cut may leave an empty
    file.
    """
    if is_written_into(path):
        with path.open("wb") as file:
            file.write(content)
        return path
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        if durable:
            sync(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(target.parent)
    return path


@contextmanager
def publish_folder(final: Path, staging: Path) -> Iterator[Path]:
    """Yield a new folder `staging` that becomes `final` in one rename when the block ends. An error removes it.

    The folder's entries are on disk before the rename, and the rename is on disk at the end. Syncing the files is up to
    the caller.
    """
    # Left by a killed process.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        sync(staging)
        staging.rename(final)
        sync(final.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def is_written_into(path: Path) -> bool:
    """Return whether a path is a device, a pipe or a standard stream. A file cannot replace these."""
    is_stream = str(path.absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return path.exists() and not path.is_dir() and (is_stream or not path.is_file())


def existing_part(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, and sync their directory entries to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def follow_umask(path: Path) -> None:
    """Give a file the mode that its folder has from the umask. Some libraries write files only for their owner."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def sync(path: Path) -> None:
    """Wait until a file's content or a folder's entries are on disk (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be read, or it is a pipe or device, on which a read could block.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def cut_incomplete_line(descriptor: int) -> int:
    """Cut off the last line of an open file if it lacks its newline, and return the size in bytes that is left.

    A line torn by a kill would otherwise be joined to the next one.
    """
    size = end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - TAIL_BYTES)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        end = begin + newline + 1
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def is_seen(path: Path, num_bytes: int | None = None) -> bool:
    """Return whether this process sees a file that another process wrote, with the given size.

    Waits up to `SEEN_WITHIN_SECONDS` for slow file systems.
    """
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while True:
        with suppress(OSError):
            if path.stat().st_size == num_bytes or num_bytes is None:
                return True
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            # Makes a network file system look up new names.
            os.listdir(path.parent)
        time.sleep(0.1)


def files_below(root: Path, *, skipped: Collection[str] = ()) -> list[Path]:
    """Return all files below a folder, sorted by relative name, without hidden and `skipped` names."""
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in skipped and not name.startswith(".")]
        found += [Path(folder, file) for file in files if not file.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def refuse_link_loops(folder: Path) -> None:
    """Check that no link in a folder leads to a parent folder. Such a link would repeat each file many times.

    Raises:
        ValueError: a link does; the message names it.
    """
    for root, folders, _ in os.walk(folder, followlinks=True):
        for path in (Path(root, name).absolute() for name in folders):
            if path.is_symlink() and path.resolve() in (parent.resolve() for parent in path.parents):
                raise ValueError(f"{path} links to {path.resolve()}, a folder that contains the link. Remove the link.")


def sha256(path: Path, given_up: threading.Event | None = None) -> str:
    """Return the SHA-256 of a file in hex. Once `given_up` is set, the digest covers only the part read so far."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while (num_bytes := file.readinto(buffer)) and not (given_up and given_up.is_set()):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def digest64(data: bytes, salt: int = 0) -> int:
    """Return 64 bits of BLAKE2b over bytes and a number. The result is equal in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt.to_bytes(16, "big")).digest(), "big")


def digests_of(folder: Path, names: Sequence[str]) -> dict[str, str | OSError]:
    """Return the digest of each named file in a folder, or the error for a file that cannot be read.

    Several files are read at once, the largest first.
    """
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
        _, unfinished = wait(futures.values(), REPORT_AFTER_SECONDS)
        if unfinished and is_main():
            what = f"{folder} (files: {len(names)}, {sum(map(size, names)) / 1e9:.1f} GB)"
            print(f"reading {what} to check them against their digests ...", file=sys.stderr, flush=True)
        return {name: future.result() for name, future in futures.items()}
    finally:
        # After a signal, a thread in a large file would delay the end of this process.
        given_up.set()
        pool.shutdown(wait=False, cancel_futures=True)


def has_variable(text: str) -> bool:
    """Return whether a shell would replace a part of a path: `$HOME/runs`, `${HOME}/runs`."""
    return re.search(r"\$\{?\w", text) is not None


def path_problem(text: str) -> str | None:
    """Return the problem of an output path as the end of a sentence, or None."""
    if not text.strip():
        return "is blank: give a path (is a shell variable not set?)"
    if has_variable(text):
        return "has a shell variable, which is not replaced here: write the path"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return "is a URL, not a path on this machine. Mount the storage, or write to a local folder and copy it later."
    return None


def user_cache() -> Path:
    """Return $ACCEL_TRAIN_CACHE, or ~/.cache/accel_train by default. The folder may not exist yet."""
    path = os.environ.get("ACCEL_TRAIN_CACHE") or "~/.cache/accel_train"
    if (problem := path_problem(path)) is not None:
        raise ValueError(f"ACCEL_TRAIN_CACHE={path!r} {problem}")
    return Path(path).expanduser().absolute()


def output_path(text: str, option: str = "--out") -> Path:
    """Return the path given by an option.

    Raises:
        ValueError: the path is blank or not on a file system.
    """
    problem = path_problem(text)
    if problem is not None:
        raise ValueError(f"{option}={text!r} {problem}")
    return Path(text).expanduser()


def move_to_previous(folder: Path, paths: Sequence[Path], below: str = "") -> Path:
    """Move files and folders into a new `previous-N/` in a folder, and return that subfolder."""
    used = [entry.name.removeprefix("previous-") for entry in folder.glob("previous-*")]
    previous = folder / f"previous-{1 + max((int(number) for number in used if number.isdecimal()), default=0)}"
    target = previous / below
    target.mkdir(parents=True)
    for path in paths:
        path.rename(target / path.name)
    return previous
