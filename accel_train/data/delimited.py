"""Read fields of csv and tsv files and of label-and-text lines; detect the delimiter."""

import csv
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from accel_train.core.format import format_count
from accel_train.data.encoding import Span, encoding_of, place, raw_lines, read_lines
from accel_train.recipe.data import Data
from accel_train.recipe.yaml_core import is_number

DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}
"""Delimiters to try, in this order, with their names."""
LINE_COLUMNS = ("label", "text")
"""Columns of a file read with `data.lines`."""
FASTTEXT_PREFIX = "__label__"
_LINES_LOOKED_AT = 20
_NAME = re.compile(r"(?=.*[^\W\d_])\w[^.!?,;:]{,49}")
"""Possible name of a column: it has a letter, and no sign of a sentence."""
_ROWS_LOOKED_AT = 100
_FEWEST_ROWS = 10
_FEWEST_WORDS = 3
"""Rows, and words in each of them, from which a first line of single words is a header."""
_DELIMITER_LINE = re.compile(r"sep=(.)\s*")
"""Excel's optional first line, for example `sep=;`."""


class Record(NamedTuple):
    """One row, or the column names."""

    fields: list[Any]
    line: int
    """First line of the record, from 1."""
    num_bytes: int


def read_delimited(path: Path, data: Data, span: Span | None = None) -> Iterator[Record]:
    """Yield the column names, then each row that is not blank. An empty file yields nothing.

    Unless `data.header` is first_line, columns are named by number, from 1. A part has the names of the file. It begins
    and ends where `record_edges` says.

    Raises:
        ValueError: a row has the wrong number of fields, or quotes do not close; the message names file and line.
    """
    num_bytes, where, is_first = 0, place(path, span), not (span and span[0])

    def read() -> Iterator[str]:
        nonlocal num_bytes
        for number, (line, line_bytes) in enumerate(read_lines(path, data, span)):
            num_bytes += line_bytes
            yield "\n" if is_first and number == 0 and _DELIMITER_LINE.fullmatch(line) else line

    has_quotes = quoting_of(path, data) == "csv"
    reader = csv.reader(
        read(),
        delimiter=delimiter_of(path, data),
        strict=True,
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
    )
    header: list[str] = []
    number = 1
    if not is_first:
        names = next(read_delimited(path, data))
        header = names.fields
        yield names
    try:
        for row in _with_long_fields(reader):
            if row and not header:
                is_named = data.header == "first_line"
                header = row if is_named else [str(column) for column in range(1, len(row) + 1)]
                yield Record(header, number, 0)
                # Otherwise, the line is not a row.
                row = row if data.header == "none" else []
            if row:
                if len(row) != len(header):
                    raise ValueError(
                        f"{where}:{number}: the row has {format_count(len(row), 'field')}, the header {len(header)} "
                        f"({', '.join(header)}); {_remedy(path, data, len(row), len(header))}"
                    )
                row_bytes, num_bytes = num_bytes, 0
                yield Record(row, number, row_bytes)
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{where}:{reader.line_num}: not csv ({error}); check the quotes near this line, or set data.quoting: none "
            "where they are characters of the text"
        ) from None


def record_edges(path: Path, data: Data, distance: int) -> list[int]:
    """Return the first and the last byte of a file, and where records begin at about each `distance` bytes.

    Reads all of a file with quotes, because a quoted field may hold line ends.
    """
    encoding, quoting = encoding_of(path, data), quoting_of(path, data)
    # A quote that follows a delimiter or a line end, or is the first sign. Others are signs of the text.
    opened = rf'"(?<![^\n{re.escape(delimiter_of(path, data))}]")'
    field = re.compile(rf'{opened}[^"]*+(?:""[^"]*+)*+"')
    edges, is_open = [0], False
    with path.open("rb") as file:
        lines = raw_lines(file, encoding)
        while raw := file.read(0 if is_open else distance) + next(lines, b""):
            if quoting == "csv":
                text = '"' * is_open + raw.decode(encoding, "replace").removeprefix("\ufeff"[len(edges) > 1 :])
                is_open = re.search(opened, field.sub("", text)) is not None
            if not is_open:
                edges.append(file.tell())
        return edges if edges[-1] == file.tell() else [*edges, file.tell()]


def _remedy(path: Path, data: Data, num_fields: int, num_columns: int) -> str:
    if next(read_lines(path, data), ("", 0))[0].startswith("#"):
        return "if the lines with # at the beginning are comments, remove them"
    if num_fields < num_columns:
        name = DELIMITERS.get(delimiter_of(path, data), "separators")
        return f"{name} are missing, or the row ends early; repair or drop it"
    return 'put quotes around a text that holds a separator or line end: "a, b"'


def quoting_of(path: Path, data: Data) -> Literal["csv", "none"]:
    """Return whether quotes delimit fields ("csv") or are characters of the text ("none").

    Returns `data.quoting` unless it is auto. With auto, only tab-separated files can return "none". They do if every
    line has the same number of tabs, and csv quoting fails or merges lines.
    """
    if data.quoting != "auto":
        return data.quoting
    if delimiter_of(path, data) != "\t":
        return "csv"
    status = path.stat()
    return _quoting_of_tabs(path, data.encoding, data.encoding_errors, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _quoting_of_tabs(
    path: Path, encoding: str, errors: Literal["strict", "replace"], mtime: int, size: int
) -> Literal["csv", "none"]:
    """Read the file and return its quoting. `mtime` and `size` are cache keys that change with the file."""
    data = Data(train=str(path), encoding=encoding, encoding_errors=errors)
    num_tabs, num_lines, has_quotes = set(), 0, False
    for line, _ in read_lines(path, data):
        has_quotes = has_quotes or '"' in line
        if line.strip("\r\n"):
            num_tabs.add(line.count("\t"))
            num_lines += 1
    if not has_quotes or len(num_tabs) != 1 or num_tabs == {0}:
        return "csv"
    rows = csv.reader((line for line, _ in read_lines(path, data)), delimiter="\t", strict=True)
    try:
        num_rows = sum(bool(row) for row in _with_long_fields(rows))
    except csv.Error:
        return "none"
    return "csv" if num_rows == num_lines else "none"


def _with_long_fields(reader: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the rows of a csv reader without a limit on field length.

    The csv module's limit of 128 KiB is shorter than many texts. The limit is global, so it is restored after each row.
    """
    while True:
        previous = csv.field_size_limit(sys.maxsize)
        try:
            row = next(reader)
        except StopIteration:
            return
        finally:
            csv.field_size_limit(previous)
        yield row


def delimiter_of(path: Path, data: Data) -> str:
    """Return the delimiter of a file: the first match of this list.

    - `data.delimiter`
    - a tab, for .tsv
    - the delimiter in Excel's `sep=` line
    - a delimiter that gives the first lines equal numbers of fields
    - the first delimiter in the header
    - a comma

    If several fit the lines, the first of comma, tab, semicolon and bar wins. A delimiter that is always followed by a
    space comes last, because prose looks like this.
    """
    if data.delimiter != "auto":
        return data.delimiter
    if path.suffix.lower() == ".tsv":
        return "\t"
    lines = [line for line, _ in islice(read_lines(path, data), _LINES_LOOKED_AT)]
    if lines and (named := _DELIMITER_LINE.fullmatch(lines[0])):
        return named[1]
    found = [each for each in DELIMITERS if _divides(lines, each)]
    # Delimiters of prose sort last.
    found.sort(key=lambda each: all(part.startswith(" ") for line in lines for part in line.split(each)[1:]))
    in_header = [each for each in DELIMITERS if lines and each in lines[0]]
    return next(iter([*found, *in_header]), ",")


def table_delimiter(path: Path, data: Data) -> str | None:
    """Return the name of a delimiter other than a comma if the file looks like a table, or None.

    A table has at least three lines, and its first lines have equal numbers of fields.
    """
    lines = [line for line, _ in islice(read_lines(path, data), _LINES_LOOKED_AT)]
    found = [name for each, name in DELIMITERS.items() if each != "," and _divides(lines, each)]
    return found[0] if found and len(lines) > 2 else None


def _divides(lines: list[str], delimiter: str) -> bool:
    """Return whether all rows have the same number of fields, at least two.

    The last line read is ignored at the limit, because a quoted text may continue after it.
    """
    try:
        rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except csv.Error:
        return False
    whole = rows[:-1] if len(lines) == _LINES_LOOKED_AT and len(rows) > 1 else rows
    return bool(whole) and len(whole[0]) > 1 and all(len(row) == len(whole[0]) for row in whole)


def why_header(path: Path, data: Data, columns: Sequence[str], classes: Mapping[str, Sequence[str]]) -> str | None:
    """Return why the first line of a file without a header holds column names all the same; or None.

    Args:
        columns: numbers of the columns that are read.
        classes: known classes by label column.
    """
    try:
        records = [record.fields for record in islice(read_delimited(path, data), 1, 2 + _ROWS_LOOKED_AT)]
    except ValueError:
        # The reader will report the row.
        return None
    first, *rows = [[cell.strip() for cell in fields] for fields in records] or [[]]
    below = {str(number): [*filter(None, cells)] for number, cells in enumerate(zip(*rows), start=1)}
    names = {str(number): name for number, name in enumerate(first, start=1) if name}
    if len({*names.values()}) < len(names) or not all(map(_NAME.fullmatch, names.values())):
        return None
    labels = [column for column in classes if column in names]
    if any(names[column] in classes[column] for column in labels):
        return None
    for column in labels:
        if below.get(column) and {*below[column]} <= {*classes[column]}:
            return f"{names[column]!r} is not a class, and the rows below have classes"
    for column, name in names.items():
        if len(below.get(column, ())) > 1 and all(map(is_number, below[column])):
            return f"the rows below {name!r} have numbers"
    defaults = columns_by_setting((name, field.default) for name, field in type(data).model_fields.items())
    texts = [column for column in columns if column in names and column not in classes]
    for column in texts:
        if any(names[column].lower() in usual for usual in defaults.values()):
            return f"{names[column]!r} is a usual name of a column"
    if (
        texts
        and len(rows) >= _FEWEST_ROWS
        and all(
            names[column].isidentifier() and min(len(cell.split()) for cell in below[column]) >= _FEWEST_WORDS
            for column in texts
        )
    ):
        return f"{names[texts[0]]!r} is one word, and the rows below have texts"
    return None


def columns_by_setting(settings: Iterable[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the columns that settings of a section name, by setting."""
    named = {name: value for name, value in settings if "_column" in name and value}
    return {name: value if isinstance(value, tuple) else (value,) for name, value in named.items()}


def read_label_lines(path: Path, data: Data) -> Iterator[Record]:
    """Yield label and text of each line that is not blank, by `data.lines`. For fasttext_multi, the label is a list.

    Raises:
        ValueError: a line has no label or no text; the message names file and line.
    """
    for number, (line, num_bytes) in enumerate(read_lines(path, data), start=1):
        words, line = line.split(), line.strip()
        if not words:
            continue
        if data.lines == "file_names":
            labels, text = [path.stem], line
        elif data.lines == "label_text":
            label, _, text = line.partition("\t" if "\t" in line else " ")
            labels = [label]
        else:
            labels = [word.removeprefix(FASTTEXT_PREFIX) for word in words if word.startswith(FASTTEXT_PREFIX)]
            text = " ".join(word for word in words if not word.startswith(FASTTEXT_PREFIX))
        where = f"{path}:{number}"
        if not labels or not text.strip():
            form = "LABEL TEXT" if data.lines == "label_text" else f"{FASTTEXT_PREFIX}LABEL TEXT"
            raise ValueError(
                f"{where}: the line has no {'text' if labels else 'label'}; data.lines={data.lines} reads {form}; "
                "repair or drop it"
            )
        if data.lines == "fasttext" and len(labels) > 1:
            raise ValueError(
                f"{where}: the line has {len(labels)} labels; set data.lines: fasttext_multi, to read several labels "
                f"per line"
            )
        yield Record([labels if data.lines == "fasttext_multi" else labels[0], text.strip()], number, num_bytes)
