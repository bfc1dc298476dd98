"""Read the boxes of tables: metadata.jsonl of `datasets`' ImageFolder, parquet files, and data sets."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from accel_train.core.json_io import nested
from accel_train.data.images.annotations.orders import ORDERS
from accel_train.data.images.annotations.records import (
    Annotated,
    BoxedImage,
    BoxRow,
    Faults,
    annotated,
    box_row,
    numbers,
    with_names,
)
from accel_train.data.images.images import ImagePool, Target
from accel_train.data.images.tables import open_dataset, table_pool
from accel_train.data.sources import Source
from accel_train.data.tables import class_names, column_names, names_of_feature, read_rows
from accel_train.recipe.data import BoxData

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Tables of `datasets`' ImageFolder. Their column `file_name` has the image."""
FILE_NAME = "file_name"
_CLASS_KEYS = ("category", "categories", "category_id", "label", "labels")
_CROWD_KEYS = ("iscrowd", "is_crowd")
_NUM_LOOKED_AT = 20


def read_table(source: Source, data: BoxData) -> Annotated:
    """Return the images of a table or data set with a column of objects.

    A cell has lists `bbox` and `category` or `categories`: names or ids. `area` and `iscrowd` are optional.

    Raises:
        ValueError: the source is not a table, or a column is missing.
    """
    if data.image_column not in (columns := column_names(source, data)) and FILE_NAME in columns:
        data = data.model_copy(update={"image_column": FILE_NAME})
    pool = table_pool(source, data, Target(None, is_mask=False))
    known = class_names(source, data.objects_column) or _nested_names(source, data)
    cells = (row.cells[0] for row in read_rows(source, [data.objects_column], data))
    return of_cells(source.name, pool, cells, data, known)


def of_cells(name: str, pool: ImagePool, cells: Iterable[Any], data: BoxData, known: Any = None) -> Annotated:
    """Return images with the boxes of a cell of objects for each. `known` are the class names, if any."""
    faults, order = Faults(), "xywh" if data.box_format == "auto" else data.box_format
    records = []
    for index, cell in enumerate(cells):
        where = pool.images.where(index)
        records.append(BoxedImage(where, cell_rows(cell, where, faults, order), is_upright=True))
    return annotated("table", name, pool.images, records, faults, order, known, ids=pool.ids, notes=pool.notes)


def with_same_names(shards: Sequence[Annotated]) -> list[Annotated]:
    """Return the shards of one table with the class names of all shards. A shard may lack some of the classes."""
    names = {name for each in shards if each.is_named for name in each.names}
    is_mixed = any(not each.is_named and each.names for each in shards)
    if len({each.names for each in shards}) == 1 or not names or is_mixed:
        return list(shards)
    return [replace(with_names(each, sorted(names), each.description), is_named=True) for each in shards]


def has_objects(source: Source, data: BoxData) -> bool:
    """Return whether one of the first rows of a table has a column of objects. A broken table has none."""
    try:
        rows = islice(read_rows(source, [data.objects_column], data), _NUM_LOOKED_AT)
        return any("bbox" in str(row.cells[0]) for row in rows)
    except ValueError:
        return False


def is_empty(cell: Any) -> bool:
    """Return whether a cell is empty, also as pandas writes it."""
    return cell is None or cell == "" or (isinstance(cell, float) and math.isnan(cell))


def _nested_names(source: Source, data: BoxData) -> tuple[str, ...] | None:
    """Return the class names of a nested class column of `datasets`, or None."""
    dataset = open_dataset(source, data)
    if dataset is None:
        return None
    feature: Any = dataset.features.get(data.objects_column)
    feature = getattr(feature, "feature", feature)
    named = map(names_of_feature, map(feature.get, _CLASS_KEYS)) if isinstance(feature, dict) else ()
    return next((names for names in named if names is not None), None)


def cell_rows(cell: Any, where: str, faults: Faults, order: str, *, is_one: bool = False) -> list[BoxRow]:
    """Return the boxes of a cell: a mapping of lists, or a list of mappings. `is_one`: the row has one box."""
    cell = nested(cell)
    if isinstance(cell, list) and all(isinstance(each, dict) for each in cell):
        cell = {key: [each.get(key) for each in cell] for key in {key for each in cell for key in each}} or {"bbox": []}
    named = ("bbox", *_CLASS_KEYS, *_CROWD_KEYS, "area")
    lists = {key: cell[key] for key in named if cell.get(key) is not None} if isinstance(cell, dict) else {}
    if "bbox" not in lists or not all(isinstance(each, list) for each in lists.values()):
        faults.files.append(f"{where}: its objects are not a mapping with lists `bbox` and `category`")
        return []
    boxes = lists["bbox"]
    classes: list[Any] | None = next((lists[key] for key in _CLASS_KEYS if key in lists), None if boxes else [])
    if classes is None or len(classes) != len(boxes):
        faults.files.append(f"{where}: boxes: {len(boxes)}, classes: {len(classes or ())}; each box has one class")
        return []
    crowds = next((lists[key] for key in _CROWD_KEYS if key in lists), [0] * len(boxes))
    areas = lists.get("area", [None] * len(boxes))
    if len(crowds) != len(boxes) or len(areas) != len(boxes):
        faults.files.append(f"{where}: boxes: {len(boxes)}, areas: {len(areas)}, crowd flags: {len(crowds)}")
        return []
    rows = list[BoxRow]()
    for number, (values, name, crowd, area) in enumerate(zip(boxes, classes, crowds, areas), start=1):
        box, place = numbers(values, 4), where if is_one else f"{where}, object {number}"
        if isinstance(name, float) and name.is_integer():
            # pandas writes whole numbers like this.
            name = int(name)
        if is_empty(name) or (isinstance(name, float) and not math.isfinite(name)):
            faults.files.append(f"{place}: has no class")
        elif box is None:
            faults.boxes.append(f"{place}: its bbox {str(values)[:80]} is not {ORDERS[order]}")
        else:
            label = name if isinstance(name, int) else str(name)
            rows.append(box_row(place, box, label, order, crowd, area))
    return rows
