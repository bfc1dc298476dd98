"""The index of a sharded checkpoint: the file and the place of each part of each tensor.

A process reads the index, and opens only the shards that hold its parts. Tensors that are divided alike share one list
of parts, so the index grows with the number of tensors plus the number of shards, not with their product.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from accel_train.core.errors import CheckpointError
from accel_train.core.json_io import parse_json, read_plain_json

INDEX = "shards.json"
Slices = tuple[slice, ...]


class Part(NamedTuple):
    """A part of a tensor in a file. `dtype` is safetensors' name of the type."""

    file: str
    name: str
    dtype: str
    start: tuple[int, ...]
    size: tuple[int, ...]


class Division(NamedTuple):
    """A division of a tensor: the file of each part (N,), and where it begins and ends in the tensor, (N, dim)."""

    files: tuple[str, ...]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


class ShardIndex(NamedTuple):
    """The tensors of a sharded checkpoint by name: their types (by safetensors' names), and how they are divided."""

    dtypes: dict[str, str]
    divisions: dict[str, Division]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "ShardIndex":
        """Return the index of these parts."""
        by_name: dict[str, list[Part]] = {}
        for part in parts:
            by_name.setdefault(part.name, []).append(part)
        places = {name: tuple((part.file, part.start, part.size) for part in each) for name, each in by_name.items()}
        known = {each: _division(each) for each in places.values()}
        dtypes = {name: each[0].dtype for name, each in by_name.items()}
        return cls(dtypes, {name: known[each] for name, each in places.items()})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return tuple(self.divisions[name].stops.max(0).tolist())

    def find(self, name: str, region: Slices) -> Iterator[tuple[str, Slices, Slices]]:
        """Yield the parts that overlap a region of a tensor: file, slices in the part, slices in the region.

        Raises:
            CheckpointError: the parts do not cover the region.
        """
        division, num_found = self.divisions[name], 0
        begin, end = (np.array([getattr(each, side) for each in region], np.int64) for side in ("start", "stop"))
        low, high = np.maximum(division.starts, begin), np.minimum(division.stops, end)
        for row in np.flatnonzero((low < high).all(1)).tolist():
            num_found += int((high[row] - low[row]).prod())
            within = _slices(low[row] - division.starts[row], high[row] - division.starts[row])
            yield division.files[row], within, _slices(low[row] - begin, high[row] - begin)
        if num_found != (end - begin).prod():
            raise CheckpointError(f"{name} is not complete in the shards of the checkpoint")

    def text(self) -> str:
        """Return the index as JSON."""
        unique = list({id(each): each for each in self.divisions.values()}.values())
        files = sorted({file for division in unique for file in division.files})
        number, at = ({each: n for n, each in enumerate(items)} for items in (files, map(id, unique)))
        content = {
            "files": files,
            "divisions": [
                [[number[file] for file in each.files], each.starts.tolist(), (each.stops - each.starts).tolist()]
                for each in unique
            ],
            "tensors": {name: [dtype, at[id(self.divisions[name])]] for name, dtype in self.dtypes.items()},
        }
        return json.dumps(content, separators=(",", ":"))


def parts_in(file: Path) -> Iterator[Part]:
    """Yield the parts of tensors in a safetensors file. Those of an unsharded file are whole."""
    with safe_open(file, "pt") as opened:
        places = parse_json((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            size = tuple(part.get_shape())
            start = tuple(places[name]["saved_offsets"]) if name in places else (0,) * len(size)
            yield Part(file.name, name, part.get_dtype(), start, size)


def index_in(folder: Path) -> ShardIndex:
    """Return the index of a sharded checkpoint. A checkpoint without its file is read once, shard by shard.

    Raises:
        CheckpointError: the index is damaged.
    """
    file = folder / INDEX
    # A rollback may write the checkpoint of a step again.
    facts = (file if file.exists() else folder).stat()
    return _index_in(folder, (facts.st_ino, facts.st_mtime_ns))


@lru_cache(maxsize=1)
def _index_in(folder: Path, _: object) -> ShardIndex:
    if not (folder / INDEX).exists():
        return ShardIndex.of(part for file in sorted(folder.glob("shard-*.safetensors")) for part in parts_in(file))
    try:
        content = read_plain_json(folder / INDEX)
        files, divisions = content["files"], content["divisions"]
        if any(Path(file).name != file for file in files):
            raise ValueError("a shard is not a plain file name")
        known = [
            _division([(files[number], tuple(start), tuple(size)) for number, start, size in zip(*each, strict=True)])
            for each in divisions
        ]
        tensors = content["tensors"].items()
        return ShardIndex(
            {str(name): str(dtype) for name, (dtype, _) in tensors}, {name: known[n] for name, (_, n) in tensors}
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read ({type(error).__name__})") from error


def _division(places: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> Division:
    files, starts, sizes = zip(*places)
    start = np.array(starts, np.int64).reshape(len(files), len(starts[0]))
    return Division(files, start, start + np.array(sizes, np.int64).reshape(start.shape))


def _slices(begin: NDArray[np.int64], end: NDArray[np.int64]) -> Slices:
    return tuple(map(slice, begin.tolist(), end.tolist()))
