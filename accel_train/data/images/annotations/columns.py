"""Tables with columns of boxes: a box in each row, as csv files of many tools have it, or lists of boxes."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.core.errors import DataError
from accel_train.core.format import format_count
from accel_train.core.json_io import nested, parse_json
from accel_train.data.delimited import read_delimited
from accel_train.data.images.annotations.orders import ORDERS, fits_image, order_by_area, to_corners
from accel_train.data.images.annotations.records import (
    Annotated,
    BoxedImage,
    BoxRow,
    Faults,
    annotated,
    numbers,
    stated_size,
)
from accel_train.data.images.annotations.tables import cell_rows, is_empty
from accel_train.data.images.decoding import image_header
from accel_train.data.images.images import (
    IMAGE_SUFFIXES,
    FileImages,
    Images,
    Target,
    evenly_spaced,
    in_threads,
    list_images,
)
from accel_train.data.images.tables import find_images, table_pool
from accel_train.data.sources import Source
from accel_train.data.tables import class_names, column_names, read_rows
from accel_train.recipe.data import BoxData

KIND = "table of boxes"
_STARTS = ("xmin ymin", "x1 y1", "x0 y0", "x y", "left top", "minx miny", "xtl ytl")
_ENDS = ("xmax ymax", "x2 y2", "x1 y1", "right bottom", "maxx maxy", "xbr ybr")
_CENTERS = ("xcenter ycenter", "centerx centery", "cx cy", "xc yc")
_SIDES = ("width height", "w h")
_FORMS = (
    *((f"{start} {end}".split(), "xyxy") for start in _STARTS for end in _ENDS if start != end),
    *((f"{center} {sides}".split(), "cxcywh") for center in _CENTERS for sides in _SIDES),
    *((f"{start} {sides}".split(), "xywh") for start in _STARTS for sides in _SIDES),
)
"""Names of four columns with a box and the order that they tell, without signs, capitals, and the word box."""
_CELLS = ("bbox", "bboxes", "box", "boxes", "boundingbox", "boundingboxes")
_NAMES = "image filename file filepath imagename imageid imagepath imagefile imagefilename img imgname imgid imgpath"
_IMAGES = (*_NAMES.split(), "imgfile", "path", "fname", "frame")
_KINDS = "class label category classname labelname categoryname classes labels categories name object"
_CLASSES = tuple(_KINDS.split())
_CLASS_IDS = ("classid", "labelid", "categoryid", "classindex")
_CROWDS = ("iscrowd", "crowd", "isgroupof", "difficult", "isdifficult")
_SIZES = ("imagewidth imageheight", "imgwidth imgheight", "imgw imgh", "width height", "w h")
_VIA_SHAPE, _VIA_LABEL = "regionshapeattributes", "regionattributes"
_NUMBER = re.compile(r"-?[0-9]+(?:\.0*)?")
_SEPARATORS = re.compile(r"[\s,;]+")
_FOLDERS = ("images", "imgs", "JPEGImages")
"""Folders next to the folder of a table that may hold its images."""
_ONE_CLASS = "object"
_NUM_LOOKED_AT = 1_000
"""Rows that are read for a first box. Many images may have none."""
_SIZES_READ = 1_000
"""Evenly spaced images whose headers are read for the order of numbers."""
_LEAST_SHARE = 0.05
"""Share of boxes that must misfit one order, so that a single careless box does not tell it."""
_SCALE = 1_000
"""Size of an image in which fractions are checked like pixels."""
_TIMES_AS_MANY = 4
"""Misfits of one order of numbers over misfits of another above which values tell the order."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table with boxes."""

    names: tuple[str, ...]
    """All columns. In a file without header, they are numbered."""
    image: str
    box: tuple[str, ...]
    """Four columns, or one with lists, with texts of four numbers, or with VIA's shapes."""
    order: str | None
    """Order of the four numbers. None: the names do not tell."""
    labels: tuple[str, ...] = ()
    """Columns that may be the class."""
    size: tuple[str, ...] = ()
    """Width and height of the image, if they are stated."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Columns of `area` and `iscrowd`."""
    is_via: bool = False
    has_header: bool = True

    def opened(self, data: BoxData) -> BoxData:
        """Return the settings that read the table."""
        return data if self.has_header else data.model_copy(update={"header": "none"})


def find_columns(source: Source, data: BoxData) -> Columns | None:
    """Return the columns of a table of boxes, or None for another table. One of the first rows must hold a box."""
    try:
        found = _without_header(source, data) or _by_name(column_names(source, data), data)
        if found is None:
            return None
        labels = [name for name in found.labels if name in found.names]
        for row in islice(read_rows(source, (*found.box, *labels), found.opened(data)), _NUM_LOOKED_AT):
            boxes = _boxes_of(dict(zip(found.box, row.cells)), found) or ()
            # Words with a box each have lists of other labels.
            if len(boxes) > 1 and not any(isinstance(cell, list) for cell in row.cells[len(found.box) :]):
                return None
            if any(numbers(box, 4) for box in boxes):
                return found
    except ValueError:
        return None
    return None


def _without_header(source: Source, data: BoxData) -> Columns | None:
    """Return the columns of a csv whose first row is an image with or without a box, or None for another table.

    Keras RetinaNet writes such files, and SKU-110K, with the size of the image.
    """
    if source.kind != "csv":
        return None
    records = list(islice(read_delimited(source.files[0], data.model_copy(update={"header": "none"})), 2))
    cells = records[-1].fields if records else []
    is_row = len(cells) in (6, 8) and cells[0].lower().endswith(IMAGE_SUFFIXES)
    if not is_row or (any(cells[1:5]) and numbers(cells[1:5], 4) is None):
        return None
    names = tuple(map(str, range(1, 1 + len(cells))))
    return Columns(names, "1", names[1:5], None, (data.class_column or "6",), names[6:], has_header=False)


def _by_name(names: Sequence[str], data: BoxData) -> Columns | None:
    """Return the columns by their names, or None without a column of images or of boxes."""
    short = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in reversed(names)}

    def named(keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(short[key] for key in keys if key in short)

    image = data.image_column if data.image_column in names else next(iter(named(_IMAGES)), None)
    if image is None:
        return None
    if {_VIA_SHAPE, _VIA_LABEL} <= short.keys():
        return Columns(tuple(names), image, named([_VIA_SHAPE]), "xywh", named([_VIA_LABEL]), is_via=True)
    plain = {re.sub("^(bbox|box)|(bbox|box)$", "", key) or key: name for key, name in short.items()} | short
    # Four corners.
    if {"x3", "y3"} <= plain.keys():
        return None
    form = next(((form, order) for form, order in _FORMS if {*form} <= plain.keys()), None)
    box, order = (tuple(plain[key] for key in form[0]), form[1]) if form else (named(_CELLS)[:1], None)
    if not box or image in box:
        return None
    short = {key: name for key, name in short.items() if name not in (image, *box)}
    size = next((pair for pair in map(named, map(str.split, _SIZES)) if len(pair) == 2), ())
    labels = (data.class_column,) if data.class_column else named(_CLASSES) or named(_CLASS_IDS)[:1]
    further = {key: found[0] for key, keys in (("area", ["area"]), ("iscrowd", _CROWDS)) if (found := named(keys))}
    return Columns(tuple(names), image, box, order, labels, size, further)


def _boxes_of(row: Mapping[str, Any], found: Columns) -> list[Any] | None:
    """Return the boxes of a row as stored, without a box whose numbers are all empty. None: other data."""
    if len(found.box) > 1:
        box = [row[name] for name in found.box]
        return [] if all(map(is_empty, box)) else [box]
    cell = row[found.box[0]]
    if isinstance(cell, str):
        try:
            cell = parse_json(cell) if cell.strip() else []
        except ValueError:
            cell = _SEPARATORS.split(cell.strip("()[] "))
    if found.is_via and isinstance(cell, dict):
        is_box = cell.get("name") == "rect"
        return [[cell.get(key) for key in ("x", "y", "width", "height")]] if is_box else None if cell else []
    if isinstance(cell, list):
        return cell if all(isinstance(each, list) for each in cell) else [cell]
    return [] if is_empty(cell) else None


def read_columns(
    source: Source, data: BoxData, found: Columns, images: Path | None = None, *, needs_boxes: bool = True
) -> Annotated:
    """Return the images of a table with columns of boxes. Rows that name one image file are its boxes.

    A row without numbers is an image without boxes. Numbers of at most 1 are fractions of the image. `images` is the
    folder of the images. None: they are next to the table, or in a folder there.

    Raises:
        ValueError: the images are not found, or the table does not tell the classes or the order of numbers.
    """
    used = [*found.box, *found.size, *found.further.values(), *([data.id_column] if data.id_column else [])]
    # Images in the table itself are read on request.
    used += [found.image] if _names_images(source, found) else []
    others = [name for name in found.names if name != found.image] if needs_boxes and not found.labels else []
    wanted = list(dict.fromkeys((*used, *found.labels, *others)))
    rows = list(read_rows(source, wanted, found.opened(data)))
    cells, wheres = [dict(zip(wanted, row.cells)) for row in rows], [row.where for row in rows]
    faults = Faults()
    raw = [_boxes_of(row, found) if needs_boxes else [] for row in cells]
    labels, names = _labels_of(source, cells, found, data) if needs_boxes else ([None] * len(rows), None)
    boxes = [_rows_of(*each, found, faults) for each in zip(cells, raw, labels, wheres)]
    with_boxes = {box.label for each in boxes for box in each}
    for each, label, where in zip(raw, labels, wheres):
        if each == [] and not isinstance(label, list) and label in with_boxes and found.labels:
            faults.files.append(f"{where}: has the class {label!r}, but no box")
    pool, groups, notes = _images_of(source, data, cells, found, images)
    places = [wheres[group[0]] for group in groups]
    stored = [[box for row in group for box in boxes[row]] for group in groups]
    sizes = [_size_of([cells[row] for row in group], where, found, faults) for group, where in zip(groups, places)]
    corners = np.array([box.corners for image in stored for box in image], np.float64).reshape(-1, 4).T
    is_relative = bool(corners.size) and not (corners > 1).any()
    order = found.order or data.box_format
    if data.box_format not in ("auto", order):
        raise ValueError(f"data.box_format={data.box_format}: the columns {', '.join(found.box)} are {ORDERS[order]}")
    is_by_values = order == "auto" and bool(corners.size)
    if not corners.size:
        order = "xywh"
    elif is_by_values:
        scale, known = (_SCALE, [(_SCALE, _SCALE)] * len(pool)) if is_relative else (1, sizes)
        order = _order_by_values(source, found, corners * scale, stored, pool, known)
    read = [[box._replace(corners=to_corners(box.corners, order)) for box in image] for image in stored]
    records = [BoxedImage(*each, False, is_relative) for each in zip(places, read, sizes)]
    ids = [str(cells[group[0]][data.id_column]) for group in groups] if data.id_column else None
    return annotated(
        KIND,
        source.name,
        pool,
        records,
        faults,
        order,
        names,
        is_by_values=is_by_values,
        ids=ids,
        notes=(*source.notes, *notes),
    )


def _labels_of(
    source: Source, cells: Sequence[Mapping[str, Any]], found: Columns, data: BoxData
) -> tuple[list[Any], Sequence[str] | None]:
    """Return the class cell of each row, and the names of the classes if the source or the settings name them.

    Raises:
        ValueError: several columns may be the class, or none and the boxes may be of several classes.
    """
    if found.is_via:
        nests = [nested(row[found.labels[0]]) for row in cells]
        attributes = [each if isinstance(each, dict) else {} for each in nests]
        keys = list(dict.fromkeys(key for each in attributes for key in each))
        columns = [data.class_column] if data.class_column else keys
        cells = [{key: each.get(key) for key in columns} for each in attributes]
    else:
        columns = list(found.labels)
    if any(not _are_the_same([(str(row[columns[0]]), str(row[name])) for row in cells]) for name in columns[1:]):
        raise ValueError(
            f"{source.name}: {' and '.join(columns)} may be the class of a box. Set data.class_column: {columns[0]}"
        )
    if columns:
        values = [row[columns[0]] for row in cells]
        texts = [value for value in values if not is_empty(value)]
        if all(isinstance(value, str) and _NUMBER.fullmatch(value) for value in texts):
            # More digits are out of range as well.
            values = [value if is_empty(value) else int(value.partition(".")[0][:19]) for value in values]
        return values, class_names(source, columns[0])
    known = (found.image, data.id_column, *found.box, *found.size, *found.further.values())
    others = [name for name in found.names if name not in known]
    may_be = next((name for name in others if _may_be_class(cells, name, found.image)), None)
    if len(data.label_names or ()) > 1 or (may_be is not None and data.label_names is None):
        raise ValueError(
            f"{source.name}: no column is the class of a box by its name. Set data.class_column: {may_be or 'COLUMN'}. "
            f"If the boxes have one class: data.label_names: [{_ONE_CLASS}]"
        )
    return [0] * len(cells), data.label_names or (_ONE_CLASS,)


def _are_the_same(pairs: Sequence[tuple[str, str]]) -> bool:
    """Return whether the values of two columns correspond one to one."""
    return len({*pairs}) == len({one for one, _ in pairs}) == len({other for _, other in pairs})


def _may_be_class(cells: Sequence[Mapping[str, Any]], name: str, image: str) -> bool:
    """Return whether a column repeats some texts that are not the same in all boxes of each image."""
    values = [str(row[name]) for row in cells]
    is_text = not any(numbers([value], 1) or is_empty(value) for value in values)
    images = [row.get(image, index) for index, row in enumerate(cells)]
    is_of_image = len({*zip(images, values)}) == len({*images}) < len(images)
    return is_text and 1 < len({*values}) < len(values) and not is_of_image


def _rows_of(
    row: Mapping[str, Any], boxes: list[Any] | None, label: Any, where: str, found: Columns, faults: Faults
) -> list[BoxRow]:
    """Return the boxes of a row with their numbers as stored."""
    if boxes is None:
        faults.boxes.append(f"{where}: {str(row[found.box[0]])[:80]} is not a box of four numbers")
        return []
    cell = {"bbox": boxes, "category": label, **{key: row[name] for key, name in found.further.items()}}
    is_one = not isinstance(label, list)
    if is_one:
        cell = {key: value if key == "bbox" else [value] * len(boxes) for key, value in cell.items()}
    return cell_rows(cell, where, faults, "xyxy", is_one=is_one)


def _images_of(
    source: Source, data: BoxData, cells: Sequence[Mapping[str, Any]], found: Columns, images: Path | None
) -> tuple[Images, list[list[int]], list[str]]:
    """Return the images, the rows of each, and notes. Images in the table itself have a row each.

    Raises:
        ValueError: no file of the named images exists.
    """
    names: list[Any] = [row.get(found.image) for row in cells]
    if not all(isinstance(name, str) and name for name in names):
        opened = found.opened(data).model_copy(update={"image_column": found.image})
        return table_pool(source, opened, Target(None, is_mask=False)).images, [[row] for row in range(len(names))], []
    groups = defaultdict[str, list[int]](list)
    for row, name in enumerate(names):
        groups[name.replace("\\", "/")].append(row)
    folder = source.files[0].parent if source.files else Path.cwd()
    near = [place for name in _FOLDERS if (place := folder.parent / name).is_dir()]
    for place in (folder, *near) if images is None else (images,):
        # The folders of another machine are left out, unless different images have one name.
        for shown in (list(groups), [PurePosixPath(name).name for name in groups]):
            files = find_images(place, source.name, shown) if len({*shown}) == len(groups) else None
            if files is None:
                continue
            folders = {os.path.dirname(place / name) for name in files}
            there = {os.path.join(each, name) for each in folders for name in list_images(Path(each))}
            left = len(there - {os.path.normpath(place / name) for name in files})
            notes = [f"{source.name}: left out {format_count(left, 'image')} that it does not name"] if left else []
            return FileImages(place, tuple(files)), list(groups.values()), notes
    raise ValueError(
        f"{source.name}: the images of column {found.image!r} are not found (first: {names[0]}). Put them into one "
        "folder next to the table, or set data.train to their folder and data.annotations to the table"
    )


def _names_images(source: Source, found: Columns) -> bool:
    """Return whether the images of a table are texts, not bytes."""
    if source.dataset is not None:
        return getattr(source.dataset.features[found.image], "dtype", None) in ("string", "large_string")
    if source.kind != "parquet":
        return True
    from pyarrow import parquet, types

    kind = parquet.read_schema(source.files[0]).field(found.image).type
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _size_of(rows: Sequence[Mapping[str, Any]], where: str, found: Columns, faults: Faults) -> tuple[int, int] | None:
    sizes = {stated_size(*(row[name] for name in found.size)) for row in rows if found.size} - {None}
    if len(sizes) > 1:
        faults.files.append(f"{where}: its rows state the sizes {' and '.join(map(str, sorted(filter(None, sizes))))}")
        return None
    return next(iter(sizes), None)


def _order_by_values(
    source: Source,
    found: Columns,
    boxes: NDArray[np.float64],
    stored: Sequence[Sequence[BoxRow]],
    images: Images,
    sizes: Sequence[tuple[int, int] | None],
) -> str:
    """Return the order of numbers in which boxes (4, N) fit their stated areas, or their images.

    Raises:
        ValueError: both orders fit, or neither.
    """

    def upright(index: int) -> tuple[int, int] | None:
        try:
            content = images.content(index)
            assert not isinstance(content, np.ndarray)
            size, orientation = image_header(content, "")
        # `check_boxes` reports it.
        except DataError:
            return None
        return size[::-1] if orientation >= 5 else size

    known = dict(enumerate(sizes))
    chosen = evenly_spaced(len(images), _SIZES_READ)
    read = [index for index in chosen if known[index] is None]
    known |= zip(read, in_threads(upright, read))
    edges = np.array([known[index] or (np.nan, np.nan) for index, each in enumerate(stored) for _ in each], np.float64)
    areas = np.array([np.nan if box.area is None else box.area for each in stored for box in each], np.float64)
    misfits = dict[str, int]()
    for order, other in (("xywh", "xyxy"), ("xyxy", "xywh")):
        if order_by_area(boxes, other, areas) == order:
            return order
        misfits[order] = int(np.count_nonzero(~fits_image(boxes, order, edges.reshape(-1, 2).T)))
    order = min(misfits, key=lambda each: misfits[each])
    if max(misfits.values()) > max(_TIMES_AS_MANY * misfits[order], _LEAST_SHARE * len(areas)):
        return order
    # Files without header are of tools that write corners.
    if not found.has_header and not any(misfits.values()):
        return "xyxy"
    counts = " and ".join(f"{number:,} as {ORDERS[each]}" for each, number in misfits.items())
    raise ValueError(
        f"{source.name}: the order of numbers is not clear; of {len(areas):,} boxes, {counts} do not fit their images. "
        "Set data.box_format: xywh or xyxy"
    )
