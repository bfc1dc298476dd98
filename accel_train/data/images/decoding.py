"""One image: from a file's bytes to pixels, and what can be said of it before that."""

import hashlib
import io
import os
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from accel_train.state import DataError

Mode = Literal["RGB", "L"]

_END_BYTES = 1 << 16


def open_image(source: Path | bytes, where: str) -> Image.Image:
    """A decoded image in its own mode, turned upright as its EXIF orientation says; of several frames, the first.

    Raises:
        DataError: it cannot be decoded; the text begins with `where`.
    """
    if isinstance(source, Path):
        _refuse_pipe(source, where)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image
    except Exception as error:  # each of Pillow's decoders has its own way to fail: OSError, SyntaxError, struct.error
        raise DataError(f"{where}: {_fault(source, error)}; repair or remove it") from error


def to_mode(image: Image.Image, mode: Mode, where: str) -> Image.Image:
    """An image as 8-bit colour or grey; 16 bits are scaled to 8, transparency is dropped (as transformers does).

    Raises:
        DataError: pixels of 32 bits, for which no range is agreed.
    """
    if image.mode == mode:
        return image
    if image.mode.startswith("I;16"):
        wide = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floating-point numbers"
        raise DataError(f"{where}: its pixels are 32-bit {kind}, which have no agreed range; save it with 8 or 16 bits")
    elif image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    return image.convert(mode)


def content_digest(data: bytes) -> int:
    """64 bits of the size and of the first and last 64 KiB: copies have the same, whatever their names."""
    ends = data if len(data) <= 2 * _END_BYTES else data[:_END_BYTES] + data[-_END_BYTES:]
    return digest64(ends, len(data))


def inspect_file(path: Path, where: str) -> int:
    """`content_digest` of a file, after a look at its header; reads 128 KiB at most.

    Raises:
        ValueError: it cannot be read, or is no image.
    """
    _refuse_pipe(path, where)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            ends = file.read(2 * _END_BYTES if size <= 2 * _END_BYTES else _END_BYTES)
            if size > 2 * _END_BYTES:
                file.seek(-_END_BYTES, os.SEEK_END)
                ends += file.read()
    except OSError as error:
        raise ValueError(f"{where}: cannot be read ({error.strerror}); check the path") from error
    try:
        inspect_header(ends, where)
    except ValueError:
        inspect_header(path, where)  # a header may lie deeper in the file (TIFF, large profiles)
    return digest64(ends, size)


def inspect_header(source: Path | bytes, where: str) -> None:
    """Refuse what does not begin like an image.

    Raises:
        ValueError: it is empty or of no format that Pillow knows.
    """
    try:
        Image.open(io.BytesIO(source) if isinstance(source, bytes) else source).close()
    except Exception as error:  # as in open_image
        raise ValueError(f"{where}: {_fault(source, error)}; repair or remove it") from error


def _refuse_pipe(path: Path, where: str) -> None:
    """Opening a pipe would wait for whoever writes into it."""
    if path.exists() and not path.is_file():
        raise DataError(f"{where}: is no regular file; repair or remove it")


def _fault(source: Path | bytes, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    size = len(source) if isinstance(source, bytes) else os.path.getsize(source) if os.path.isfile(source) else -1
    if size == 0:
        return "is empty, no image"
    reason = "unknown format" if isinstance(error, Image.UnidentifiedImageError) else str(error) or repr(error)
    return f"cannot be read as an image ({reason})"


def digest64(data: bytes, size: int) -> int:
    """64 bits of BLAKE2b over some bytes, and a size in bytes: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=size.to_bytes(16, "big")).digest(), "big")
