"""One image and its mask, a class number for each pixel: read together, and refused when they do not fit."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.data.decoding import Mode, to_mode
from accel_train.data.images import Images
from accel_train.state import DataError

Mask = NDArray[np.uint8]

NUM_TRIED = 64
"""Pairs, evenly spaced, that are decoded before training starts: what is wrong with all of them is found there."""

_LOSSY_FORMATS = ("JPEG", "MPO")


@dataclass(frozen=True)
class MaskedImages:
    """Some images of a set, each with its mask."""

    images: Images
    masks: Images | None
    """None: images to predict, whose every pixel is ignored."""
    rows: NDArray[np.int64]
    """Which of them."""

    def __len__(self) -> int:
        return len(self.rows)

    def pair(self, index: int, mode: Mode, num_classes: int, ignore_index: int) -> tuple[Image.Image, Mask]:
        """An image in the colours that the model sees, and its mask (H, W), of one size.

        Raises:
            DataError: one of them cannot be read, they differ in size, or a pixel has no class; names both.
        """
        row = int(self.rows[index])
        where = self.images.where(row)
        mask_where = "not there" if self.masks is None else self.masks.where(row)
        try:
            image = to_mode(self.images[row], mode, where)
        except DataError as error:
            raise DataError(f"{error} (its mask is {mask_where})") from error
        if self.masks is None:
            return image, np.full((image.height, image.width), ignore_index, np.uint8)
        mask = self.mask(index)
        if mask.shape != image.size[::-1]:
            raise DataError(
                f"{where} has {image.width} x {image.height} pixels and its mask {mask_where} has {mask.shape[1]} x "
                f"{mask.shape[0]}; a mask has one class number for each pixel of its image"
            )
        wrong = (mask >= num_classes) & (mask != ignore_index)
        if wrong.any():
            y, x = np.argwhere(wrong)[0].tolist()
            raise DataError(
                f"{mask_where}, the mask of {where}: the pixel at x={x}, y={y} is {mask[y, x]}, but there are {num_classes} "
                f"classes (0 to {num_classes - 1}), and data.ignore_index is {ignore_index}; repair the mask, list all classes "
                f"in data.label_names, or set data.ignore_index: {mask[y, x]} if such pixels are not to count"
            )
        return image, mask

    def mask(self, index: int) -> Mask:
        """The class number of each pixel: (H, W); of a set that has masks."""
        assert self.masks is not None
        row = int(self.rows[index])
        try:
            return mask_values(self.masks[row], self.masks.where(row))
        except DataError as error:
            raise DataError(f"{error} (it is the mask of {self.images.where(row)})") from error

    def count_pixels(self, limit: int | None = None) -> NDArray[np.int64]:
        """How many pixels have each of the values 0 to 255: (256,); of `limit` masks, evenly spaced, or of all."""
        if self.masks is None:
            return np.zeros(256, np.int64)
        count = len(self) if limit is None else min(limit, len(self))
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
            found = threads.map(
                lambda number: np.bincount(self.mask(number * len(self) // count).reshape(-1), minlength=256),
                range(count),
            )
            return np.sum([np.zeros(256, np.int64), *found], axis=0, dtype=np.int64)


def mask_values(mask: Image.Image, where: str) -> Mask:
    """The numbers in a mask's pixels: grey, palette (the index, not the colour), black and white (0, 1), or 16 bits.

    Raises:
        DataError: it is a JPEG or a colour image, or a number is above 255.
    """
    if mask.format in _LOSSY_FORMATS:
        raise DataError(
            f"{where}: a mask must not be a JPEG, which smears class numbers at every edge; write the masks again as PNG, from "
            "what the JPEG was made of"
        )
    if mask.mode not in ("L", "P", "1", "I") and not mask.mode.startswith("I;16"):
        raise DataError(
            f"{where}: a mask of mode {mask.mode} holds colours; save it with one class number for each pixel (grey or palette)"
        )
    values = np.asarray(mask)
    if values.size and (values.max() > 255 or values.min() < 0):
        raise DataError(f"{where}: a pixel is {values.max()}; class numbers are 0 to 255")
    return values.astype(np.uint8)


def try_pairs(pairs: MaskedImages, mode: Mode, num_classes: int, ignore_index: int) -> None:
    """Decode some pairs before training starts.

    Raises:
        DataError: as `MaskedImages.pair`.
    """
    count = min(len(pairs), NUM_TRIED)
    for number in range(count):
        pairs.pair(number * len(pairs) // count, mode, num_classes, ignore_index)
