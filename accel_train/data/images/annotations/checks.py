"""Check boxes as stored: inside the image, with an area, in an image of the stated size."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.core.errors import DataError
from accel_train.data.images.annotations.orders import ORDERS, TOLERANCE, fits_image, from_corners, order_by_area
from accel_train.data.images.annotations.records import Annotated, BoxedImage
from accel_train.data.images.boxes import Boxes, no_boxes
from accel_train.data.images.decoding import image_header
from accel_train.data.images.images import Images, in_threads

_MOST_SHOWN = 20
_FEWEST_BOXES = 3
"""Number of boxes above which their order of numbers is guessed."""
_LARGEST_FRACTION = 2
"""Fraction of an image above which the number is of another unit."""


class Checked(NamedTuple):
    """The boxes of all images, and the faults that were found."""

    boxes: tuple[Boxes, ...]
    files: tuple[Path | None, ...]
    """File of each image. None for images in tables and arrays."""
    unreadable: tuple[str, ...]
    """Images that are missing or broken."""
    file_faults: tuple[str, ...]
    """Images that have another size than stated."""
    box_faults: tuple[str, ...]


def check_boxes(images: Images, records: Sequence[BoxedImage]) -> Checked:
    """Return the boxes of all images in pixels of the upright images. Reads the header of each image.

    Annotations that state the size of an image before its EXIF rotation are turned with the image. A box that leaves
    the image by up to `TOLERANCE` is clipped. Boxes with faults are left out.
    """

    def check(index: int) -> tuple[Boxes, Path | None, list[str], list[str], list[str]]:
        where, record, file = images.where(index), records[index], None
        try:
            content = images.content(index)
            file = content if isinstance(content, Path) else None
            if isinstance(content, np.ndarray):
                stored, orientation = (content.shape[1], content.shape[0]), 1
            else:
                stored, orientation = image_header(content, where)
        except DataError as error:
            return no_boxes(1, 1), file, [f"{record.where}: {error}"], [], []
        upright = stored[::-1] if orientation >= 5 else stored
        turned, fault = _is_turned(record, stored, upright, orientation)
        if fault:
            return no_boxes(*upright), file, [], [f"{record.where}: {where} {fault}"], []
        boxes, faults = _checked(record, stored if turned else upright, where)
        boxes = _turned(boxes, orientation) if turned else boxes
        return replace(boxes, image_id=record.image_id), file, [], [], faults

    found = in_threads(check, range(len(images)))
    return Checked(
        tuple(each[0] for each in found),
        tuple(each[1] for each in found),
        tuple(chain(*(each[2] for each in found))),
        (*chain(*(each[3] for each in found)), *_fractions(records)),
        tuple(chain(*(each[4] for each in found))),
    )


def repeated_images(checked: Sequence[Checked]) -> list[str]:
    """Return a fault for each image file that occurs several times in the sources of one side."""
    counts = Counter(os.path.abspath(file) for each in checked for file in each.files if file is not None)
    twice = [file for file, number in counts.items() if number > 1]
    return [
        f"{os.path.relpath(file)} is listed {counts[file]} times; keep one entry with all its boxes" for file in twice
    ]


@np.errstate(over="ignore", invalid="ignore")
def other_order(source: Annotated, found: Checked) -> str | None:
    """Return why the boxes of a source are in another order than its format says, or None.

    Either many boxes leave their images, and all fit them in the other order; or the stated areas fit only the other.
    Of centers, one box that leaves its image is enough: of right centers, few boxes are in the order of corners.
    """
    rows = [(row, record, boxes) for record, boxes in zip(source.records, found.boxes) for row in record.rows]
    sizes = np.array([(boxes.width, boxes.height) for _, _, boxes in rows], np.float64).reshape(-1, 2).T
    corners = np.array([row.corners for row, _, _ in rows], np.float64).reshape(-1, 4).T
    corners *= np.where([record.is_relative for _, record, _ in rows], np.tile(sizes, (2, 1)), 1)
    boxes = np.array(from_corners(corners, source.order))
    is_counted = np.array([not row.is_crowd for row, _, _ in rows], np.bool_)
    areas = np.array([np.nan if row.area is None else row.area for row, _, _ in rows], np.float64)
    order, why = order_by_area(boxes[:, is_counted], source.order, areas[is_counted]), "has its stated area"
    # Half of all random corners leave the image if they are read as sizes. Careless edges of large boxes do so rarely.
    if order is None and found.box_faults and len(rows) > _FEWEST_BOXES:
        possible = ORDERS if 4 * len(found.box_faults) > len(rows) else ["xyxy"] if source.order == "cxcywh" else []
        others = (each for each in possible if each != source.order and fits_image(boxes, each, sizes).all())
        order, why = next(others, None), "fits its image"
    if order is None:
        return None
    name = source.description.rpartition(": ")[0]
    also = f", or set data.box_format: {order}" if source.kind in ("table", "table of boxes", "YOLO") else ""
    return f"{name}: every box {why} as {ORDERS[order]}; write {ORDERS[source.order]}{also}"


def _fractions(records: Sequence[BoxedImage]) -> list[str]:
    """Return a fault if all boxes in pixels lie within the first pixel."""
    rows = [row for record in records if not record.is_relative for row in record.rows]
    if not rows or not all(max(row.corners) <= 1 for row in rows):
        return []
    row = rows[0]
    shown = ", ".join(f"{value:g}" for value in row.corners)
    return [
        f"{row.where}: all boxes lie within the first pixel, as {shown} (left, top, right, bottom). "
        "They look like fractions of the image; multiply them by its width and height"
    ]


def refuse_faults(faults: Sequence[str], key: str, remedy: str) -> None:
    """Raise one error with a line for each fault, up to 20, and the number of all faults.

    Raises:
        ValueError: there are faults.
    """
    if faults:
        more = [f"  and {len(faults) - _MOST_SHOWN:,} more"] if len(faults) > _MOST_SHOWN else []
        lines = [f"  {fault}" for fault in faults[:_MOST_SHOWN]]
        number = f"{len(faults):,} fault{'s' * (len(faults) != 1)} in annotations"
        raise ValueError("\n".join([f"{key}: {number}; {remedy}", *lines, *more]))


def _is_turned(
    record: BoxedImage, stored: tuple[int, int], upright: tuple[int, int], orientation: int
) -> tuple[bool, str]:
    """Return whether the boxes refer to the image before its EXIF rotation, and a fault or an empty text."""
    if record.is_upright:
        return False, ""
    if record.size is not None and record.size not in (stored, upright):
        stated = "{} x {}".format(*record.size)
        return False, f"has {upright[0]} x {upright[1]} pixels, and its annotations state {stated}"
    if orientation in range(2, 9) and (record.size is None or stored == upright):
        return False, (
            f"has the EXIF orientation {orientation}, and the stated size does not tell whether its boxes are turned; "
            "save it upright without the orientation"
        )
    return record.size == stored != upright, ""


def _checked(record: BoxedImage, size: tuple[int, int], image: str) -> tuple[Boxes, list[str]]:
    """Return the boxes of a record without faults, clipped to an image of `size` (width, height), and the faults."""
    corners = np.array([row.corners for row in record.rows], np.float64).reshape(-1, 4)
    edges = np.array([*size, *size], np.float64)
    if record.is_relative:
        corners *= edges
    outside: NDArray[np.bool_] = np.asarray(((corners < -TOLERANCE) | (corners > edges + TOLERANCE)).any(axis=1))
    clipped = np.clip(corners, 0, edges)
    is_empty: NDArray[np.bool_] = np.asarray((clipped[:, 2:] <= clipped[:, :2]).any(axis=1))
    box_areas = (clipped[:, 2:] - clipped[:, :2]).prod(axis=1)
    areas = np.array([box if row.area is None else row.area for box, row in zip(box_areas, record.rows)], np.float64)
    is_finite: NDArray[np.bool_] = np.asarray(np.isfinite(np.column_stack([corners, areas])).all(axis=1))
    faults, kept = [], np.ones(len(record.rows), dtype=bool)
    for number, row in enumerate(record.rows):
        problem = ""
        if not is_finite[number]:
            problem = "has a number that is not finite"
        elif outside[number]:
            problem = f"lies outside the image of {size[0]} x {size[1]} pixels"
            if record.is_relative and max(row.corners) > _LARGEST_FRACTION:
                problem += "; its numbers are no fractions of the image, but pixels or percent"
        elif is_empty[number]:
            problem = "has no area"
        elif areas[number] < 0:
            problem = f"states the area {row.area:g}"
        if problem:
            shown = ", ".join(f"{value:g}" for value in corners[number])
            faults.append(f"{row.where} ({image}): the box {shown} (left, top, right, bottom) {problem}")
            kept[number] = False
    boxes = Boxes(
        clipped[kept].astype(np.float32),
        np.array([row.label for row in record.rows], np.int64)[kept],
        np.array([row.is_crowd for row in record.rows], np.bool_)[kept],
        areas[kept].astype(np.float32),
        *size,
    )
    return boxes, faults


def _turned(boxes: Boxes, orientation: int) -> Boxes:
    """Return the boxes of an image after the rotation of its EXIF orientation."""
    # Orientations 5 to 8 swap x and y, and some of them flip one or both after it.
    top, left, bottom, right = boxes.corners.T
    width, height = boxes.height, boxes.width
    if orientation in (6, 7):
        left, right = width - right, width - left
    if orientation in (7, 8):
        top, bottom = height - bottom, height - top
    corners = np.stack([left, top, right, bottom], axis=1)
    return Boxes(corners, boxes.class_ids, boxes.is_crowd, boxes.areas, width, height)
