"""The boxes of the objects in an image."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST_IOU = 0.5
"""Smallest overlap of a prediction with the box that it finds."""


@dataclass(frozen=True)
class Boxes:
    """The boxes of one image, in pixels of the upright image."""

    corners: NDArray[np.float32]
    """Left, top, right and bottom of each box, (K, 4). Pixel edges, so a box over the whole image ends at its size."""
    class_ids: NDArray[np.int64]
    """Class of each box, (K,)."""
    is_crowd: NDArray[np.bool_]
    """Whether a box is a crowd or a difficult object, (K,). Training and scores leave such boxes out."""
    areas: NDArray[np.float32]
    """Area of each object as annotated, in pixels, (K,). Without annotation, the area of the box."""
    width: int
    height: int
    image_id: int | str | None = None
    """Id of the image in a COCO file. None in other formats."""

    def __len__(self) -> int:
        return len(self.corners)


def no_boxes(width: int, height: int) -> Boxes:
    """Return the boxes of an image without objects."""
    return Boxes(
        np.zeros((0, 4), np.float32),
        np.zeros(0, np.int64),
        np.zeros(0, np.bool_),
        np.zeros(0, np.float32),
        width,
        height,
    )


def match_boxes(
    truth: Boxes, corners: NDArray[np.floating[Any]], class_ids: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Return the annotated box that each predicted box finds, (K,), or -1. Predicted boxes come by falling score.

    As in COCO, a prediction finds the box of its class with the largest IoU, and a box is found once. A crowd is found
    any number of times, by the share of a prediction inside it.
    """
    ours, theirs = corners[:, None].astype(np.float64), truth.corners[None].astype(np.float64)
    sides = np.minimum(ours[..., 2:], theirs[..., 2:]) - np.maximum(ours[..., :2], theirs[..., :2])
    shared = np.prod(np.maximum(sides, 0), -1)
    own, others = (np.prod(each[..., 2:] - each[..., :2], -1) for each in (ours, theirs))
    overlap = shared / np.maximum(np.where(truth.is_crowd, own, own + others - shared), 1e-12)
    is_free, found = np.ones(len(truth), np.bool_), np.full(len(corners), -1)
    for number, class_id in enumerate(class_ids):
        usable = (truth.class_ids == class_id) & (overlap[number] >= _LEAST_IOU) & is_free
        usable = usable & ~truth.is_crowd if (usable & ~truth.is_crowd).any() else usable
        if usable.any():
            found[number] = np.where(usable, overlap[number], -1).argmax()
            is_free[found[number]] = truth.is_crowd[found[number]]
    return found
