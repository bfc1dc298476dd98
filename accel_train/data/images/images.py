"""Images in files, in the rows of a table, or in an array: found once, decoded one at a time when they are asked for."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.data.decoding import content_digest, digest64, inspect_file, inspect_header, open_image
from accel_train.data.sources import refuse_loops
from accel_train.state import DataError

_SUFFIXES = ".jpg .jpeg .jpe .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .jp2 .avif"
IMAGE_SUFFIXES = frozenset(_SUFFIXES.split())

INSPECTED_LIMIT = 20_000
"""Up to this many images are looked at before training starts (4 s); a fault in more is found when one is read."""

_NUM_HASHES = 2.0**64


class Images(Protocol):
    """Images by number; decoding waits until one is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Image.Image:
        """The image in its file's own mode (palette, 16 bit, CMYK ...), turned upright; a DataError names what is broken."""
        ...

    def where(self, index: int) -> str:
        """The file, or the file and row, for messages."""
        ...

    def inspect(self, index: int) -> int:
        """64 bits that stand for its contents, after a look at its header; a ValueError names what is no image."""
        ...

    def stamp(self) -> str:
        """What tells this set from another without reading the images: names and sizes."""
        ...


@dataclass(frozen=True)
class FileImages:
    """Image files below a folder."""

    root: Path
    names: tuple[str, ...]
    """Relative to `root`."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Image.Image:
        return open_image(self.root / self.names[index], self.where(index))

    def where(self, index: int) -> str:
        return str(self.root / self.names[index])

    def inspect(self, index: int) -> int:
        return inspect_file(self.root / self.names[index], self.where(index))

    def stamp(self) -> str:
        sizes = (os.stat(self.root / name).st_size for name in self.names)
        return text_digest(f"{name} {size}" for name, size in zip(self.names, sizes))


@dataclass(frozen=True)
class RowImages:
    """Images in a column of a table: their bytes, paths, or what `datasets` keeps of an image ({bytes, path})."""

    values: Sequence[Any]
    folder: Path
    """Where relative paths begin."""
    column: str
    name: str
    """Of the table."""
    places: tuple[str, ...] | None = None
    """File and line of each row, where rows are lines."""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Image.Image:
        return open_image(self._content(index), self.where(index))

    def where(self, index: int) -> str:
        return self.places[index] if self.places is not None else f"{self.name}, row {index + 1}"

    def inspect(self, index: int) -> int:
        content = self._content(index)
        if isinstance(content, Path):
            return inspect_file(content, f"{self.where(index)}: {content}")
        inspect_header(content, self.where(index))
        return content_digest(content)

    def stamp(self) -> str:
        return f"{Path(self.name).name} {len(self)}"

    def _content(self, index: int) -> Path | bytes:
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


@dataclass(frozen=True)
class ArrayImages:
    """Images in one array, in memory or memory-mapped: (N, H, W) or (N, H, W, 1, 3 or 4), uint8."""

    array: NDArray[np.uint8]
    name: str

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Image.Image:
        pixels = self.array[index]
        return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[-1:] == (1,) else pixels))

    def where(self, index: int) -> str:
        return f"{self.name}:{index}"

    def inspect(self, index: int) -> int:
        return digest64(self.array[index].tobytes(), 0)

    def stamp(self) -> str:
        return f"{Path(self.name).name} {self.array.shape}"


@dataclass(frozen=True)
class JoinedImages:
    """Several sets, one after the other."""

    parts: tuple[Images, ...]
    stops: tuple[int, ...]

    def __len__(self) -> int:
        return self.stops[-1]

    def __getitem__(self, index: int) -> Image.Image:
        part, inner = self._find(index)
        return part[inner]

    def where(self, index: int) -> str:
        part, inner = self._find(index)
        return part.where(inner)

    def inspect(self, index: int) -> int:
        part, inner = self._find(index)
        return part.inspect(inner)

    def stamp(self) -> str:
        return text_digest(part.stamp() for part in self.parts)

    def _find(self, index: int) -> tuple[Images, int]:
        number = int(np.searchsorted(self.stops, index, side="right"))
        return self.parts[number], index - (self.stops[number - 1] if number else 0)


def join_images(parts: Sequence[Images]) -> Images:
    """Several sets as one."""
    return parts[0] if len(parts) == 1 else JoinedImages(tuple(parts), tuple(np.cumsum([len(part) for part in parts])))


def list_images(folder: Path) -> tuple[list[str], int]:
    """The image files below a folder, by relative name and sorted, and how many other files there are; hidden ones are left out."""
    refuse_loops(folder)
    names, num_others = [], 0
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [name for name in files if not name.startswith(".")]
        images = [name for name in visible if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES]
        num_others += len(visible) - len(images)
        prefix = os.path.relpath(root, folder)
        names += images if prefix == "." else [f"{prefix}/{name}" for name in images]
    return sorted(names), num_others


def inspect_images(images: Images) -> NDArray[np.uint64]:
    """The digest of each image's contents; all headers are looked at. 20,000 files of 40 kB cost 4 s of CPU.

    Raises:
        ValueError: some are no images; the text names the first of them, and says how many there are.
    """

    def look(index: int) -> int | ValueError:
        try:
            return images.inspect(index)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        found = list(threads.map(look, range(len(images))))
    faults = [result for result in found if isinstance(result, ValueError)]
    if faults:
        more = f" (and {len(faults) - 1} more of {len(found)} images are broken)" if len(faults) > 1 else ""
        raise ValueError(f"{faults[0]}{more}")
    return np.array(found, dtype=np.uint64)


def held_out(digests: NDArray[np.uint64], eval_fraction: float) -> NDArray[np.bool_]:
    """Which images are held out: those whose digest lies in the lowest `eval_fraction`, and at least one.

    Decided by the contents alone: copies of an image are on one side, in any order of the files and whatever the seed.
    """
    if eval_fraction == 0 or not len(digests):
        return np.zeros(len(digests), dtype=bool)
    chosen: NDArray[np.bool_] = digests.astype(np.float64) < eval_fraction * _NUM_HASHES
    return chosen if chosen.any() else digests == digests.min()


def text_digest(lines: Iterable[str]) -> str:
    """128 bits of BLAKE2b over some lines, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()
