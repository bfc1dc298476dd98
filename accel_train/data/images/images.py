"""Images in files, table rows or an array: listed once, decoded one at a time on request."""

import hashlib
import os
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.core.errors import DataError
from accel_train.core.files import refuse_link_loops
from accel_train.core.terminal import is_main
from accel_train.core.version import __version__
from accel_train.data.cache import SETTLED_SECONDS
from accel_train.data.images.boxes import Boxes
from accel_train.data.images.decoding import Content, inspect_image, open_image
from accel_train.recipe.data import Data

_SUFFIXES = ".jpg .jpeg .jpe .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .jp2 .avif"
IMAGE_SUFFIXES = tuple(_SUFFIXES.split())

INSPECTED_LIMIT = 20_000
"""Most images to inspect before training starts (4 s). In larger sets, a broken image is found when it is read."""

LEAST_KEPT = 2_000
"""Images from which digests are kept. Smaller sets are inspected at each start, within half a second."""

BROKEN = np.iinfo(np.uint64).max
"""Digest of an image that cannot be read. It is not held out."""
_NUM_HASHES = 2.0**64

Item = TypeVar("Item")
Result = TypeVar("Result")


class Images(ABC):
    """Images by number, in files, rows or arrays, decoded when read."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def content(self, index: int) -> Content:
        """Return the content of an image. Raises DataError if a row has no image."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Return the file, or the file and row, for messages."""

    @abstractmethod
    def stamp(self) -> str:
        """Return a digest of names and sizes that identifies the set without reading the images."""

    def stamps(self) -> Iterator[tuple[Any, ...]]:
        """Yield path, size, and times of each file. The last one changes with the content, whatever a program sets.

        Raises:
            NotImplementedError: images are not files of their own.
            OSError: a file is missing.
        """
        raise NotImplementedError

    def __getitem__(self, index: int) -> Image.Image:
        """Return an upright image in its file's mode (palette, 16-bit, CMYK ...). Raises DataError if it is broken."""
        return open_image(self.content(index), self.where(index))

    def inspect(self, index: int) -> int:
        """Return a 64-bit digest of the content after checking the header. Raises ValueError if it is not an image."""
        return inspect_image(self.content(index), self.where(index))


@dataclass(frozen=True)
class FileImages(Images):
    """Image files by their names relative to a folder `root`."""

    root: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def content(self, index: int) -> Path:
        return self.root / self.names[index]

    def where(self, index: int) -> str:
        return str(self.content(index))

    def stamp(self) -> str:
        return text_digest(f"{name} {os.stat(self.root / name).st_size}" for name in self.names)

    def stamps(self) -> Iterator[tuple[Any, ...]]:
        for name in self.names:
            stat = os.stat(path := os.path.join(self.root, name))
            yield path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@dataclass(frozen=True)
class RowImages(Images):
    """Images in a table column: bytes, paths, or the {bytes, path} of `datasets`."""

    values: Sequence[Any]
    folder: Path
    """Folder to which paths are relative."""
    column: str
    table: str
    places: tuple[str, ...] | None = None
    """File and line of each row, if rows are lines."""

    def __len__(self) -> int:
        return len(self.values)

    def content(self, index: int) -> Path | bytes:
        value = self.values[index]
        if isinstance(value, dict):
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return value
        if isinstance(value, str) and value:
            return self.folder / value
        shown = "empty" if value in (None, "") else f"a {type(value).__name__}"
        raise DataError(
            f"{self.where(index)}, column {self.column!r}: it is {shown}, no image (its bytes, or a path relative to "
            f"{self.folder}); repair the row, or name another column"
        )

    def where(self, index: int) -> str:
        return self.places[index] if self.places is not None else f"{self.table}, row {index + 1}"

    def stamp(self) -> str:
        return f"{Path(self.table).name} {len(self)}"


@dataclass(frozen=True)
class ArrayImages(Images):
    """Images in one array, in memory or memory-mapped: (N, H, W) or (N, H, W, 1, 3 or 4), uint8."""

    array: NDArray[np.uint8]
    name: str

    def __len__(self) -> int:
        return len(self.array)

    def content(self, index: int) -> NDArray[np.uint8]:
        return np.asarray(self.array[index])

    def where(self, index: int) -> str:
        return f"{self.name}:{index}"

    def stamp(self) -> str:
        return f"{Path(self.name).name} {self.array.shape}"


@dataclass(frozen=True)
class JoinedImages(Images):
    """Several sets in sequence."""

    parts: tuple[Images, ...]
    stops: tuple[int, ...]

    def __len__(self) -> int:
        return self.stops[-1]

    def content(self, index: int) -> Content:
        part, inner = self._find(index)
        return part.content(inner)

    def where(self, index: int) -> str:
        part, inner = self._find(index)
        return part.where(inner)

    def stamp(self) -> str:
        return text_digest(part.stamp() for part in self.parts)

    def stamps(self) -> Iterator[tuple[Any, ...]]:
        return chain.from_iterable(part.stamps() for part in self.parts)

    def _find(self, index: int) -> tuple[Images, int]:
        number = bisect_right(self.stops, index)
        return self.parts[number], index - (self.stops[number - 1] if number else 0)


def join_images(parts: Sequence[Images]) -> Images:
    """Return several sets as one."""
    return parts[0] if len(parts) == 1 else JoinedImages(tuple(parts), tuple(accumulate(map(len, parts))))


@dataclass(frozen=True)
class Target:
    """The labels or masks that images are read with."""

    column: str | None
    """Name of their column or array. None: images to predict."""
    is_mask: bool

    @property
    def label(self) -> str | None:
        """Return the column with labels; None if there are masks."""
        return None if self.is_mask else self.column

    @property
    def mask(self) -> str | None:
        """Return the column with masks; None if there are labels."""
        return self.column if self.is_mask else None


@dataclass(frozen=True)
class ImagePool:
    """All images that one recipe key names, before labels become numbers."""

    images: Images
    description: str
    labels: list[Any] = field(default_factory=list)
    """Label of each image in its source, a name or an integer. Empty for masks and without `data.label_column`."""
    masks: Images | None = None
    """Masks. None for labels and without `data.mask_column`."""
    names: tuple[str, ...] | None = None
    """The data set's names for integer labels."""
    ids: list[str] | None = None
    notes: tuple[str, ...] = ()
    class_ids: NDArray[np.int64] | None = None
    """Labels as numbers, once the classes are known."""
    boxes: tuple[Boxes, ...] | None = None
    """Boxes of each image. None for labels and masks, and for images to predict."""


def list_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the image files and the other files below a folder, sorted by relative name, without hidden files."""
    refuse_link_loops(folder)
    images: list[str] = []
    others: list[str] = []
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        prefix = os.path.relpath(root, folder)
        for name in files:
            if not name.startswith("."):
                side = images if name.lower().endswith(IMAGE_SUFFIXES) else others
                side.append(name if prefix == "." else f"{prefix}/{name}")
    return sorted(images), sorted(others)


def list_images(folder: Path) -> list[str]:
    """Return the image files below a folder, sorted by relative name."""
    return list_files(folder)[0]


def inspect_images(images: Images, data: Data, most_broken: int = 0) -> NDArray[np.uint64]:
    """Return the content digest of each image and check all headers. 20,000 files of 40 kB take 4 s of CPU time.

    The digest of an image that cannot be read is `BROKEN`. Digests of `LEAST_KEPT` or more files stay in the cache of
    `data`, and are read from there until a file is added, removed, or changed.

    Raises:
        ValueError: more than `most_broken` files are not images; the message names the first and the number of faults.
    """

    faults: dict[int, ValueError] = {}

    def look(index: int) -> int:
        try:
            return images.inspect(index)
        except ValueError as error:
            faults[index] = error
            return BROKEN

    def build() -> dict[str, Any]:
        return {"digests": np.array(in_threads(look, range(len(images))), np.uint64)}

    known = _known_by(images) if data.is_for_training and len(images) >= LEAST_KEPT else None
    if known is None:
        digests = build()["digests"]
    else:
        from accel_train.data.text.kept import keep_values

        digests = keep_values(data, known, build, tuple, lambda: known == _known_by(images), is_main())["digests"]
    # They may have been kept, and are named, or can be read again.
    broken = np.flatnonzero(digests == BROKEN).tolist()
    faults.clear()
    digests[broken] = in_threads(look, broken)
    if len(faults) > most_broken:
        more = f" (and {len(faults) - 1} more of {len(images)} images)" if len(faults) > 1 else ""
        raise ValueError(f"{faults[min(faults)]}{more}")
    return digests


def _known_by(images: Images) -> str | None:
    """Return a digest that changes with any image's file, without reading it, or None if no such digest exists."""
    with suppress(OSError, NotImplementedError):
        stamps = [*images.stamps()]
        if max(stamp[-1] for stamp in stamps) < time.time_ns() - SETTLED_SECONDS * 1e9:
            return text_digest([__version__, os.getcwd(), *map(str, stamps)])
    return None


def held_out(digests: NDArray[np.uint64], eval_fraction: float) -> NDArray[np.bool_]:
    """Return a mask of held-out images: digests in the lowest `eval_fraction`, at least one image.

    The split depends only on content. Copies of an image stay on one side, for any file order and seed.
    """
    if eval_fraction == 0 or not len(digests):
        return np.zeros(len(digests), dtype=bool)
    chosen: NDArray[np.bool_] = digests.astype(np.float64) < eval_fraction * _NUM_HASHES
    return chosen if chosen.any() else digests == digests.min()


def evenly_spaced(size: int, limit: int) -> list[int]:
    """Return `limit` evenly spaced numbers below `size`, or all numbers if `size` is not larger."""
    count = min(size, limit)
    return [number * size // count for number in range(count)]


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the result of `work` for each item. Threads help because decoders and reads release the GIL."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(work, items))


def text_digest(lines: Iterable[str]) -> str:
    """Return 128 bits of BLAKE2b over lines, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()
