"""Images in WebDataset tars, read where they lie.

The headers of a tar are read once. CACHE/images/tars/KEY.json lists its samples, by path, size, and modification time.
"""

import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from accel_train.core.errors import DataError
from accel_train.core.format import format_count
from accel_train.core.json_io import json_digest, parse_json, write_plain_json
from accel_train.core.state import JsonRecord
from accel_train.data import cache
from accel_train.data.images.images import (
    IMAGE_SUFFIXES,
    ImagePool,
    Images,
    Target,
    in_threads,
    join_images,
    text_digest,
)
from accel_train.recipe.data import Data

# Part of every key. Raise it when the samples of the same tar would be listed in another way.
_FORMAT = 1
_TAR = re.compile(r".*\.(tar|tgz)(\.\w+)?", re.IGNORECASE)
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)(\.[^/]*)")
"""Key of the sample, and ending of a file. Hidden files do not match."""
_REPAIR = "write it again, or leave it out"


@dataclass(frozen=True)
class TarImages(Images):
    """Images in one tar, by the place of their bytes."""

    path: Path
    names: NDArray[np.str_]
    """Member name of each image, (N,)."""
    spans: NDArray[np.int64]
    """Offset and size of each image, (N, 2), in bytes."""
    stamp_ns: int
    """Modification time of the tar when it was listed."""

    def __len__(self) -> int:
        return len(self.spans)

    def content(self, index: int) -> bytes:
        offset, size = self.spans[index].tolist()
        try:
            found = os.pread(_opened(self.path, self.stamp_ns), size, offset)
        except OSError as error:
            raise DataError(f"{self.where(index)}: cannot be read ({error.strerror}); check the tar") from error
        if len(found) < size:
            raise DataError(f"{self.where(index)}: the tar ends after {len(found):,} of its {size:,} bytes; {_REPAIR}")
        return found

    def where(self, index: int) -> str:
        return f"{self.path}, sample {index + 1} ({self.names[index]})"

    def stamp(self) -> str:
        return text_digest([self.path.name, self.spans.tobytes().hex()])


class _Opened(int):
    """A file descriptor that is closed with its last reference."""

    def __del__(self) -> None:
        os.close(self)


# The usual limit is 1,024 open files. A tar that has changed is opened again.
@lru_cache(256)
def _opened(path: Path, stamp_ns: int) -> _Opened:
    return _Opened(os.open(path, os.O_RDONLY))


def tars_among(files: Iterable[Path]) -> list[Path]:
    """Return the tars among files, by their names.

    Raises:
        ValueError: a tar is compressed.
    """
    tars = [file for file in files if _TAR.fullmatch(file.name)]
    for tar in tars:
        if tar.suffix.lower() != ".tar":
            raise ValueError(f"{tar}: is compressed, and images are read where they lie in a tar; decompress it")
    return tars


def tars_pool(name: str, tars: Sequence[Path], data: Data, target: Target) -> ImagePool:
    """Return the images of tars with their labels or masks.

    The label is the column of the sample's `.json`, or its `.cls` (a number or a name), or its `.txt`. The mask is the
    image with the longer ending (`.mask.png`), or the `.png` next to another format.

    Raises:
        DataError: a tar is damaged, or a sample has no image or several.
    """
    folder = cache.cache_root(data) / "images" / "tars"
    folder.mkdir(parents=True, exist_ok=True)
    # One process lists the samples; the others read its result.
    with cache.lock(folder / "lock"):
        found = in_threads(partial(_read_tar, folder, target), tars)
    images, *masks = (join_images(parts) for parts in zip(*(parts for parts, _ in found)))
    return ImagePool(
        images,
        f"{name}: {format_count(len(images), 'image')} in {format_count(len(tars), 'tar')}",
        [label for _, labels in found for label in labels],
        masks=next(iter(masks), None),
    )


def _read_tar(folder: Path, target: Target, path: Path) -> tuple[list[TarImages], list[Any]]:
    """Return images, masks if any, and labels of a tar, as `folder` keeps them, or list and keep them."""
    stamp = cache.stamp_of(path)
    num_parts = 2 if target.mask else 1
    place = [_FORMAT, path.resolve(), stamp, target.label, *["mask"] * (num_parts - 1)]
    kept = folder / f"{json_digest(place)}.json"
    if (found := cache.read_json(kept)) is None:
        found = list_samples(path, target.label, num_parts)
        write_plain_json(kept, found, durable=False)
    names, spans = np.array(found["names"], np.str_), np.array(found["spans"], np.int64).reshape(-1, 2)
    parts = [slice(number, None, num_parts) for number in range(num_parts)]
    return [TarImages(path, names[part], spans[part], stamp[1]) for part in parts], found["labels"]


def list_samples(path: Path, column: str | None, num_parts: int = 1) -> JsonRecord:
    """Return names, spans, and labels of the images in a tar, from its headers and its labels. Images are not read.

    A sample has one image, or with `num_parts` of 2 an image and its mask, which follow each other in the result.

    As in WebDataset, a sample is the files that follow each other and have the same name up to the first dot. A tar may
    be cut within its last image, whose read then fails.

    Raises:
        DataError: the tar cannot be read or is cut, or a sample has no image or several.
    """
    names, spans, labels = list[str](), list[tuple[int, int]](), list[Any]()
    try:
        with tarfile.open(path, "r:") as tar, path.open("rb") as file:
            for key, files in groupby(_files(tar), itemgetter(0)):
                members = {ending: member for _, ending, member in files}
                endings = [each for each in members if each[(num_parts > 1) * each.rindex(".") :] in IMAGE_SUFFIXES]
                if len(endings) != num_parts:
                    raise ValueError(f"{key} has {len(endings)} images instead of {num_parts}")
                for ending in sorted(endings, key=lambda each: (each.count("."), each == ".png")):
                    names.append(members[ending].name)
                    spans.append((members[ending].offset_data, members[ending].size))
                labels += [] if column is None else [_label(file, members, column)]
            is_cut_within = max(map(sum, spans), default=0) > file.seek(0, os.SEEK_END)
            file.seek(tar.offset)
            if not is_cut_within and file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ValueError(f"cut or damaged at byte {tar.offset:,}")
    except (OSError, tarfile.TarError, TypeError, ValueError) as error:
        number = len(spans) // num_parts
        raise DataError(f"{path}: cannot be listed after sample {number} ({error}); {_REPAIR}") from error
    return {"names": names, "spans": spans, "labels": labels}


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield key, ending, and header of each file, up to the end of a tar, or up to where it is cut."""
    while True:
        try:
            member = tar.next()
        except tarfile.ReadError:
            return
        if member is None:
            return
        # They are kept otherwise, and need memory.
        tar.members.clear()  # type: ignore[attr-defined]
        if member.isreg() and (name := _MEMBER.fullmatch(member.name)):
            yield name[1], name[2].lower(), member


def _label(file: BinaryIO, members: dict[str, tarfile.TarInfo], column: str) -> Any:
    def text(ending: str) -> str:
        file.seek(members[ending].offset_data)
        return file.read(members[ending].size).decode().strip()

    if ".json" in members and (label := dict(parse_json(text(".json"))).get(column)) is not None:
        return label
    if ".cls" in members:
        return int(number) if (number := text(".cls")).isdecimal() else number
    return text(".txt") if ".txt" in members else None
