"""Data in a bucket: its files are copied to the cache, and read there."""

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from glob import has_magic
from itertools import takewhile
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from accel_train.buckets.store import Store, is_of_store
from accel_train.core.errors import SettingError
from accel_train.core.files import make_folders, user_cache, write_atomically
from accel_train.core.json_io import json_digest


def local_files(name: str) -> str:
    """Return the path of the copy of a file, folder, or pattern in a bucket. Other names are returned unchanged."""
    return str(user_cache() / "files" / name.replace("://", "/", 1)) if is_of_store(name) else name


def fetch_files(name: str) -> str:
    """Return `local_files`, after copying the files that are not there or have changed in the bucket.

    Raises:
        SettingError: no file is there, or the bucket cannot be read.
    """
    if not is_of_store(name):
        return name
    folder = "/".join(takewhile(lambda part: not has_magic(part), name.split("/")))
    store, local = Store(folder), Path(local_files(folder))
    stamps = {
        each: stamp for each, stamp in store.stamps().items() if folder == name or fnmatch(f"{folder}/{each}", name)
    }
    if not stamps:
        raise SettingError("no file is there", "Check the name", name, ("data.train", "data.eval"))
    kept = user_cache() / "files" / ".stamps" / json_digest(folder)
    make_folders(kept)
    # One process copies, and the others wait.
    with FileLock(kept / "lock"):
        left = [*_left(local, stamps, kept)]
        for each in tqdm(left, f"copying {name}", unit=" files", disable=None, leave=False):
            path = local / each
            staging = path.with_name(f".{path.name}.part")
            make_folders(path.parent)
            store.get(each, staging)
            os.replace(staging, path)
            write_atomically(kept / json_digest(each), stamps[each].encode())
        if folder == name:
            for path in [path for path in local.rglob("*") if path.is_file()]:
                if path.relative_to(local).as_posix() not in stamps:
                    path.unlink()
    return local_files(name)


def _left(local: Path, stamps: dict[str, str], kept: Path) -> Iterator[str]:
    """Yield the files whose copies are missing, or of another content."""
    for each, stamp in stamps.items():
        of_copy = kept / json_digest(each)
        if not (local / each).is_file() or not of_copy.is_file() or of_copy.read_text() != stamp:
            yield each
