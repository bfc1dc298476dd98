"""Files and folders that are written whole or not at all, and survive a power cut; their digests."""

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

SEEN_WITHIN_SECONDS = 10.0
"""A network file system may answer from a cache for some seconds before it asks its server again."""
HASHING_THREADS = 4
"""Threads of each process; SHA-256 runs without the interpreter's lock, at 0.5 to 2 GB/s a core."""
REPORT_AFTER_SECONDS = 3.0
"""Hashing that takes longer is announced on the terminal."""


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> Path:
    """Replace a file in one move, so that a reader or a kill finds the old one or the new one; its mode follows the umask.

    A link stays: what it points to is replaced. A device or a pipe is written into. `durable`: a power cut finds one of them,
    too, which takes a wait for the disk; without it the file may then be empty.
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
    """Yield a new folder, `staging`, that becomes `final` in one move when the block ends; an error removes it.

    The names in it are on the disk before the move, and so is the move; the files are the caller's to sync.
    """
    shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
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
    """Return whether a path is a device, a pipe or a stream of this process, which cannot be replaced by a file."""
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


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it cannot be read, or is a pipe or a device, which a reader would wait for.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


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


def files_below(root: Path, *, skipped: Collection[str] = ()) -> list[Path]:
    """Return every file below a folder, sorted by relative name, without hidden files and folders, and those `skipped`."""
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in skipped and not name.startswith(".")]
        found += [Path(folder, file) for file in files if not file.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def refuse_link_loops(folder: Path) -> None:
    """Refuse a folder in which a link leads to a folder above it: each file would be found dozens of times, or without end.

    Raises:
        ValueError: names the link.
    """
    for root, folders, _ in os.walk(folder, followlinks=True):
        for path in (Path(root, name).absolute() for name in folders):
            if path.is_symlink() and path.resolve() in (parent.resolve() for parent in path.parents):
                raise ValueError(f"{path} is a link to {path.resolve()}, in which it lies itself; remove the link")


def sha256(path: Path, given_up: threading.Event | None = None) -> str:
    """Return the digest of a file, in hexadecimal digits; that of the part read so far, once it is `given_up`."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while (num_bytes := file.readinto(buffer)) and not (given_up is not None and given_up.is_set()):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def digest64(data: bytes, size: int = 0) -> int:
    """Return 64 bits of BLAKE2b over some bytes, and a size in bytes: the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=size.to_bytes(16, "big")).digest(), "big")


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
        _, unfinished = wait(futures.values(), REPORT_AFTER_SECONDS)
        if unfinished and os.environ.get("RANK", "0") == "0":
            what = f"{len(names)} files ({sum(map(size, names)) / 1e9:.1f} GB) of {folder}"
            print(f"reading {what} to check them against their digests ...", file=sys.stderr, flush=True)
        return {name: future.result() for name, future in futures.items()}
    finally:
        given_up.set()  # a signal: a thread that reads a large file would hold up the end of this process
        pool.shutdown(wait=False, cancel_futures=True)


def path_problem(text: str) -> str | None:
    """Return what is wrong with the name of a place to write to, as the end of a sentence; None where nothing is."""
    if not text.strip():
        return "is blank: give a path (is a shell variable not set?)"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return "is no path: only folders of this machine's file systems can be written to; mount the storage, or copy there later"
    return None


def output_path(text: str) -> Path:
    """Return the path that `--out` names.

    Raises:
        ValueError: it is blank, or not on a file system.
    """
    problem = path_problem(text)
    if problem is not None:
        raise ValueError(f"--out={text!r} {problem}")
    return Path(text)


def move_to_previous(folder: Path, paths: Sequence[Path], below: str = "") -> Path:
    """Move files and folders into a new `previous-N/` of a folder, and return it."""
    used = [entry.name.removeprefix("previous-") for entry in folder.glob("previous-*")]
    previous = folder / f"previous-{1 + max((int(number) for number in used if number.isdigit()), default=0)}"
    target = previous / below
    target.mkdir(parents=True)
    for path in paths:
        path.rename(target / path.name)
    return previous
