"""A folder in a bucket, and the local run folder that stands for it.

A run whose `output_dir` is s3://bucket/name works in CACHE/runs/s3:%2F%2Fbucket%2Fname, and `training.upload` copies
this folder to the bucket. So every reader of a run needs local files only.
"""

import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from accel_train.core.errors import SettingError, check_packages, first_line
from accel_train.core.files import make_folders, sha256, user_cache, write_atomically
from accel_train.core.ownership import MARKER
from accel_train.core.redaction import redact_text

STORES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "memory": "fsspec", "file": "fsspec"}
"""Package that reads and writes a kind of bucket, by the scheme of its URLs."""
_VERSIONS = ("ETag", "etag", "blob_id", "LastModified", "mtime", "created")
"""What the stores say of a file. Each store has some of them."""
Stamp = tuple[int, str]
"""Size of a file in bytes, and a text that changes with its content."""
LOCK = ".lock"
OWNER = ".lock.owner"
"""File in a local run folder that says whether a lock in the bucket is of this folder."""
LOCK_SECONDS = 1800.0
"""Age at which a lock is stale. A run renews its lock between two checkpoints."""
START_SECONDS = 5.0
"""Seconds for which a failing request is repeated before the run trains."""
ANSWER_SECONDS = 60.0
"""Seconds for which a request to S3 waits for its answer.

The client of GCS waits 300 s, and the client of the Hub 10 s for a part of a file (HF_HUB_DOWNLOAD_TIMEOUT).
"""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 30.0


def is_of_store(name: str) -> bool:
    """Return whether a name is a URL in a bucket, without user and password."""
    scheme, _, rest = name.partition("://")
    parts = rest.strip("/").split("/")
    return scheme in STORES and "@" not in parts[0] and not {"", ".", ".."} & {*parts}


def local_run(name: str) -> str:
    """Return the local run folder that stands for a URL. Other names are returned unchanged."""
    return str(_local_runs() / quote(name.rstrip("/"), ":")) if is_of_store(name) else name


def url_of(folder: Path) -> str | None:
    """Return the URL that a local run folder stands for, or None."""
    name = unquote(str(folder.relative_to(root))) if folder.is_relative_to(root := _local_runs()) else ""
    return name if is_of_store(name) else None


def _local_runs() -> Path:
    return user_cache() / "runs"


class Store:
    """The files below a URL, by relative name. A request that fails is repeated for `limit_seconds`.

    `on_failure` is called with a message after the first failure, unless it is None.

    Raises:
        SettingError: a package is missing, or a request has failed for too long. Its text has no secrets.
    """

    def __init__(self, url: str) -> None:
        check_packages([STORES[url.partition("://")[0]]], "buckets", url)
        import fsspec

        self.url, self.limit_seconds, self.num_failures = url, START_SECONDS, 0
        self.on_failure: Callable[[str], object] | None = None
        self._files, self._root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        # A folder of this machine has to exist. The client of S3 waits 15 s for an answer.
        self._files.auto_mkdir, self._files.read_timeout = True, ANSWER_SECONDS

    def names(self, below: str = "") -> list[str]:
        """Return the names of all files below a folder of the store."""
        return [*self.stamps(below)]

    def stamps(self, below: str = "", find: str = "find") -> dict[str, Stamp]:
        """Return the stamp of each file below a folder, of a file, or of a pattern (`glob`). The URL's name is ""."""
        found = {}
        # Some stores know folders, and others raise where nothing is.
        with suppress(FileNotFoundError):
            found = self._ask(partial(getattr(self._files, find), detail=True), self._path(below))
        return {
            name: _stamp(each)
            for path, each in found.items()
            # Consoles write an empty object for a folder.
            if each["type"] == "file"
            and not path.endswith("/")
            and ".." not in Path(name := path[len(self._root) :].lstrip("/")).parts
        }

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of a file from `start` up to `stop`."""
        return bytes(self._ask(partial(self._files.cat_file, start=start, end=stop), self._path(name)))

    def get(self, name: str, path: Path) -> None:
        """Copy a file of the store to a local path."""
        self._ask(self._files.get_file, self._path(name), str(path))

    def read(self, name: str) -> bytes:
        """Return the content of a small file. It is empty if there is none."""
        with suppress(FileNotFoundError):
            return bytes(self._ask(self._files.cat_file, self._path(name)))
        return b""

    def put(self, path: Path, name: str, *, reads_back: bool = True) -> None:
        """Copy a local file to the store, and compare the copy with it.

        Raises:
            FileNotFoundError: the local file is gone.
        """

        def put() -> None:
            try:
                self._ask(self._files.put_file, str(path), self._path(name))
                if reads_back and self._ask(self._digest, self._path(name)) != sha256(path):
                    raise OSError(f"{name} differs from its copy")
            except FileNotFoundError as error:
                # The other case is a bucket that is gone.
                if path.exists():
                    raise OSError(str(error)) from None
                raise

        self._ask(put)

    def _digest(self, path: str) -> str:
        with self._files.open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def fetch(self, below: str, folder: Path, left_out: Collection[str] = ()) -> None:
        """Copy the files below a folder of the store to a local folder, without the folders and files `left_out`.

        A marker comes last: the files next to it are complete then.
        """
        for name in sorted(self.names(below), key=lambda name: name.endswith(MARKER)):
            path = Path(name).relative_to(below)
            if path.parts[0] not in left_out:
                make_folders((folder / path).parent)
                self.get(name, folder / path)

    def remove(self, below: str, first: str = "") -> None:
        """Remove all files below a folder, files of the name `first` before the others."""
        for name in sorted(self.names(below), key=lambda name: Path(name).name != first):
            # An answer that was lost is asked for again.
            with suppress(FileNotFoundError):
                self._ask(self._files.rm_file, self._path(name))

    def end_uploads(self) -> None:
        """Remove the parts of files that a kill left in S3: they are in no listing, and are paid for."""
        # Other stores have no such function, and credentials need not allow it.
        with suppress(Exception):
            bucket, below, _ = self._files.split_path(self._root)
            for each in self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{below}/")["Uploads"]:
                self._files.abort_mpu(bucket, each["Key"], each["UploadId"])

    def take_lock(self, folder: Path) -> None:
        """Write or renew the lock for a local run folder.

        Raises:
            SettingError: a run in another folder holds the lock.
        """
        own = owner_of(folder) or secrets.token_hex(8)
        content = f"{own} {socket.gethostname()} {time.time()}".encode()
        path = write_atomically(folder / OWNER, content)
        for is_first in (True, False):
            holder, host, since = self.lock()
            age = time.time() - float(since)
            # The kernel's lock guards the local folder, so a lock of this folder was left by a kill.
            if holder != own and age < LOCK_SECONDS:
                raise SettingError(
                    f"a run on {host} uses it and renewed its lock {age:.0f} s ago",
                    "Wait for that run, stop it, or give this one another output_dir. If it is dead, remove "
                    f"{self.url}/{LOCK}; the lock ends by itself after {LOCK_SECONDS:.0f} s",
                    f"output_dir={self.url}",
                )
            if is_first and not holder:
                # Of runs that begin at once, one creates it. Not every store can do so.
                with suppress(Exception):
                    self._files.pipe_file(self._path(LOCK), content, mode="create")
                    return
        self.put(path, LOCK)

    def lock(self) -> list[str]:
        """Return the owner of the lock, its host, and its time."""
        fields = self.read(LOCK).decode().split()
        # No lock, or torn by a kill.
        return fields if len(fields) == 3 else ["", "", "0"]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _ask(self, request: Callable[..., Any], *arguments: str) -> Any:
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                # The Hub's listings are kept whatever the options say.
                self._files.dircache.clear()
                return request(*arguments)
            except (FileNotFoundError, SettingError):
                raise
            # Each library raises its own types.
            except Exception as error:
                reason = redact_text(f"{type(error).__name__}: {first_line(error)}")
                if time.monotonic() - began + pause > self.limit_seconds:
                    remedy = "Check the address, the credentials, and the network"
                    raise SettingError(f"a request failed ({reason})", remedy, self.url) from None
                if self.on_failure and not self.num_failures:
                    self.on_failure(f"{self.url}: a request failed ({reason}), and is repeated")
                self.num_failures += 1
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _stamp(found: Mapping[str, Any]) -> Stamp:
    return found["size"], next((str(found[name]) for name in _VERSIONS if found.get(name)), "")


def owner_of(folder: Path) -> str:
    """Return the owner of the locks of a local run folder; empty if it never held one."""
    path = folder / OWNER
    return path.read_text().split()[0] if path.is_file() else ""


def fetched_run(name: str, *, with_model: bool) -> str:
    """Return the local folder of a run, after copying the run's newest files from a bucket if `name` is a URL.

    Raises:
        SettingError: no run is there, or the bucket cannot be read.
    """
    if not is_of_store(name):
        return name
    folder, store = Path(local_run(name)), Store(name)
    owner, left_out = store.lock()[0], ["checkpoints", LOCK]
    for each in ("model", "adapter"):
        marker = folder / each / MARKER
        if not with_model or (marker.is_file() and marker.read_bytes() == store.read(f"{each}/{MARKER}")):
            left_out.append(each)
    # Otherwise the run trains here, or was killed here.
    if not owner or owner != owner_of(folder):
        store.fetch("", folder, left_out)
    if not folder.exists():
        raise SettingError("no run is here", "Give the output_dir of a run", name)
    return str(folder)
