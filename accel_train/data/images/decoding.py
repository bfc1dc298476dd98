"""Decode an image, convert its mode, or inspect its header and digest without decoding."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from accel_train.core.errors import DataError
from accel_train.core.files import digest64

Mode = Literal["RGB", "L"]
Content = Path | bytes | NDArray[np.uint8]
"""Content of an image in its source: a file, the bytes of a file, or pixels (H, W) or (H, W, C)."""

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow's names of the formats that are opened, whatever a file is called. Pillow starts a program for others."""
_END_BYTES = 1 << 16


def open_header(source: Path | bytes | BinaryIO) -> Image.Image:
    """Return an image before its pixels are decoded. All images of the package are opened here, as one of `FORMATS`.

    Raises:
        OSError, SyntaxError, ValueError: Pillow cannot read it.
    """
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats)


def open_image(source: Content, where: str) -> Image.Image:
    """Return a decoded image in its own mode, rotated by its EXIF orientation. Of several frames, the first.

    Raises:
        DataError: the image cannot be decoded; the message begins with `where`.
    """
    if isinstance(source, np.ndarray):
        return Image.fromarray(np.ascontiguousarray(source[..., 0] if source.shape[2:] == (1,) else source))
    with _reading(source, where), open_header(source) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return image


def to_mode(image: Image.Image, mode: Mode, where: str) -> Image.Image:
    """Return an image as 8-bit color or grayscale.

    16-bit values are scaled to 8 bits. Transparency is dropped, as in transformers.

    Raises:
        DataError: pixels have 32 bits, for which no range is standard.
    """
    if image.mode == mode:
        return image
    if image.mode.startswith("I;16"):
        wide = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floating-point numbers"
        raise DataError(
            f"{where}: its pixels are 32-bit {kind}; 32-bit values have no standard range. Save it with 8 or 16 bits"
        )
    elif image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    return image.convert(mode)


def inspect_image(source: Content, where: str) -> int:
    """Return a 64-bit digest of an image's size and its first and last 64 KiB, after checking the header.

    Copies of an image have equal digests.

    Raises:
        DataError: the image cannot be read, is empty, or has a format unknown to Pillow.
    """
    if isinstance(source, np.ndarray):
        return digest64(source.tobytes())
    with _reading(source, where), _opened(source) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        ends = file.read(_END_BYTES)
        file.seek(max(_END_BYTES, size - _END_BYTES))
        ends += file.read()
        file.seek(0)
        open_header(file)
    return digest64(ends, size)


def image_header(source: Path | bytes, where: str) -> tuple[tuple[int, int], int]:
    """Return the stored width and height of an image and its EXIF orientation (1 without one), without decoding.

    Raises:
        DataError: the header cannot be read; the message begins with `where`.
    """
    with _reading(source, where), open_header(source) as image:
        return image.size, int(image.getexif().get(ExifTags.Base.Orientation, 1))


def _opened(source: Path | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


@contextmanager
def _reading(source: Path | bytes, where: str) -> Iterator[None]:
    """Raise DataError for every failure within. `where` is a file, or a place in a table that names the file."""
    if isinstance(source, Path):
        where = where if str(source) == where else f"{where}: {source}"
        # Opening a pipe would block until it has a writer.
        if os.path.exists(source) and not os.path.isfile(source):
            raise DataError(f"{where}: is not a regular file; repair or remove it")
    try:
        yield
    # Pillow's decoders fail in different ways: OSError, SyntaxError, struct.error.
    except Exception as error:
        raise DataError(f"{where}: {_fault(source, error)}") from error


def _fault(source: Path | bytes, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file does not exist; check the path, or remove the entry"
    if isinstance(error, OSError) and error.errno is not None:  # from the file system, not from Pillow
        return f"cannot be read ({error.strerror}); check the path"
    size = len(source) if isinstance(source, bytes) else os.path.getsize(source) if os.path.isfile(source) else -1
    if size == 0:
        return "is empty, no image; repair or remove it"
    if isinstance(error, Image.UnidentifiedImageError) and (found := _other_format(source)) is not None:
        return f"has the format {found}, which is not read; save it as PNG"
    reason = "unknown format" if isinstance(error, Image.UnidentifiedImageError) else str(error) or repr(error)
    return f"cannot be read as an image ({reason}); repair or remove it"


def _other_format(source: Path | bytes) -> str | None:
    """Return the format outside `FORMATS` that the first bytes name, for messages, or None."""
    with _opened(source) as file:
        start = file.read(16)
    if start.startswith(b"%PDF"):
        return "PDF"
    for name, (_, accepts) in Image.OPEN.items():
        with suppress(Exception):  # a plugin's test of a short file
            if name not in FORMATS and accepts is not None and accepts(start):
                return name
    return None
