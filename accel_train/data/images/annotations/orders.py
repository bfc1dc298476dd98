"""Orders of the four numbers of a box, named as in torchvision, and the order that fits images and areas."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDERS = {
    "xyxy": "[left, top, right, bottom]",
    "xywh": "[left, top, width, height]",
    "cxcywh": "[center x, center y, width, height]",
}
TOLERANCE = 1.0
"""Pixels by which a box may leave its image. Such boxes are clipped: tools round differently."""


def to_corners(box: Iterable[Any], order: str) -> tuple[Any, Any, Any, Any]:
    """Return left, top, right and bottom of four numbers in an order, or of four columns of numbers."""
    left, top, third, fourth = box
    if order == "cxcywh":
        left, top = left - third / 2, top - fourth / 2
    return (left, top, third, fourth) if order == "xyxy" else (left, top, left + third, top + fourth)


def from_corners(corners: Iterable[Any], order: str) -> tuple[Any, Any, Any, Any]:
    """Return the four numbers of corners in an order. The inverse of `to_corners`."""
    left, top, right, bottom = corners
    if order == "xyxy":
        return left, top, right, bottom
    first = ((left + right) / 2, (top + bottom) / 2) if order == "cxcywh" else (left, top)
    return *first, right - left, bottom - top


@np.errstate(over="ignore", invalid="ignore")
def fits_image(boxes: NDArray[np.float64], order: str, sizes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each box (4, N) has an area and lies in its image of `sizes` (2, N). A size of NaN is unknown."""
    left, top, right, bottom = to_corners(boxes, order)
    is_inside = (left >= -TOLERANCE) & (top >= -TOLERANCE) & (right > left) & (bottom > top)
    width, height = sizes + TOLERANCE
    return np.asarray(is_inside & ~(right > width) & ~(bottom > height))


@np.errstate(over="ignore", invalid="ignore")
def order_by_area(boxes: NDArray[np.float64], order: str, areas: NDArray[np.float64]) -> str | None:
    """Return another order in which every box (4, N) has its stated area if `order` contradicts them, or None.

    `areas` is (N,), with NaN for a box without a stated area.
    """

    def fits(each: str) -> bool:
        left, top, right, bottom = to_corners(boxes, each)
        # The second area: right and bottom are the last pixels inside the box.
        found = [np.abs((right - left + more) * (bottom - top + more) - areas) for more in (0, 1)]
        return bool((np.minimum(*found) <= np.maximum(1, areas / 100)).all())

    if not areas.size or fits(order):
        return None
    return next((each for each in ORDERS if each != order and fits(each)), None)
