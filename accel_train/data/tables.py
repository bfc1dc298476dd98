"""Rows of csv, tsv, jsonl, parquet and data sets, cell by cell, with errors that name file, line or row, and byte."""

import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.format import did_you_mean
from accel_train.data.sources import Source, file_kind, num_bytes_of
from accel_train.recipe.data import Data

_ROWS_PER_BATCH = 1024
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BOM = b"\xef\xbb\xbf"


class MissingColumn(ValueError):
    """Raised when a table lacks a column; the message names the nearest one and those that are there."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


class Row(NamedTuple):
    """The cells of one row, in the order of the requested columns."""

    cells: tuple[Any, ...]
    """As the source has them: strings in csv; None is an empty cell of the other kinds."""
    where: str
    """File and line or row, for messages and to name the row in predictions."""
    num_source_bytes: float
    """Bytes of the source that the row takes, which progress bars count."""


def read_rows(source: Source, columns: Sequence[str], data: Data) -> Iterator[Row]:
    """Return the rows of a source in its own order, without blank lines.

    Raises:
        MissingColumn: a column is missing; the message names file and column.
        ValueError: a row cannot be read, or a column is there twice; the message names file, line or row, and column.
    """
    if source.dataset is not None:
        check_columns(source.name, source.dataset.column_names, columns, data)
        batches = source.dataset.select_columns(list(dict.fromkeys(columns))).with_format("arrow")
        num_bytes = num_bytes_of(source) / max(1, len(source.dataset))
        yield from _arrow_rows(batches.iter(batch_size=_ROWS_PER_BATCH), source.name, columns, num_bytes, data)
    for file in source.files:
        kind = file_kind(file)
        if kind not in _READERS:
            raise ValueError(
                f"{file}: this task reads rows with columns ({', '.join(columns)}), and a "
                f"{'.bin file holds tokens' if kind == 'tokens' else 'text file has none'}; "
                "give csv, tsv, jsonl or parquet files, or a data set"
            )
        yield from _READERS[kind](file, columns, data)


def column_names(source: Source, data: Data) -> list[str]:
    """Return the columns of a source: those of its first file, or data set; of jsonl, the keys of the first row.

    Raises:
        ValueError: the first row cannot be read; the message names file and line.
    """
    if source.dataset is not None:
        return list(source.dataset.column_names)
    path = source.files[0]
    if file_kind(path) == "parquet":
        with _parquet_file(path) as file:
            return list(file.schema_arrow.names)
    lines = read_lines(path, data)
    first = next((line for line, _ in lines if line.strip()), None)
    if first is None:
        raise ValueError(f"{path} holds no rows; name a table that has some")
    if file_kind(path) == "jsonl":
        return list(_json_object(first, f"{path}:1", "text"))
    return next(csv.reader(chain([first], (line for line, _ in lines)), delimiter=_delimiter_of(path, first)))


def class_names(source: Source, column: str | None) -> tuple[str, ...] | None:
    """Return the names of the classes whose ids a column holds, where a data set knows them (`datasets.ClassLabel`)."""
    if source.dataset is None:
        return None
    feature: Any = source.dataset.features.get(column)
    names = getattr(getattr(feature, "feature", feature), "names", None)  # of a list of class labels, or of one
    return None if names is None else tuple(names)


def text_cell(cell: object, column: str, where: str, data: Data) -> str:
    """Return the text of a cell.

    Raises:
        ValueError: it is no string, or has a lone surrogate; the message names file, row and column.
    """
    at = f"{where}: column {column!r}"
    if not isinstance(cell, str):
        raise ValueError(
            f"{at} holds {show_cell(cell)}, not a string; repair or drop the row, or set {setting_of(column, data)}"
        )
    return check_text(cell, at, data)


def _csv_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    """The rows of a csv (or, by its name, tsv) file after its header, without blank lines."""
    num_bytes = 0

    def read() -> Iterator[str]:
        nonlocal num_bytes
        for line, line_bytes in read_lines(path, data):
            num_bytes += line_bytes
            yield line

    lines = read()
    first = next(lines, None)
    if first is None:
        return
    reader = csv.reader(chain([first], lines), delimiter=_delimiter_of(path, first), strict=True)
    previous_limit = csv.field_size_limit(sys.maxsize)  # the module's own, 128 KiB, is shorter than many texts
    try:
        header = next(reader)
        check_columns(f"{path}:1", header, columns, data, is_csv=True)
        positions = [header.index(column) for column in columns]
        number = reader.line_num + 1
        for row in reader:
            if row and len(row) != len(header):
                raise ValueError(
                    f"{path}:{number}: the row has {len(row)} fields, the header {len(header)} ({', '.join(header)}); "
                    f'put quotes around a text that holds a separator or line end: "a, b"'
                )
            if row:
                row_bytes, num_bytes = num_bytes, 0
                yield Row(tuple(row[position] for position in positions), f"{path}:{number}", row_bytes)
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: not csv ({error}); check the quotes near this line") from None
    finally:
        csv.field_size_limit(previous_limit)


def _jsonl_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    for number, (line, num_bytes) in enumerate(read_lines(path, data), start=1):
        if line.strip():
            where = f"{path}:{number}"
            row = _json_object(line, where, columns[0])
            check_columns(where, list(row), columns, data)
            yield Row(tuple(row[column] for column in columns), where, num_bytes)


def _parquet_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    import pyarrow

    with _parquet_file(path) as file:
        check_columns(str(path), file.schema_arrow.names, columns, data)
        num_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
        batches = file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=list(dict.fromkeys(columns)))
        try:
            yield from _arrow_rows(batches, str(path), columns, num_bytes, data)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path}: the file is damaged ({error}); write it again") from None


def _parquet_file(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({error}); is it complete?") from None


_READERS = {"csv": _csv_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}


def _arrow_rows(
    batches: Iterator[Any], name: str, columns: Sequence[str], num_bytes: float, data: Data
) -> Iterator[Row]:
    first_row = 1
    for batch in batches:
        cells = [_arrow_cells(batch.column(column), name, first_row, data) for column in columns]
        for number, row in enumerate(zip(*cells), start=first_row):
            yield Row(row, f"{name}, row {number}", num_bytes)
        first_row += batch.num_rows


def _arrow_cells(column: Any, name: str, first_row: int, data: Data) -> list[Any]:
    """The cells of an Arrow column; strings are read as bytes, so that text that is not UTF-8 is found and named."""
    import pyarrow

    types = pyarrow.types
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        try:
            return list(column.to_pylist())
        except UnicodeDecodeError as error:  # in a list or struct
            rows = f"rows {first_row} to {first_row + len(column) - 1}"
            raise ValueError(f"{name}, {rows}: a cell is not UTF-8 ({error.reason}); write the file again") from None
    return [
        None if raw is None else decode(raw, data, f"{name}, row {number}")
        for number, raw in enumerate(column.cast(kind).cast(pyarrow.large_binary()).to_pylist(), start=first_row)
    ]


def check_columns(
    where: str, available: Sequence[str], wanted: Sequence[str], data: Data, *, is_csv: bool = False
) -> None:
    """Refuse a table in which a wanted column is missing (MissingColumn), or there twice (ValueError)."""
    for column in wanted:
        count = list(available).count(column)
        if count == 1:
            continue
        listed = f"There are {', '.join(map(str, available))} ({setting_of(column, data)} says what is read)"
        if count:
            raise ValueError(f"{where}: the column {column!r} is there {count} times; name another. {listed}")
        remedy = did_you_mean(column, available, show=repr)
        if is_csv and not remedy:
            listed += "; the first line of the file must hold the names of the columns"
        raise MissingColumn(column, f"{where}: there is no column {column!r}; {remedy or 'name another.'} {listed}")


def setting_of(column: str, data: Data) -> str:
    """Return the settings that name a column, as in a recipe."""
    columns = {name: value if isinstance(value, tuple) else (value,) for name, value in data if "_column" in name}
    return " or ".join(f"data.{name}" for name, named in columns.items() if column in named) or "the recipe"


def decode(raw: bytes, data: Data, where: object, *, offset: int = 0, line: int = 0) -> str:
    """Return UTF-8 as text; `offset` bytes and `line` lines of the source lie before `raw`.

    Raises:
        ValueError: a byte is not UTF-8, or 0, and `data.encoding_errors` is strict; the message names its position.
    """
    try:
        text = raw.decode("utf-8", data.encoding_errors)
    except UnicodeDecodeError as error:
        utf16 = offset + error.start == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = (
            "it looks like UTF-16, so convert it (iconv -f UTF-16 -t UTF-8)" if utf16 else "convert the file to UTF-8"
        )
        line += raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{where}: byte 0x{raw[error.start]:02x} at position {offset + error.start} (line {line}) is not UTF-8; {hint}, "
            f"or set data.encoding_errors: replace"
        ) from None
    if data.encoding_errors == "strict" and (nul := raw.find(0)) >= 0:
        line += raw.count(b"\n", 0, nul) + 1
        raise ValueError(
            f"{where}: byte 0x00 at position {offset + nul} (line {line}) is in no text; is it a binary file? set "
            "data.encoding_errors: replace to read it all the same"
        )
    return text


def read_lines(path: Path, data: Data) -> Iterator[tuple[str, int]]:
    """Yield lines with their ends and their bytes, split at LF only: other line ends may stand inside JSON and csv."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            start = len(BOM) if number == 1 and raw.startswith(BOM) else 0
            yield decode(raw[start:], data, path, offset=offset + start, line=number - 1), len(raw)
            offset += len(raw)


def _delimiter_of(path: Path, header: str) -> str:
    """The separator of the fields: a tab in a .tsv, and where the header has tabs and no comma; else a comma."""
    if path.suffix.lower() == ".tsv" or ("\t" in header and "," not in header):
        return "\t"
    if ";" in header and "," not in header:
        raise ValueError(
            f"{path}:1: its fields look separated by semicolons ({header.strip()}); save it with commas or tabs"
        )
    return ","


def _json_object(line: str, where: str, example_column: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); each line must be one object; repair or drop it") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {show_cell(row)} is not an object; write {{{example_column!r}: ...}} on each line")
    return row


def check_text(text: str, at: str, data: Data) -> str:
    """Return a cell's text, with U+FFFD for halves of UTF-16 pairs where `data.encoding_errors` is replace.

    JSON can spell such a half ("\\ud800"), which no tokenizer takes.

    Raises:
        ValueError: there is one; the message names it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if data.encoding_errors == "replace":
            return _LONE_SURROGATE.sub("\ufffd", text)
        raise ValueError(
            f"{at}: character {error.start} is the lone surrogate {text[error.start]!r}, which is not text; "
            "repair the row, or set data.encoding_errors: replace"
        ) from None
    return text


def show_cell(value: object) -> str:
    """Return a cell as a message shows it: JSON, cut short."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."
