"""Split a table by a column that names the part of each row (train, validation, test), into one file per part."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.data.labels import binary_value
from accel_train.data.parts import Part, part_of
from accel_train.data.sources import file_kind
from accel_train.data.tables import column_names, has_object_lines, json_objects, read_rows
from accel_train.experiments.finetune.columns import (
    LABEL_NAMES,
    Table,
    read_table,
    readings,
    source_of,
    with_settings,
)
from accel_train.experiments.finetune.recipe import Asked

_MOST_PARTS = 10
"""Different values in a column of parts."""
_WORDS_OF_A_PART = 3
SPLITS: dict[Part, str] = {"train": "train", "eval": "validation", "test": "test"}


def rows_by_part(asked: Asked, path: Path) -> tuple[str, dict[str, bytes]] | None:
    """Return the column of parts in a table, and a file for each part: parquet as parquet, other rows as jsonl.

    Returns None without this column, and for a table that names image files, because its paths are relative to it.

    Raises:
        ValueError: some rows of the column are of no part.
    """
    kind = file_kind(path)
    try:
        data = with_settings(asked.data, readings(path, asked.data, asked.given))
        if kind == "json" and not has_object_lines(path, data) and path.read_bytes().lstrip()[:1] != b"[":
            return None
        names = column_names(source_of(path), data) if kind in ("csv", "jsonl", "json", "parquet") else []
        rows = _objects(path, names, data) if _may_have_parts(path, names, data) else []
    # The reader of the table will report the row.
    except ValueError:
        return None
    for name in names if rows else ():
        parts = _parts_in(asked, str(path), name, [row.get(name) for row in rows], names)
        if parts is None or _names_images(asked, path):
            continue
        files = {
            f"{SPLITS[part]}.{'parquet' if kind == 'parquet' else 'jsonl'}": found for part, found in parts.items()
        }
        if kind == "parquet":
            return name, {file: _parquet_of(path, found) for file, found in files.items()}
        encoding = data.encoding if "data.encoding" in asked.given else "utf-8"
        lines = {file: "".join(f"{json.dumps(rows[row])}\n" for row in found) for file, found in files.items()}
        return name, {file: text.encode(encoding) for file, text in lines.items()}
    return None


def refuse_parts(asked: Asked, table: Table) -> None:
    """Raise ValueError if a column divides the rows into parts, because all rows would be trained on."""
    names = list(table.columns)
    for column in table.columns.values():
        if (parts := _parts_in(asked, str(table.path), column.name, column.cells, names)) is not None:
            shown = ", ".join(f"{SPLITS[part]} {len(rows):,}" for part, rows in parts.items())
            raise ValueError(
                f"{table.path}: column {column.name!r} divides the rows into parts ({shown}), and all of them would be "
                "trained on. Write a table for each part: train, validation, test"
            )


def _may_have_parts(path: Path, names: Sequence[str], data: Any) -> bool:
    first = next(read_rows(source_of(path), names, data), None) if names else None
    cells = () if first is None else first.cells
    return any(_part_of_cell(name, str(cell), names) is not None for name, cell in zip(names, cells))


def _objects(path: Path, names: Sequence[str], data: Any) -> list[dict[str, Any]]:
    """Return the rows as mappings. Rows of JSON have their own keys."""
    if file_kind(path) in ("json", "jsonl"):
        return [row for row, _, _ in json_objects(path, data, "text")]
    named = [name for name in names if name]
    return [dict(zip(named, row.cells)) for row in read_rows(source_of(path), named, data)]


def _part_of_cell(name: str, cell: str, names: Sequence[str]) -> Part | None:
    """Return the part that a cell names, or that a column with 0 and 1 has in its name: is_valid."""
    if name.lower() in LABEL_NAMES:
        return None
    begin, _, named = name.lower().partition("_")
    has_label = any(each.lower() in LABEL_NAMES for each in names)
    if begin == "is" and has_label and (part := part_of(named)) is not None and binary_value(cell) is not None:
        other: Part = "test" if part == "train" else "train"
        return part if binary_value(cell) else other
    return part_of(cell) if len(cell.split()) <= _WORDS_OF_A_PART else None


def _parts_in(
    asked: Asked, path: str, name: str, cells: Sequence[Any], names: Sequence[str]
) -> dict[Part, list[int]] | None:
    """Return the rows of each part, or None if the column does not name a training part and another.

    Raises:
        ValueError: some rows are of no part.
    """
    if name in (*asked.label, *asked.text) or isinstance(cells[0], list | dict):
        return None
    rows: dict[Part | None, list[int]] = defaultdict(list)
    part_by_value: dict[str, Part | None] = {}
    for row, cell in enumerate(map(str, cells)):
        if cell not in part_by_value:
            part_by_value[cell] = _part_of_cell(name, cell, names)
            if len(part_by_value) > _MOST_PARTS:
                return None
        rows[part_by_value[cell]].append(row)
    if "train" not in rows or not rows.keys() & {"eval", "test"}:
        return None
    if others := rows.get(None):
        raise ValueError(
            f"{path}: column {name!r} divides the rows into parts, and {cells[others[0]]!r} is not train, validation "
            f"or test ({len(others):,} rows). Rename or remove these rows"
        )
    return {part: rows[part] for part in SPLITS if part in rows}


def _names_images(asked: Asked, path: Path) -> bool:
    from accel_train.experiments.finetune.images import image_column  # imports Pillow

    found = image_column(read_table(path, asked.data, asked.given))
    return found is not None and isinstance(found[1][0], str)


def _parquet_of(path: Path, rows: Sequence[int]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).take(rows), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
