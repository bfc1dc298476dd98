"""Tables with names or bytes of images: the column of images, their files, and the label."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.images.images import RowImages, list_images
from accel_train.data.images.tables import find_images
from accel_train.experiments.finetune.columns import Column, Table, read_table
from accel_train.experiments.finetune.found import Asked
from accel_train.experiments.finetune.images import sizes_of
from accel_train.experiments.finetune.labels import recognise_label

_BOXES = ({"xmin", "ymin"}, {"x_min", "y_min"}, {"bbox"}, {"x1", "y1", "x2", "y2"})
_HELD_OUT = ("val", "valid", "validation", "dev", "eval")
_NOT_FOR_TRAINING = ("test", "submission")


def image_column(table: Table) -> tuple[Column, Sequence[Any]] | None:
    """Return the column of images, with its cells as paths relative to the table, or None without such a column.

    Raises:
        ValueError: several columns name images, or the named files do not exist.
    """
    columns = [column for column in table.columns.values() if column.is_image]
    if len(columns) > 1:
        raise ValueError(
            f"{table.path}: {' and '.join(column.name for column in columns)} are names of images; with masks: "
            f"accel-train run segmentation --data.train {table.path} --data.image_column {columns[0].name} "
            f"--data.mask_column {columns[1].name}"
        )
    for column in columns or (column for column in table.columns.values() if column.is_ids):
        found = find_images(table.path.parent, str(table.path), column.cells)
        if columns or found is not None:
            return column, column.cells if found is None else found
    return None


def recognise_images(asked: Asked, table: Table) -> dict[str, Any] | None:
    """Return the facts of a table with a column of images and a column of labels, or None without images."""
    if asked.text or asked.task not in (None, "image-classification"):
        return None
    found = image_column(table)
    if found is None:
        return None
    column, cells = found
    names = {name.lower() for name in table.columns}
    if any(box <= names for box in _BOXES):
        raise ValueError(
            f"{table.path} holds boxes (columns {table.names}). Object detection is not one of the tasks. "
            "For classes of whole images remove the columns of the boxes, and keep one row for each image."
        )
    folder = table.path.parent
    missing = [index for index, cell in enumerate(cells) if isinstance(cell, str) and not os.path.isfile(folder / cell)]
    if missing:
        raise ValueError(
            f"{table.wheres[missing[0]]}, column {column.name!r}: file not found: {folder / cells[missing[0]]} "
            f"({len(missing)} of {len(cells)} are missing). Write paths relative to the table, "
            "or put the files into one folder next to it"
        )
    label = recognise_label(asked, table, column.name, may_drop=False)
    where = "its cells are image files"
    if list(cells) != list(column.cells):
        where = f"its cells name images in {folder / os.path.dirname(cells[0])}/"
    return {
        "task": "image-classification",
        "why": f"column {column.name!r} names images, column {label.name!r} their classes",
        "settings": {"data.image_column": Choice(column.name, where), **label.settings},
        "counts": label.counts,
        "notes": (_not_used(table, cells, column.name, label.name),),
        **sizes_of(RowImages(cells, folder, column.name, str(table.path), tuple(table.wheres))),
    }


def _not_used(table: Table, cells: Sequence[Any], *used: str) -> str:
    left = [name for name in table.columns if name not in used]
    said = [f"columns {', '.join(left)}"] if left else []
    files = {os.path.normpath(table.path.parent / cell) for cell in cells if isinstance(cell, str)}
    places = {os.path.dirname(file) for file in files}
    images = {os.path.normpath(Path(place, name)) for place in places for name in list_images(Path(place))[0]}
    if others := images - files:
        said.append(f"{format_count(len(others), 'image')} that the table does not name")
    left = [
        entry.name + "/" * entry.is_dir()
        for entry in sorted(table.path.parent.iterdir())
        if not _words(entry.name).isdisjoint(_NOT_FOR_TRAINING) and os.path.normpath(entry) not in places
    ]
    said += left[:6]
    return f"not used: {'; '.join(said) or 'nothing'}"


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def table_of_images(asked: Asked, folder: Path, tables: Sequence[Path]) -> tuple[Path, Path | None] | None:
    """Return the table that names the images of a folder, and the table to evaluate on if a name shows one.

    Raises:
        ValueError: several tables name images. The message shows the command.
    """
    named = []
    for path in tables:
        words = _words(path.relative_to(folder).as_posix())
        if words.isdisjoint(_NOT_FOR_TRAINING) and image_column(read_table(path, asked.data, asked.given)) is not None:
            named.append((path, not words.isdisjoint(_HELD_OUT)))
    train, held = ([path for path, is_held in named if is_held is wanted] for wanted in (False, True))
    if not train:
        return None
    if len(train) > 1 or len(held) > 1:
        listed = ", ".join(str(path) for path, _ in named[:5])
        raise ValueError(f"{folder}: several tables name images ({listed}); name one: accel-train finetune {train[0]}")
    return train[0], held[0] if held else None


def refuse_other_classes(asked: Asked, folder: Path, images: Sequence[str], tables: Sequence[Path]) -> None:
    """Check that a table of most images has a column with the folders as classes.

    Raises:
        ValueError: a table does not. The message names the table and two of the folders.
    """
    images = [name.removeprefix("train/") for name in images if name.startswith("train/")] or images
    class_of = {Path(name).stem: name.split("/", 1)[0] for name in images}
    for path in tables if len(class_of) == len(images) else ():
        try:
            table = read_table(path, asked.data, asked.given)
        except ValueError:
            # The table holds other data.
            continue
        for column in table.columns.values():
            names = [Path(str(cell)) for cell in column.cells]
            found = [(row, class_of[name.stem]) for row, name in enumerate(names) if name.stem in class_of]
            if 2 * len(found) <= len(images) or all(each in names[row].parts[:-1] for row, each in found):
                continue
            classes = sorted({each for _, each in found})
            pairs = [{(each, str(other.cells[row])) for row, each in found} for other in table.columns.values()]
            if not any(len(pair) == len(classes) == len({value for _, value in pair}) for pair in pairs):
                raise ValueError(
                    f"{path}: column {column.name!r} names images in {folder / classes[0]}/ and "
                    f"{folder / classes[-1]}/, and no column has these folders as classes. "
                    "Put all images into one folder next to the table. If the folders are the classes: "
                    "--task image-classification"
                )
