"""Boxes as stored, and the faults of their files."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel_train.core.format import format_count
from accel_train.data.images.annotations.orders import to_corners
from accel_train.data.images.images import Images

LARGEST_CLASS_ID = 10_000
"""Most classes of a source without class names. Each id up to the largest is a row of the head."""
_LARGEST_EDGE = 2**31
_UNUSED_IDS = 1_000, 10
"""Number of unused ids that are accepted: a constant, and a multiple of the number of different ids."""


class BoxRow(NamedTuple):
    """One box as stored."""

    where: str
    """File and annotation, for messages: `c.json, annotation 17`, `boxes.csv:3`."""
    corners: tuple[float, float, float, float]
    """Left, top, right and bottom, in pixels, or as fractions of the image if the record is relative."""
    label: int | str
    """Class: its name, or its number among the names of the source."""
    is_crowd: bool = False
    area: float | None = None


class BoxedImage(NamedTuple):
    """The boxes of one image as stored."""

    where: str
    """File of the annotations."""
    rows: Sequence[BoxRow]
    size: tuple[int, int] | None = None
    """Width and height that the annotations state."""
    is_upright: bool = False
    """Whether boxes of this format always refer to the upright image. False: the stated size tells."""
    is_relative: bool = False
    """Whether corners are fractions of the image."""
    image_id: int | str | None = None
    """Id of the image in a COCO file."""


@dataclass
class Faults:
    """The faults that are found in annotations, a line for each."""

    files: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)
    """Boxes that may be dropped."""


@dataclass(frozen=True)
class Annotated:
    """Images with boxes as stored, from one source. The label of each box is a number among `names`."""

    kind: str
    """Format: COCO, YOLO, Pascal VOC, or a table."""
    images: Images
    records: Sequence[BoxedImage]
    names: tuple[str, ...]
    faults: Faults
    description: str
    is_named: bool
    """Whether the source has names for its classes. False: the names are numbers."""
    order: str
    """Order of the four numbers of a box in the format (`ORDERS`)."""
    is_by_values: bool = False
    """Whether the values of the boxes decided the order."""
    ids: list[str] | None = None
    notes: tuple[str, ...] = ()
    category_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the classes in a COCO file, by name. Empty in other formats."""


def annotated(
    kind: str,
    source: object,
    images: Images,
    records: Sequence[BoxedImage],
    faults: Faults,
    order: str,
    names: Sequence[str] | None = None,
    **further: Any,
) -> Annotated:
    """Return the images and boxes of one source, with class ids. Boxes of unknown classes become faults.

    `names` are the classes that the source names. None: the names in its boxes, sorted; or the numbers in its boxes.
    """
    labels = {row.label for record in records for row in record.rows}
    num_numbers = sum(isinstance(label, int) for label in labels)
    are_numbers = num_numbers == len(labels)
    is_named = names is not None or not are_numbers
    if names is None and is_named:
        if num_numbers:
            faults.files.append(f"{source}: some classes are numbers and others are names; write names or numbers")
        names = sorted(map(str, labels))
    if names is None:
        names, records = numbered_classes(records, faults)
    else:
        ids = {name: number for number, name in enumerate(names)}

        def number_of(row: BoxRow) -> int | None:
            number = row.label if isinstance(row.label, int) and are_numbers else ids.get(str(row.label), -1)
            if 0 <= number < len(ids):
                return number
            shown = repr(row.label)[:80]
            faults.files.append(
                f"{row.where}: the class {shown} is unknown; known: {format_count(len(ids), 'class', 'classes')}"
            )
            return None

        records = _renumbered(records, number_of)
    number = sum(len(record.rows) for record in records)
    description = f"{source}: {format_count(len(records), 'image')} with {format_count(number, 'box', 'boxes')}"
    return Annotated(kind, images, records, tuple(names), faults, description, is_named, order, **further)


def _renumbered(records: Sequence[BoxedImage], number_of: Callable[[BoxRow], int | None]) -> list[BoxedImage]:
    """Return the records with the class ids of their boxes, without the boxes that have none."""
    kept = []
    for record in records:
        numbered = [(row, number_of(row)) for row in record.rows]
        rows = [row._replace(label=number) for row, number in numbered if number is not None]
        kept.append(record._replace(rows=rows))
    return kept


def with_names(source: Annotated, names: Sequence[str], key: str) -> Annotated:
    """Return a source with the class ids of `names`. Boxes of other classes become faults."""
    if source.is_named:
        position = {name: number for number, name in enumerate(names)}
        ids = {number: position[name] for number, name in enumerate(source.names) if name in position}
    else:
        ids = {number: number for number in range(min(len(source.names), len(names)))}
    faults = Faults([*source.faults.files], source.faults.boxes)

    def number_of(row: BoxRow) -> int | None:
        assert isinstance(row.label, int)
        if row.label not in ids:
            shown = source.names[row.label]
            faults.files.append(f"{row.where}: the class {shown!r} is not among the classes of {key}")
        return ids.get(row.label)

    records = _renumbered(source.records, number_of)
    return replace(source, records=records, names=tuple(names), faults=faults)


def numbered_classes(records: Sequence[BoxedImage], faults: Faults) -> tuple[tuple[str, ...], list[BoxedImage]]:
    """Return the names 0, 1, ... for sources that only number their classes, and the records with ids among them.

    Ids below 0, above `LARGEST_CLASS_ID`, or far above the number of different ids become faults.
    """
    used = {int(row.label) for record in records for row in record.rows}
    constant, multiple = _UNUSED_IDS
    limit = min(LARGEST_CLASS_ID, constant + multiple * len(used))

    def number_of(row: BoxRow) -> int | None:
        if 0 <= int(row.label) < limit:
            return int(row.label)
        faults.files.append(
            f"{row.where}: the class id {str(row.label)[:20]} is not from 0 to {limit - 1}, the range for {len(used)} "
            "different ids without names; correct it, or name the classes"
        )
        return None

    largest = max((each for each in used if 0 <= each < limit), default=-1)
    return tuple(map(str, range(1 + largest))), _renumbered(records, number_of)


def box_row(
    where: str, box: Sequence[float], label: int | str, order: str = "xywh", crowd: Any = None, area: Any = None
) -> BoxRow:
    """Return a box of four numbers in an order."""
    stated = None if area is None else (numbers([area], 1) or [math.nan])[0]
    return BoxRow(where, to_corners(box, order), label, is_set(crowd), stated)


def is_set(flag: Any) -> bool:
    """Return whether a flag (crowd, difficult) is set, written as a number, a word or not at all."""
    return str(flag).strip().lower() not in ("", "0", "0.0", "false", "no", "none", "nan", "unspecified")


def numbers(values: Any, count: int) -> tuple[float, ...] | None:
    """Return `count` values as numbers, also of text; None if there are others."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, (list, tuple)) or len(values) != count or any(isinstance(each, bool) for each in values):
        return None
    try:
        return tuple(float(each) for each in values)
    except (TypeError, ValueError, OverflowError):
        return None


def stated_size(width: Any, height: Any) -> tuple[int, int] | None:
    """Return a stated size in pixels, or None if it is not stated. Some tools write 0."""
    edges = numbers([width, height], 2)
    if edges is None or not min(edges) > 0 or any(map(math.isnan, edges)):
        return None
    return int(min(edges[0], _LARGEST_EDGE)), int(min(edges[1], _LARGEST_EDGE))


def repeated(values: Iterable[Any]) -> list[Any]:
    return [value for value, number in Counter(values).items() if number > 1]


def below_one_root(files: Sequence[Path]) -> tuple[Path, tuple[str, ...]]:
    """Return the deepest folder that holds all files, and their names in it."""
    if not files:
        return Path(), ()
    root = Path(os.path.commonpath([file.parent for file in files]))
    return root, tuple(file.relative_to(root).as_posix() for file in files)
