"""Values that are computed once, on disk, and memory-mapped by all processes and by later starts (`keep_values`).

They are encoded rows (`open_rows`) and digests of images (`inspect_images`). CACHE/kept/KEY/ has a file for each array
(.npy) and table of rows (.arrow), and meta.json with all other values. Locks, publishing, and checks are those of token
shards (`data/cache.py`).
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as arrow
from pyarrow.feather import read_table, write_feather
from tqdm import tqdm

from accel_train.core.files import publish_folder
from accel_train.core.json_io import json_digest
from accel_train.core.version import __version__
from accel_train.data import cache
from accel_train.data.sources import files_of, num_bytes_of
from accel_train.data.tables import resolve_both
from accel_train.data.text.aligned import target_file
from accel_train.data.text.tokenizers import train_bpe
from accel_train.recipe.data import Data, TrainedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_BYTES = 1 << 20
"""Bytes of the sources from which rows are kept. Smaller sources are encoded at each start, within a second."""

# Part of every key. Raise it when the same rows would be encoded or stored in another way.
_FORMAT = 1
READ_LATER = {"cache_dir", "cache_limit", "num_workers", "pin_memory", "shuffle", "group_by_length", "last_batch"}
"""Settings that do not determine the encoding."""

Values = dict[str, Any]
"""Arrays, lists of named tuples, and plain JSON values, by name."""
Keep = Callable[[Sequence[object], Callable[[], Values], Callable[..., Any]], Values]
"""Function that returns the values of an entry, memory-mapped, or builds them.

The first process builds, the others wait. Errors of a build are not kept. If the cache cannot be written, one line says
so, and the values stay in memory.

Its arguments are all that determines the values besides sources and `data` (with None: they are not kept), the function
that builds them, and the class of the rows. Rows have texts, numbers, None, arrays with one dimension, and tuples.
"""
_UNUSABLE = (OSError, NotImplementedError, arrow.ArrowException)
"""Errors of a folder without space, without permission, or without locks, and of tables that are too large."""


def open_rows(data: Data, progress: bool, sampled: bool = False) -> Keep:
    """Return the function that keeps the rows of a recipe: training data from `LEAST_BYTES` on.

    Files are known by their digests, or by samples of them with `sampled`.

    Raises:
        ValueError: as for `resolve_both`.
    """

    train, held_out, _ = resolve_both(data)
    sources = (*train, *held_out)
    files, root = files_of(sources), cache.cache_root(data) / "text"
    # Of line-aligned texts, the sources name one side.
    if suffix := getattr(data, "target_suffix", None):
        files += filter(Path.is_file, [target_file(file, suffix) for file in files])
    determined: list[object] = []
    if data.is_for_training and sum(map(num_bytes_of, sources)) >= LEAST_BYTES:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stamps = [*map(cache.stamp_of, files)]
            # Names of files are part of names of rows and of notes.
            names = [(source.name, source.notes, source.dataset and source.dataset._fingerprint) for source in sources]
            settings = data.model_dump(mode="json", exclude=READ_LATER)
            versions = [_FORMAT, __version__, *map(version, ("tokenizers", "transformers"))]
            digests = map(cache.sample_digest, files) if sampled else cache.file_digests(files, root, lambda _: None)
            determined = [versions, settings, names, files, *digests]
        except _UNUSABLE as error:
            _say(f"not kept ({error})", progress)

    def keep(contents: Sequence[object], build: Callable[[], Values], make: Callable[..., Any]) -> Values:
        if not determined or None in contents:
            return build()
        key = json_digest([determined, contents, make])
        return keep_values(data, key, build, make, lambda: stamps == [*map(cache.stamp_of, files)], progress)

    return keep


def keep_values(
    data: Data,
    key: str,
    build: Callable[[], Values],
    make: Callable[..., Any],
    is_current: Callable[[], bool],
    progress: bool,
) -> Values:
    """Return the values of an entry, memory-mapped, or build them, as for `Keep`.

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
                _say(f"{folder} is damaged, and made again", progress)
                rmtree(folder)
            built = build()
            with publish_folder(folder, folder.with_suffix(".building")) as building:
                cache.complete(building, {"values": _save(building, built)})
                if not is_current():
                    raise OSError("a source changed while it was read")
        if data.limit_bytes:
            cache.evict(root, data.limit_bytes)
    except _UNUSABLE as error:
        built = built or build()
        _say(f"not kept ({error})", progress)
    return built


def _opened(folder: Path, make: Callable[..., Any]) -> Values | None:
    """Return the values of a folder, or None if they are missing or damaged."""
    if (meta := cache.read_valid_meta(folder)) is None:
        return None
    os.utime(folder)
    values: Values = meta["values"]
    return values | {Path(name).stem: _load(folder / name, make) for name in meta["files"]}


def _say(note: str, progress: bool) -> None:
    if progress:
        tqdm.write(f"data.cache_dir: {note}", file=sys.stderr)


def contents_of(tokenizer: "PreTrainedTokenizerBase") -> list[str] | None:
    """Return everything that determines the ids that a tokenizer gives, or None if its own code does."""
    is_known = tokenizer.is_fast and type(tokenizer).__module__.startswith("transformers.")
    return [repr(tokenizer), tokenizer.backend_tokenizer.to_str()] if is_known else None


def bpe_of(texts: Iterable[str], spec: TrainedTokenizer) -> Values:
    """Return a BPE that is trained on texts, as JSON."""
    return {"bpe": train_bpe(texts, spec.train_bpe.vocab_size).backend_tokenizer.to_str()}


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
