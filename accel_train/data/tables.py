"""Read rows of csv, tsv, jsonl, parquet and data sets; errors name file, line or row, and byte.

A column that names the part of each row (`split`: train, validation, test) is found by its cells.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.buckets.files import RemoteFile
from accel_train.core.format import did_you_mean, format_count
from accel_train.core.json_io import parse_json
from accel_train.core.state import JsonRecord
from accel_train.data.delimited import LINE_COLUMNS, Record, columns_by_setting, read_delimited, read_label_lines
from accel_train.data.encoding import Span, decode, place, read_lines, read_text
from accel_train.data.parts import Part, part_of
from accel_train.data.sources import Source, file_kind, num_bytes_of, resolve_sources
from accel_train.recipe.data import Data

_ROWS_PER_BATCH = 1024
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_FIELD = re.compile(r"\{([^{}]+)\}")
"""Column in a template of texts: `{title}. {body}`."""

_USUAL = "label labels class category target sentiment intent topic genre stars rating overall tag y"
LABEL_NAMES = frozenset(_USUAL.split())
"""Usual names of columns of labels."""
_BINARY = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
SPLITS: dict[Part, str] = {"train": "train", "eval": "validation", "test": "test"}
_ROWS_LOOKED_AT = 200
_MOST_PARTS = 10
"""Different values in a column of parts."""
_WORDS_OF_A_PART = 3


class MissingColumn(ValueError):
    """Raised when a table lacks a column. The message names the nearest column and all existing columns."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


class Unlabelled(ValueError):
    """Raised when files of samples have no labels where those are looked for."""


class Row(NamedTuple):
    """The cells of one row, in the order of the requested columns."""

    cells: tuple[Any, ...]
    """Cells as the source stores them: strings in csv. In other kinds, None is an empty cell."""
    where: str
    """File and line or row, for messages and for the row's name in predictions."""
    num_source_bytes: float
    """Bytes of the source that the row takes, for progress bars."""


def read_rows(source: Source, columns: Sequence[str], data: Data, rows: Iterator[Row] | None = None) -> Iterator[Row]:
    """Yield the rows of a source in source order, without blank lines. `rows`, if given, are these rows as read.

    Raises:
        MissingColumn: a column is missing; the message names file and column.
        ValueError: a row cannot be read, a row repeats the names of several columns, or a column occurs twice; the
            message names file, line or row, and column.
    """
    is_named = len({*columns}) > 1 and data.header != "none"
    for row in rows or _rows_of(source, columns, data):
        # Tables that were joined line by line have headers between their rows.
        if is_named and row.cells == tuple(columns):
            raise ValueError(f"{row.where}: the row repeats the names of the columns ({', '.join(columns)}). Remove it")
        yield row


def _rows_of(source: Source, columns: Sequence[str], data: Data) -> Iterator[Row]:
    if source.dataset is not None:
        check_columns(source.name, source.dataset.column_names, columns, data)
        batches = source.dataset.select_columns(list(dict.fromkeys(columns))).with_format("arrow")
        num_bytes = num_bytes_of(source) / max(1, len(source.dataset))
        yield from _arrow_rows(batches.iter(batch_size=_ROWS_PER_BATCH), source.name, columns, num_bytes, data)
    for file in source.files:
        kind = file_kind(file)
        if kind == "text" and data.lines is not None:
            yield from _label_line_rows(file, columns, data)
            continue
        if kind not in _READERS:
            raise ValueError(
                f"{file}: this task reads rows with columns ({', '.join(columns)}), and a "
                f"{'.bin file holds tokens' if kind == 'tokens' else 'text file has none'}; give csv, tsv, jsonl or "
                "parquet files, or a data set; lines of a label and a text are read by data.lines"
            )
        yield from _READERS[kind](file, columns, data, source.span)


def column_names(source: Source, data: Data) -> list[str]:
    """Return the column names of a source's data set or first file. For jsonl, the keys of the first row.

    Raises:
        ValueError: the first row cannot be read; the message names file and line.
    """
    if source.dataset is not None:
        return list(source.dataset.column_names)
    path = source.files[0]
    if source.kind == "parquet":
        with parquet_file(path) as file:
            return list(file.schema_arrow.names)
    if source.kind == "text" and data.lines is not None:
        return list(LINE_COLUMNS)
    if source.kind == "csv":
        header = next(read_delimited(path, data), None)
        names = [] if header is None else header.fields
    else:
        names = list(next((row for row, _, _ in json_objects(path, data, "text", source.span)), ()))
    if not names:
        raise ValueError(f"{path} holds no rows; name a table with rows")
    return names


def json_rows(files: Sequence[Path], names: Sequence[str], lacking: dict[str, str], data: Data) -> Iterator[Row]:
    """Yield the rows of jsonl files with the keys of the first row. Other keys, and those that a row lacks, are added
    to `lacking`, each with the file and line of a row without it.

    Raises:
        ValueError: a row cannot be read; the message names file and line.
    """
    keys, first = {*names}, ""
    for row, where, num_bytes in (each for path in files for each in json_objects(path, data, "text")):
        first = first or where
        if row.keys() != keys:
            for key in (row.keys() ^ keys) - {""}:
                lacking.setdefault(key, first if key in row else where)
        yield Row(tuple(map(row.get, names)), where, num_bytes)


def class_names(source: Source, column: str | None) -> tuple[str, ...] | None:
    """Return the class names for the ids in a column, if the source knows them (`datasets.ClassLabel`), or None."""
    if source.dataset is None:
        return _names_in_parquet(source.files[0], column) if source.kind == "parquet" else None
    return names_of_feature(source.dataset.features.get(column))


def names_of_feature(feature: Any) -> tuple[str, ...] | None:
    """Return the names of a class label of `datasets`, or of a list of class labels, or None for another feature."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else tuple(names)


def _names_in_parquet(path: Path, column: str | None) -> tuple[str, ...] | None:
    """Return the class names that `datasets` stored in a parquet file's schema, for class labels and lists of them."""
    with parquet_file(path) as file:
        written = (file.schema_arrow.metadata or {}).get(b"huggingface")
    try:
        feature = parse_json(written or b"{}")["info"]["features"][column]
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        return tuple(map(str, feature["names"]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def text_cell(cell: object, column: str, where: str, data: Data) -> str:
    """Return the text of a cell.

    Raises:
        ValueError: the cell is not a string or has a lone surrogate; the message names file, row and column.
    """
    at = f"{where}: column {column!r}"
    if not isinstance(cell, str):
        raise ValueError(
            f"{at} holds {show_cell(cell)}, not a string; repair or drop the row, or set {setting_of(column, data)}"
        )
    return check_text(cell, at, data)


def columns_read(name: str) -> list[str]:
    """Return the columns in a template such as `{title}. {body}`, or the name itself if it is a column."""
    return _FIELD.findall(name) or [name]


def text_of(name: str, cells: Iterator[Any], where: str, data: Data) -> str:
    """Return the text of a column, or of a template from the cells of its columns. These may be numbers or empty.

    Raises:
        ValueError: as for `text_cell`.
    """

    def shown(field: re.Match[str]) -> str:
        cell = next(cells)
        # A float that differs from itself is NaN, an empty cell of pandas.
        cell = "" if cell is None or cell != cell else str(cell) if isinstance(cell, int | float) else cell
        return text_cell(cell, field[1], where, data)

    return _FIELD.sub(shown, name) if _FIELD.search(name) else text_cell(next(cells), name, where, data)


def _csv_rows(path: Path, columns: Sequence[str], data: Data, span: Span | None) -> Iterator[Row]:
    """Yield the rows of a csv or tsv file after its header, without blank lines."""
    records = read_delimited(path, data, span)
    header = next(records, None)
    if header is None:
        return
    check_columns(f"{path}:{header.line}", header.fields, columns, data, is_csv=data.header == "first_line")
    yield from _record_rows(place(path, span), records, header.fields, columns)


def _record_rows(where: str, records: Iterator[Record], names: Sequence[str], columns: Sequence[str]) -> Iterator[Row]:
    positions = [names.index(column) for column in columns]
    for record in records:
        cells = tuple(record.fields[position] for position in positions)
        yield Row(cells, f"{where}:{record.line}", record.num_bytes)


def _label_line_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    check_columns(str(path), LINE_COLUMNS, columns, data)
    if data.lines == "folder_names":
        cells = {"label": path.parent.name, "text": read_text(path, data)}
        yield Row(tuple(cells[column] for column in columns), str(path), path.stat().st_size)
        return
    yield from _record_rows(str(path), read_label_lines(path, data), LINE_COLUMNS, columns)


def _jsonl_rows(path: Path, columns: Sequence[str], data: Data, span: Span | None) -> Iterator[Row]:
    for row, where, num_bytes in json_objects(path, data, columns[0], span):
        check_columns(where, list(row), columns, data)
        yield Row(tuple(row[column] for column in columns), where, num_bytes)


def _parquet_rows(path: Path, columns: Sequence[str], data: Data, span: Span | None) -> Iterator[Row]:
    import pyarrow

    with parquet_file(path) as file:
        check_columns(str(path), file.schema_arrow.names, columns, data)
        num_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
        start, stop = span or (0, file.metadata.num_row_groups)
        first_row = 1 + sum(file.metadata.row_group(group).num_rows for group in range(start))
        batches = file.iter_batches(_ROWS_PER_BATCH, [*range(start, stop)], list(dict.fromkeys(columns)))
        try:
            yield from _arrow_rows(batches, str(path), columns, num_bytes, data, first_row)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path}: the file is damaged ({error}); write it again") from None


def parquet_file(path: Path) -> Any:
    """Return the opened parquet file.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    import pyarrow.parquet

    try:
        return path.parquet() if isinstance(path, RemoteFile) else pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({error}); is it complete?") from None


_READERS = {"csv": _csv_rows, "jsonl": _jsonl_rows, "json": _jsonl_rows, "parquet": _parquet_rows}


def _arrow_rows(
    batches: Iterator[Any], name: str, columns: Sequence[str], num_bytes: float, data: Data, first_row: int = 1
) -> Iterator[Row]:
    for batch in batches:
        cells = [_arrow_cells(batch.column(column), name, first_row, data) for column in columns]
        for number, row in enumerate(zip(*cells), start=first_row):
            yield Row(row, f"{name}, row {number}", num_bytes)
        first_row += batch.num_rows


def _arrow_cells(column: Any, name: str, first_row: int, data: Data) -> list[Any]:
    """Return the cells of an Arrow column.

    Strings are read as bytes, so that an error can name the text that is not UTF-8.
    """
    import pyarrow

    types = pyarrow.types
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        try:
            return list(column.to_pylist())
        # The faulty text is inside a list or struct.
        except UnicodeDecodeError as error:
            rows = f"rows {first_row} to {first_row + len(column) - 1}"
            raise ValueError(f"{name}, {rows}: a cell is not UTF-8 ({error.reason}); write the file again") from None
    return [
        None if raw is None else decode(raw, data, f"{name}, row {number}")
        for number, raw in enumerate(column.cast(kind).cast(pyarrow.large_binary()).to_pylist(), start=first_row)
    ]


def check_columns(
    where: str, available: Sequence[str], wanted: Sequence[str], data: Data, *, is_csv: bool = False
) -> None:
    """Check that each wanted column occurs exactly once.

    Raises:
        MissingColumn: a column is missing.
        ValueError: a column occurs twice.
    """
    for column in wanted:
        count = list(available).count(column)
        if count == 1:
            continue
        listed = f"The columns are {', '.join(map(str, available))} ({setting_of(column, data)} names the column)"
        if count:
            raise ValueError(f"{where}: column {column!r} occurs {count} times; choose another. {listed}")
        remedy = did_you_mean(column, available, show=repr)
        if is_csv and not remedy:
            listed += "; the first line must hold the column names; data.header: none calls columns 1, 2, ..."
        raise MissingColumn(column, f"{where}: no column {column!r}; {remedy or 'choose another.'} {listed}")


def setting_of(column: str, data: Data) -> str:
    """Return the settings that name a column, as written in a recipe."""
    settings = columns_by_setting(data).items()
    found = [name for name, named in settings if column in named or f"{{{column}}}" in str(named)]
    return " or ".join(f"data.{name}" for name in found) or "the recipe"


def json_objects(
    path: Path, data: Data, example_column: str, span: Span | None = None
) -> Iterator[tuple[JsonRecord, str, float]]:
    """Yield (object, file and line, bytes) for each object of a jsonl file or a json array, without blank lines."""
    is_array = file_kind(path) == "json" and not has_object_lines(path, data)
    example = f"{{{example_column!r}: ...}}"
    for row, where, num_bytes in _array_values(path, data, example) if is_array else _line_values(path, data, span):
        if not isinstance(row, dict):
            each = "for each row" if is_array else "on each line"
            raise ValueError(f"{where}: {show_cell(row)} is not an object; write {example} {each}")
        yield row, where, num_bytes


def has_object_lines(path: Path, data: Data) -> bool:
    """Return whether the first two lines of a file are objects, as in jsonl. A single object may be a document."""
    lines = list(islice((line.strip() for line, _ in read_lines(path, data) if line.strip()), 2))
    return len(lines) == 2 and all(line[0] + line[-1] == "{}" for line in lines)


def _array_values(path: Path, data: Data, example: str) -> Iterator[tuple[Any, str, float]]:
    try:
        rows = parse_json(read_text(path, data))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); write one array of objects") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds {show_cell(rows)}, not an array of rows; write [{example}, ...]")
    num_bytes = path.stat().st_size / max(1, len(rows))
    for number, row in enumerate(rows, start=1):
        yield row, f"{path}, row {number}", num_bytes


def _line_values(path: Path, data: Data, span: Span | None) -> Iterator[tuple[Any, str, float]]:
    name = place(path, span)
    for number, (line, num_bytes) in enumerate(read_lines(path, data, span), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); each line must be one object; repair or drop it") from None
        yield row, where, num_bytes


def check_text(text: str, at: str, data: Data) -> str:
    """Return a cell's text, with lone surrogates replaced by U+FFFD if `data.encoding_errors` is replace.

    JSON can spell a lone surrogate ("\\ud800"), but tokenizers reject it.

    Raises:
        ValueError: the text has a lone surrogate; the message names it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if data.encoding_errors == "replace":
            return _LONE_SURROGATE.sub("\ufffd", text)
        raise ValueError(
            f"{at}: character {error.start} is the lone surrogate {text[error.start]!r}; this is not text. Repair "
            f"the row, or set data.encoding_errors: replace"
        ) from None
    return text


def show_cell(value: object) -> str:
    """Return a cell as JSON, shortened to 60 characters, for messages."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def binary_value(cell: Any) -> bool | None:
    """Return whether a cell is 1 or true; None if it is neither 0 nor 1. Text as pandas writes it: 1, 1.0, True."""
    if isinstance(cell, list | tuple | dict):
        return None
    return _BINARY.get(str(cell).lower())


def resolve_both(data: Data, by_ranges: bool = False) -> tuple[tuple[Source, ...], tuple[Source, ...], list[str]]:
    """Return the sources of `data.train`, the sources of `data.eval`, and the notes on both.

    The sources of `data.eval` are empty if a part of the training data is held out.

    Raises:
        ValueError: a source is missing, or a column divides the rows of `data.train` into parts.
    """
    train = resolve_sources(data.train_names, data, key=data.train_key, by_ranges=by_ranges)
    for source in train:
        refuse_parts_of(source, data)
    held_out = () if data.eval is None else resolve_sources(data.eval, data, key="data.eval")
    return train, held_out, [note for source in (*train, *held_out) for note in source.notes]


def refuse_parts_of(source: Source, data: Data) -> None:
    """Raise ValueError if a column that the task does not read divides the rows of training data into parts."""
    if data.is_for_training:
        read = {name for names in columns_by_setting(data).values() for name in names}
        refuse_parts(source.name, *columns_with_parts(source, data, read))


def refuse_parts(where: str, columns: Mapping[str, Sequence[Any]], names: Collection[str]) -> None:
    """Raise ValueError if one of the columns divides the rows into parts. `names` are all columns of the table."""
    for name, cells in columns.items():
        if (parts := parts_in(where, name, cells, names)) is not None:
            shown = ", ".join(f"{SPLITS[part]} {len(rows):,}" for part, rows in parts.items())
            raise ValueError(
                f"{where}: column {name!r} divides the rows into parts ({shown}), and all of them would be trained "
                "on. Write a table for each part (train, validation, test), as `accel-train finetune` does for tables "
                "of texts; or remove the column to train on all rows"
            )


def columns_with_parts(
    source: Source, data: Data, skipped: Collection[str] = ()
) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the columns in whose first rows a cell names a part, and the names of all columns of a readable table."""
    if source.files and source.kind not in ("csv", "jsonl", "json", "parquet"):
        return {}, []
    try:
        names = [name for name in column_names(source, data) if name]
        others = [name for name in names if name not in skipped]
        first = list(islice(rows_of(source, others, data), _ROWS_LOOKED_AT)) if others else []
        likely = [name for name in others if any(_part_of_cell(name, str(row.get(name)), names) for row in first)]
        return {name: [row.get(name) for row in rows_of(source, [name], data)] for name in likely}, names
    # The reader of the table will report the row.
    except ValueError:
        return {}, []


def rows_of(source: Source, names: Sequence[str], data: Data) -> Iterator[dict[str, Any]]:
    """Yield the rows as mappings. Rows of JSON have their own keys."""
    if source.kind in ("json", "jsonl"):
        yield from (row for path in source.files for row, _, _ in json_objects(path, data, "text"))
        return
    yield from (dict(zip(names, row.cells)) for row in read_rows(source, names, data))


def _part_of_cell(name: str, cell: str, names: Collection[str]) -> Part | None:
    """Return the part that a cell names, or that a column with 0 and 1 has in its name: is_valid."""
    if name.lower() in LABEL_NAMES:
        return None
    begin, _, named = name.lower().partition("_")
    has_label = not LABEL_NAMES.isdisjoint(map(str.lower, names))
    if begin == "is" and has_label and (part := part_of(named)) is not None and binary_value(cell) is not None:
        other: Part = "test" if part == "train" else "train"
        return part if binary_value(cell) else other
    return part_of(cell) if len(cell.split()) <= _WORDS_OF_A_PART else None


def parts_in(where: str, name: str, cells: Sequence[Any], names: Collection[str]) -> dict[Part, list[int]] | None:
    """Return the rows of each part, or None if a column does not name a training part and another.

    Raises:
        ValueError: some rows are of no part.
    """
    if isinstance(cells[0], list | dict):
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
            f"{where}: column {name!r} divides the rows into parts, and {cells[others[0]]!r} is not train, validation "
            f"or test ({format_count(len(others), 'row')}). Rename or remove these rows"
        )
    return {part: rows[part] for part in SPLITS if part in rows}
