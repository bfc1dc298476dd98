"""Decode one image, convert its mode, or look at its header and digest without decoding it."""

import io
import os
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from accel_train.core.errors import DataError
from accel_train.core.files import digest64

Mode = Literal["RGB", "L"]
Content = Path | bytes | NDArray[np.uint8]
"""An image as its source has it: a file, what a file would hold, or pixels (H, W) or (H, W, C)."""

_END_BYTES = 1 << 16


def open_image(source: Content, where: str) -> Image.Image:
    """Return a decoded image in its own mode, turned upright as its EXIF orientation says; of several frames, the first.

    Raises:
        DataError: it cannot be decoded; the message begins with `where`.
    """
    if isinstance(source, np.ndarray):
        return Image.fromarray(np.ascontiguousarray(source[..., 0] if source.shape[2:] == (1,) else source))
    _refuse_pipe(source, where)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image
    except Exception as error:  # each of Pillow's decoders has its own way to fail: OSError, SyntaxError, struct.error
        raise DataError(f"{where}: {_fault(source, error)}; repair or remove it") from error


def to_mode(image: Image.Image, mode: Mode, where: str) -> Image.Image:
    """Return an image as 8-bit colour or grey; 16 bits are scaled to 8, transparency is dropped (as transformers does).

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


def inspect_image(source: Content, where: str) -> int:
    """Return 64 bits of the size and of the first and last 64 KiB, after a look at the header; copies have the same.

    Raises:
        ValueError: it cannot be read, is empty, or is of no format that Pillow knows.
    """
    if isinstance(source, np.ndarray):
        return digest64(source.tobytes())
    if isinstance(source, Path) and str(source) != where:
        where = f"{where}: {source}"
    _refuse_pipe(source, where)
    try:
        with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            ends = file.read(_END_BYTES)
            file.seek(max(_END_BYTES, size - _END_BYTES))
            ends += file.read()
            file.seek(0)
            Image.open(file)
    except Exception as error:  # as in open_image
        if isinstance(error, OSError) and error.errno is not None:  # the file system's, not Pillow's
            raise ValueError(f"{where}: cannot be read ({error.strerror}); check the path") from error
        raise ValueError(f"{where}: {_fault(source, error)}; repair or remove it") from error
    return digest64(ends, size)


def _refuse_pipe(source: Path | bytes, where: str) -> None:
    """Opening a pipe would wait for its writer."""
    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise DataError(f"{where}: is no regular file; repair or remove it")


def _fault(source: Path | bytes, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    size = len(source) if isinstance(source, bytes) else os.path.getsize(source) if os.path.isfile(source) else -1
    if size == 0:
        return "is empty, no image"
    reason = "unknown format" if isinstance(error, Image.UnidentifiedImageError) else str(error) or repr(error)
    return f"cannot be read as an image ({reason})"
