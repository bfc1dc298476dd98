"""The boxes of the objects in an image."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
