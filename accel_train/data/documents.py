"""Documents, one after the other, out of text files, jsonl, csv, parquet and data sets.

Memory holds one document, or one batch of rows, whatever the size of the source.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.data.lines import BOM, csv_rows, decode, json_object, read_lines, show_cell
from accel_train.data.sources import Source
from accel_train.recipe_data import Data

_ROWS_PER_BATCH = 1024
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """One text, as a user would count them; it may be empty."""

    text: str
    utf8: bytes
    """The text, encoded: hashed, counted, and what the byte tokenizer reads."""
    num_source_bytes: float
    """Bytes of the source that it took: what a progress bar counts."""
    where: str
    """File and line or row, for messages."""


def read_documents(source: Source, data: Data) -> Iterator[Document]:
    """The documents of a source in its own order; line ends stay as they are, a byte order mark goes.

    Raises:
        ValueError: a row is broken, is not text, or is not UTF-8; the text names file, line or row, and byte.
    """
    if source.dataset is not None:
        yield from _dataset_rows(source, data)
    for file in source.files:
        yield from _READERS[file.kind](file.path, data)


def source_size_bytes(source: Source) -> float:
    """The sum of `num_source_bytes` over the documents of a source, known beforehand."""
    if source.dataset is not None:
        return float(source.dataset.data.nbytes)
    return float(sum(file.path.stat().st_size for file in source.files))


def _text_file(path: Path, data: Data) -> Iterator[Document]:
    raw = path.read_bytes()
    start = len(BOM) if raw.startswith(BOM) else 0
    body = raw[start:] if start else raw
    text = decode(body, data, path, offset=start, line=0)
    yield Document(text, body if data.encoding_errors == "strict" else text.encode(), len(raw), str(path))


def _jsonl_rows(path: Path, data: Data) -> Iterator[Document]:
    for line in read_lines(path, data):
        if not line.text.strip():
            continue
        where = f"{path}:{line.number}"
        row = json_object(line.text, where, data.text_column)
        if data.text_column not in row:
            raise _missing_column(where, list(row), data)
        yield _document(row[data.text_column], line.num_bytes, where, data)


def _csv_rows(path: Path, data: Data) -> Iterator[Document]:
    num_bytes = 0

    def lines() -> Iterator[str]:
        nonlocal num_bytes
        for line in read_lines(path, data):
            num_bytes += line.num_bytes
            yield line.text

    rows = csv_rows(path, lines())
    header = next(rows, None)
    if header is None:
        return
    if header.fields.count(data.text_column) != 1:
        raise _missing_column(f"{path}:1", header.fields, data, "; the first line must hold the names of the columns")
    column = header.fields.index(data.text_column)
    for row in rows:
        taken, num_bytes = num_bytes, 0
        yield _document(row.fields[column], taken, f"{path}:{row.number}", data)


def _parquet_rows(path: Path, data: Data) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({error}); is it complete?") from None
    with file:
        names = file.schema_arrow.names
        if data.text_column not in names:
            raise _missing_column(str(path), names, data)
        num_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
        first_row = 1
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=[data.text_column]):
            yield from _arrow_rows(batch.column(0), path, first_row, num_bytes, data)
            first_row += batch.num_rows


def _dataset_rows(source: Source, data: Data) -> Iterator[Document]:
    dataset = source.dataset
    assert dataset is not None
    if data.text_column not in dataset.column_names:
        raise _missing_column(source.name, dataset.column_names, data)
    feature = dataset.features[data.text_column]
    if getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise ValueError(
            f"{source.name}: column {data.text_column!r} holds {feature}, not strings; set data.text_column"
        )
    num_bytes = source_size_bytes(source) / max(1, len(dataset))
    batches = dataset.select_columns([data.text_column]).with_format("arrow").iter(batch_size=_ROWS_PER_BATCH)
    for index, table in enumerate(batches):
        column = table.column(0).combine_chunks()
        yield from _arrow_rows(column, Path(source.name), 1 + index * _ROWS_PER_BATCH, num_bytes, data)


def _arrow_rows(column: Any, path: Path, first_row: int, num_bytes: float, data: Data) -> Iterator[Document]:
    """The strings of an Arrow array, as bytes first, so that text that is not UTF-8 is found and named."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)):
        raise ValueError(f"{path}: column {data.text_column!r} holds {kind}, not strings; set data.text_column")
    for row, raw in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), start=first_row):
        where = f"{path}, row {row}"
        if raw is None:
            yield _document(None, num_bytes, where, data)
            continue
        text = decode(raw, data, Path(where), offset=0, line=0)
        yield Document(text, raw if data.encoding_errors == "strict" else text.encode(), num_bytes, where)


def _document(value: object, num_bytes: float, where: str, data: Data) -> Document:
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: {data.text_column!r} is {show_cell(value)}, not a string; drop the row, or set data.text_column"
        )
    try:
        return Document(value, value.encode(), num_bytes, where)
    except UnicodeEncodeError as error:  # JSON can spell half of a UTF-16 pair: "\ud800"
        if data.encoding_errors == "replace":
            value = _LONE_SURROGATE.sub("\ufffd", value)
            return Document(value, value.encode(), num_bytes, where)
        raise ValueError(
            f"{where}: character {error.start} of {data.text_column!r} is the lone surrogate "
            f"{value[error.start]!r}, which is not text; repair the row, or set data.encoding_errors: replace"
        ) from None


def _missing_column(where: str, columns: list[str], data: Data, rule: str = "") -> ValueError:
    fault = "is there more than once" if data.text_column in columns else "is missing"
    return ValueError(
        f"{where}: the column {data.text_column!r} {fault}; available: {', '.join(map(str, columns))}; set data.text_column"
        f"{rule}"
    )


_READERS = {"text": _text_file, "jsonl": _jsonl_rows, "csv": _csv_rows, "parquet": _parquet_rows}
