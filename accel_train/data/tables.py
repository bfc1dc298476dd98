"""Rows of csv, tsv, jsonl, parquet and data sets: the cells of the columns that a task asks for, and where they stand."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.data.lines import csv_rows, json_object, read_lines
from accel_train.data.sources import Source
from accel_train.recipe_data import Data

_ROWS_PER_BATCH = 1024


class MissingColumn(ValueError):
    """A table has not the column that is asked for; the text names the nearest, and those that are there."""

    def __init__(self, column: str, said: str) -> None:
        super().__init__(said)
        self.column = column


class Row(NamedTuple):
    """The cells of one row, in the order in which the columns were asked for."""

    cells: tuple[Any, ...]
    """As the source has them: csv knows nothing but strings; None is an empty cell of the other kinds."""
    where: str
    """File and line or row, for messages and to name the row in predictions."""


def read_rows(source: Source, columns: Sequence[str], data: Data) -> Iterator[Row]:
    """The rows of a source in its own order; blank lines are none.

    Raises:
        MissingColumn: a column is missing; the text names file and column.
        ValueError: a row cannot be read, or a column is there twice; the text names file, line or row, and column.
    """
    if source.dataset is not None:
        _check_columns(source.name, source.dataset.column_names, columns, data)
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


def _csv_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    rows = csv_rows(path, (line.text for line in read_lines(path, data)))
    header = next(rows, None)
    if header is None:
        return
    _check_columns(f"{path}:1", header.fields, columns, data, header_is_a_line=True)
    positions = [header.fields.index(column) for column in columns]
    for row in rows:
        yield Row(tuple(row.fields[position] for position in positions), f"{path}:{row.number}")


def _jsonl_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    for line in read_lines(path, data):
        if not line.text.strip():
            continue
        where = f"{path}:{line.number}"
        row = json_object(line.text, where, columns[0])
        _check_columns(where, list(row), columns, data)
        yield Row(tuple(row[column] for column in columns), where)


def _parquet_rows(path: Path, columns: Sequence[str], data: Data) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({error}); is it complete?") from None
    with file:
        _check_columns(str(path), file.schema_arrow.names, columns, data)
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


def _check_columns(
    where: str, available: Sequence[str], wanted: Sequence[str], data: Data, *, header_is_a_line: bool = False
) -> None:
    for column in wanted:
        count = list(available).count(column)
        if count == 1:
            continue
        fault = f"the column {column!r} is there {count} times" if count else f"there is no column {column!r}"
        near = get_close_matches(column, available, n=1)
        remedy = f"did you mean {near[0]!r}?" if near and not count else "name another."
        said = f"{where}: {fault}; {remedy} There are {', '.join(map(str, available))} ({setting_of(column, data)} says what is read)"
        if header_is_a_line and not count and not near:
            said += "; the first line of the file must hold the names of the columns"
        raise ValueError(said) if count else MissingColumn(column, said)


def setting_of(column: str, data: Data) -> str:
    """The settings that name a column, as in a recipe."""
    names = [name for name in type(data).model_fields if name.endswith(("_column", "_columns"))]
    values = {name: getattr(data, name) for name in names}
    named = [
        name for name, value in values.items() if value == column or (isinstance(value, tuple) and column in value)
    ]
    return " or ".join(f"data.{name}" for name in named) or "the recipe"


_READERS = {"csv": _csv_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}
