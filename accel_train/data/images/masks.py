"""Masks as stored in files: the value of each pixel, and the mapping of values to classes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.core.errors import DataError
from accel_train.core.files import digest64
from accel_train.data.images.decoding import Content
from accel_train.data.images.images import Images, text_digest

Mask = NDArray[np.uint8]

_LOSSY_FORMATS = ("JPEG", "MPO")


def mask_values(mask: Image.Image, where: str) -> Mask:
    """Return the pixel values of a mask, (H, W).

    Accepts grayscale (also saved as RGB), palette (indices, not colors), black and white (0, 1), and 16-bit masks.

    Raises:
        DataError: the mask is a JPEG or a color image, or a value is above 255.
    """
    if mask.format in _LOSSY_FORMATS:
        raise DataError(
            f"{where}: a mask must not be a JPEG, because JPEG smears class numbers at every edge. Write the masks "
            f"as PNG again, from the original"
        )
    values = np.asarray(mask)
    if mask.mode == "RGB" and (values == values[..., :1]).all():
        values = values[..., 0]
    elif mask.mode not in ("L", "P", "1", "I") and not mask.mode.startswith("I;16"):
        raise DataError(
            f"{where}: a mask of mode {mask.mode} holds colors, not class numbers (gray or palette). Use accel-train "
            "finetune FOLDER, which writes them as numbers to runs/NAME-data (without settings about numbers)"
        )
    if values.size and (values.max() > 255 or values.min() < 0):
        raise DataError(f"{where}: a pixel is {values.max()}; class numbers are 0 to 255")
    return values.astype(np.uint8)


@dataclass(frozen=True)
class RenumberedMasks(Images):
    """Masks whose values are mapped to classes by a table of 256."""

    masks: Images
    table: bytes
    """Class of each value."""

    def __len__(self) -> int:
        return len(self.masks)

    def content(self, index: int) -> Content:
        return self.masks.content(index)

    def where(self, index: int) -> str:
        return self.masks.where(index)

    def stamp(self) -> str:
        return text_digest([self.masks.stamp(), self.table.hex()])

    def stamps(self) -> Iterator[tuple[Any, ...]]:
        return ((self.table.hex(), *stamp) for stamp in self.masks.stamps())

    def inspect(self, index: int) -> int:
        return self.masks.inspect(index) ^ self._digest

    def __getitem__(self, index: int) -> Image.Image:
        """Return the classes as a grayscale image. Raises DataError if the mask is broken."""
        values = mask_values(self.masks[index], self.where(index))
        return Image.fromarray(np.frombuffer(self.table, np.uint8)[values])

    @cached_property
    def _digest(self) -> int:
        return digest64(self.table)
