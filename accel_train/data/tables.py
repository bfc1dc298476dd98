"""Rows of csv, tsv, jsonl, parquet and data sets: the cells of the columns that a task asks for, and where they stand."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.data.sources import Source
from accel_train.recipe import Data

_ROWS_PER_BATCH = 1024


class Row(NamedTuple):
    """The cells of one row, in the order in which the columns were asked for."""

    cells: tuple[Any, ...]
    """As the source has them: csv knows nothing but strings; None is an empty cell of the other kinds."""
    where: str
    """File and line or row, for messages and to name the row in predictions."""


def read_rows(source: Source, columns: Sequence[str], data: Data) -> Iterator[Row]:
    """The rows of a source in its own order; blank lines are none.

    Raises:
        ValueError: a column is missing, or a row cannot be read; the text names file, line or row, and column.
    """
    if source.dataset is not None:
        _check_columns(source.name, source.dataset.column_names, columns)
        batches = source.dataset.select_columns(list(dict.fromkeys(columns))).with_format("arrow")
        yield from _arrow_rows(batches.iter(batch_size=_ROWS_PER_BATCH), source.name, columns)
    for file in source.files:
        if file.kind not in _READERS:
            raise ValueError(
                f"{file.path}: this task reads rows with columns ({', '.join(columns)}), and a "
                f"{'.bin file holds tokens' if file.kind == 'tokens' else 'text file has none'}; "
                "give csv, tsv, jsonl or parquet files, or a data set"
            )
        yield from _READERS[file.kind](file.path, columns, data)


def class_names(source: Source, column: str) -> tuple[str, ...] | None:
    """The names of the classes whose ids a column holds, where a data set knows them (`datasets.ClassLabel`)."""
    if source.dataset is None:
        return None
    feature: Any = source.dataset.features.get(column)
    feature = getattr(feature, "feature", feature)  # a list of class labels
    names = getattr(feature, "names", None)
    return None if names is None else tuple(names)


def show_cell(value: object) -> str:
    """A cell as a message shows it: JSON, cut short."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _csv_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    previous_limit = csv.field_size_limit(sys.maxsize)  # the module's own, 128 KiB, is shorter than many texts
    try:
        lines = (line for _, line in _lines(path, data))
        reader = csv.reader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        header = next(reader, None)
        if header is None:
            return
        _check_columns(f"{path}:1", header, columns)
        positions = [header.index(column) for column in columns]
        while True:
            line = reader.line_num + 1
            row = next(reader, None)
            if row is None:
                return
            if not row:  # a blank line
                continue
            if len(row) != len(header):
                raise ValueError(
                    f"{path}:{line}: the row has {len(row)} fields, the header {len(header)} ({', '.join(header)}); "
                    f'put quotes around a text that holds a separator or line end: "a, b"'
                )
            yield Row(tuple(row[position] for position in positions), f"{path}:{line}")
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: not csv ({error}); check the quotes near this line") from None
    finally:
        csv.field_size_limit(previous_limit)


def _jsonl_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    for number, line in _lines(path, data):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}); each line must be one object; repair or drop it") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: {show_cell(row)} is not an object; write {{{columns[0]!r}: ...}} on each line")
        _check_columns(where, list(row), columns)
        yield Row(tuple(row[column] for column in columns), where)


def _parquet_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({error}); is it complete?") from None
    with file:
        _check_columns(str(path), file.schema_arrow.names, columns)
        batches = file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=list(dict.fromkeys(columns)))
        try:
            yield from _arrow_rows(batches, str(path), columns)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path}: the file is damaged ({error}); write it again") from None


def _arrow_rows(batches: Iterator[Any], name: str, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of Arrow tables or record batches that follow each other."""
    first_row = 1
    for batch in batches:
        cells = []
        for column in columns:
            try:
                cells.append(batch.column(column).to_pylist())
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{name}, rows {first_row} to {first_row + batch.num_rows - 1}, column {column!r}: a cell is not UTF-8 "
                    f"({error.reason}); write the file again from text that is"
                ) from None
        for offset, row in enumerate(zip(*cells)):
            yield Row(row, f"{name}, row {first_row + offset}")
        first_row += batch.num_rows


def _lines(path: Path, data: Data) -> Iterator[tuple[int, str]]:
    """Number and text of each line, with its end. Split at LF only: other line ends may stand inside JSON and csv."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8", data.encoding_errors)
            except UnicodeDecodeError as error:
                hint = "it looks like UTF-16, so convert it (iconv -f UTF-16 -t UTF-8)"
                if offset or raw[:2] not in (b"\xff\xfe", b"\xfe\xff"):
                    hint = "convert the file to UTF-8"
                raise ValueError(
                    f"{path}: byte 0x{error.object[error.start]:02x} at position {offset + error.start} (line {number}) "
                    f"is not UTF-8; {hint}, or set data.encoding_errors: replace"
                ) from None
            offset += len(raw)


def _check_columns(where: str, available: Sequence[str], wanted: Sequence[str]) -> None:
    for column in wanted:
        count = list(available).count(column)
        if count == 1:
            continue
        fault = f"the column {column!r} is there {count} times" if count else f"there is no column {column!r}"
        near = get_close_matches(column, available, n=1)
        remedy = f"did you mean {near[0]!r}?" if near and not count else "name another."
        raise ValueError(
            f"{where}: {fault}; {remedy} There are {', '.join(map(str, available))} "
            "(data.text_columns, data.label_column and data.id_column say what is read)"
        )


_READERS = {"csv": _csv_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}
