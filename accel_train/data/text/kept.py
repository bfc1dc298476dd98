"""Values that are computed once, on disk, and memory-mapped by all processes and by later starts.

They are encoded rows (`data/text/rows_cache.py`) and digests of images (`inspect_images`). CACHE/kept/KEY/ has a file
for each array (.npy) and table of rows (.arrow), and meta.json with all other values. Token shards have the same locks,
publishing, and checks (`data/cache.py`).
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pyarrow as arrow
from pyarrow.feather import read_table, write_feather
from tqdm import tqdm

from accel_train.core.files import publish_folder
from accel_train.data import cache
from accel_train.recipe.data import Data

Values = dict[str, Any]
"""Arrays, lists of named tuples, and plain JSON values, by name."""
UNUSABLE = (OSError, NotImplementedError, arrow.ArrowException)
"""Errors of a folder without space, without permission, or without locks, and of tables that are too large."""


def keep_values(
    data: Data,
    key: str,
    build: Callable[[], Values],
    make: Callable[..., Any],
    is_current: Callable[[], bool],
    progress: bool,
) -> Values:
    """Return the values of an entry, memory-mapped, or build them, as for `Keep` of rows.

    Args:
        key: digest of everything that determines the values.
        is_current: returns whether the sources are still those that the key names.
    """
    built: Values = {}
    root = cache.cache_root(data)
    folder = root / "kept" / key[:32]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # `evict` may remove it while it is read, but not under its lock.
        with suppress(FileNotFoundError):
            if (values := _opened(folder, make)) is not None:
                return values
        with cache.lock(folder.with_suffix(".lock")):
            if (values := _opened(folder, make)) is not None:
                return values
            if folder.exists():
                say(f"{folder} is damaged, and made again", progress)
                rmtree(folder)
            built = build()
            with publish_folder(folder, folder.with_suffix(".building")) as building:
                cache.complete(building, {"values": _save(building, built)})
                if not is_current():
                    raise OSError("a source changed while it was read")
        if data.limit_bytes:
            cache.evict(root, data.limit_bytes)
    except UNUSABLE as error:
        built = built or build()
        say(f"not kept ({error})", progress)
    return built


def _opened(folder: Path, make: Callable[..., Any]) -> Values | None:
    """Return the values of a folder, or None if they are missing or damaged."""
    if (meta := cache.read_valid_meta(folder)) is None:
        return None
    # Of another user, or on a disk that cannot be written.
    with suppress(OSError):
        os.utime(folder)
    return meta["values"] | {Path(name).stem: _load(folder / name, make) for name in meta["files"]}


def say(note: str, progress: bool) -> None:
    """Write a line about the cache."""
    if progress:
        tqdm.write(f"data.cache_dir: {note}", file=sys.stderr)


@dataclass(frozen=True)
class Rows(Sequence[Any]):
    """Rows that are made when they are read, from the columns of their cells."""

    columns: Sequence[Any]
    make: Callable[..., Any]

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def column(self, name: str) -> list[Any]:
        """Return one field of all rows, without making them."""
        values: list[Any] = self.columns[self.make._fields.index(name)].to_pylist()  # type: ignore[attr-defined]
        return values

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        return self.make(*(_cell(column[places]) for column in self.columns))


def _cell(scalar: Any) -> Any:
    if isinstance(scalar, arrow.ListScalar):
        values = scalar.values
        return values.to_numpy() if arrow.types.is_primitive(values.type) else tuple(map(_cell, values))
    # A label in fp32 stays one.
    return np.float32(scalar.as_py()) if scalar.type == arrow.float32() else scalar.as_py()


def as_table(rows: Iterable[tuple[Any, ...]]) -> arrow.Table:
    """Return a table of named tuples, for `Rows`. Without rows, it has no columns."""
    columns = [*map(list, zip(*rows))]
    return arrow.table(columns, [*map(str, range(len(columns)))])


def _save(folder: Path, values: Values) -> Values:
    """Write arrays and rows to a folder. Return the other values."""
    rest = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            np.save(folder / name, value)
        elif isinstance(value, list) and value and isinstance(value[0], tuple):
            write_feather(as_table(value), folder / f"{name}.arrow", "uncompressed")
        else:
            rest[name] = value
    return rest


def _load(path: Path, make: Callable[..., Any]) -> Any:
    if path.suffix == ".arrow":
        return Rows(read_table(path, memory_map=True).columns, make)
    # As a plain array, because slices of a memmap cost more. torch asks for arrays that can be written (in memory).
    return np.asarray(np.load(path, mmap_mode="c"))
