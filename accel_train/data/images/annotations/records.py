"""Boxes as stored, and the faults of their files."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel_train.data.images.images import Images

LARGEST_CLASS_ID = 10_000
"""Most classes of a source without class names. Each id up to the largest is a row of the head."""
_LARGEST_EDGE = 2**31
_UNUSED_IDS = 1_000, 10
"""Number of unused ids that are accepted: a constant, and a multiple of the number of different ids."""


class BoxRow(NamedTuple):
    """One box as stored."""

    where: str
    """Annotation in its file, for messages: `annotation 17`, `line 3`."""
    corners: tuple[float, float, float, float]
    """Left, top, right and bottom, in pixels, or as fractions of the image if the record is relative."""
    class_id: int
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
    """Images with boxes as stored, from one source. A class id counts `names`."""

    kind: str
    """Format: COCO, YOLO, Pascal VOC, or a table."""
    images: Images
    records: Sequence[BoxedImage]
    names: tuple[str, ...]
    faults: Faults
    description: str
    is_named: bool = True
    """Whether the source has names for its classes. False: the names are numbers."""
    ids: list[str] | None = None
    notes: tuple[str, ...] = ()
    category_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the classes in a COCO file, by name. Empty in other formats."""


def with_names(source: Annotated, names: Sequence[str], key: str) -> Annotated:
    """Return a source with the class ids of `names`. Boxes of other classes become faults."""
    if not source.is_named:
        ids = {number: number for number in range(min(len(source.names), len(names)))}
    else:
        position = {name: number for number, name in enumerate(names)}
        ids = {number: position[name] for number, name in enumerate(source.names) if name in position}
    files, records = list(source.faults.files), []
    for record in source.records:
        for row in record.rows:
            if row.class_id not in ids:
                shown = source.names[row.class_id]
                files.append(f"{record.where}, {row.where}: the class {shown!r} is not among the classes of {key}")
        rows = [row._replace(class_id=ids[row.class_id]) for row in record.rows if row.class_id in ids]
        records.append(record._replace(rows=rows))
    return replace(source, records=records, names=tuple(names), faults=Faults(files, source.faults.boxes))


def numbered_classes(records: Sequence[BoxedImage], faults: Faults) -> tuple[tuple[str, ...], list[BoxedImage]]:
    """Return the names 0, 1, ... for sources that only number their classes, and the records with ids among them.

    Ids below 0, above `LARGEST_CLASS_ID`, or far above the number of different ids become faults.
    """
    used = {row.class_id for record in records for row in record.rows}
    constant, multiple = _UNUSED_IDS
    limit = min(LARGEST_CLASS_ID, constant + multiple * len(used))
    kept = []
    for record in records:
        for row in record.rows:
            if not 0 <= row.class_id < limit:
                faults.files.append(
                    f"{record.where}, {row.where}: the class id {str(row.class_id)[:20]} is not from 0 to {limit - 1}, "
                    f"the range for {len(used)} different ids without names; correct it, or name the classes"
                )
        kept.append(record._replace(rows=[row for row in record.rows if 0 <= row.class_id < limit]))
    return tuple(map(str, range(1 + max((each for each in used if 0 <= each < limit), default=-1)))), kept


def box_row(where: str, box: Sequence[float], class_id: int, crowd: Any, area: Any) -> BoxRow:
    left, top, width, height = box
    areas = numbers([area], 1)
    stated = areas[0] if areas is not None else None if area is None else float("nan")
    return BoxRow(where, (left, top, left + width, top + height), class_id, is_set(crowd), stated)


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
