"""A table's format (delimiter, header, encoding), and its columns (texts, numbers, labels, chats, images)."""

import csv
import glob
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from accel_train.core.json_io import nested
from accel_train.core.state import Choice, Choices
from accel_train.data.delimited import read_delimited
from accel_train.data.encoding import check_western, guess_encoding
from accel_train.data.images.images import IMAGE_SUFFIXES
from accel_train.data.labels import is_missing, label_name, means_missing
from accel_train.data.sources import Source, file_kind, resolve_sources
from accel_train.data.tables import LABEL_NAMES, Row, binary_value, class_names, column_names, json_rows, read_rows
from accel_train.experiments.finetune.recipe import Asked
from accel_train.recipe.data import Data

_CHAT_NAMES = ("messages", "conversation", "conversations", "chat", "dialog", "dialogue", "turns")
_ID_NAMES = ("id", "uid", "uuid", "guid", "asin", "isbn", "sku", "url", "key", "hash")
_MOST_CLASSES = 1000
_MOST_MISSING = 0.2
"""Maximum share of empty cells in a column of labels."""
_ROWS_LOOKED_AT = 200
_WORDS_OF_A_NAME = 5
_LEAST_NAMES = 0.9
"""Share of different cells, and of words with a capital, in a column of names."""
_WORDS_OF_TEXT = 3.0
"""Mean words per cell from which a column counts as text."""
_FEWEST_CODES = 10
_CODE = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w-]{3,}", re.ASCII)
"""Different codes (letters and digits: B000K2) from which they are ids of products or users, not classes."""
TAG = re.compile(r"O|[BIES]-\S+")
"""Tag of a word: B-PER, I-PER, O."""
_DATE = re.compile(
    r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}|"
    r"\d{1,2}[ -][A-Za-z]{3,9}\.?,?[ -]\d{2,4}|[A-Za-z]{3,9}\.? \d{1,2},? \d{4})"
    r"(?:[T ,]+\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?(?: ?[AaPp][Mm])?(?:Z|[ ]?[-+]\d{2}:?\d{2})?)?"
)


def words_of(name: str) -> list[str]:
    """Return the words of a column's name: isRejected and is_rejected have is and rejected."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z]+", "_", name).lower().strip("_").split("_")


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a table, with all its cells."""

    name: str
    cells: tuple[Any, ...]
    most_missing: float = _MOST_MISSING
    """Maximum share of empty cells in a column of labels. 1: rows with empty cells are left out."""

    @cached_property
    def is_strings(self) -> bool:
        """Return whether every cell is a string."""
        return all(isinstance(cell, str) for cell in self.cells)

    @cached_property
    def mean_words(self) -> float:
        """Return the mean number of words per cell."""
        return sum(len(str(cell).split()) for cell in self.cells) / len(self.cells)

    @cached_property
    def filled(self) -> list[Any]:
        """Return the cells that are not empty, or an empty list if too many are."""
        found = [cell for cell in self.cells if not is_missing(cell)]
        return found if len(self.cells) - len(found) <= self.most_missing * len(self.cells) else []

    @cached_property
    def values(self) -> list[Any]:
        """Return the filled cells. If each is a list or an object, or the text of one, they are returned as such."""
        found = self.filled
        if not found or nested(found[0]) is None:
            return found
        read = [nested(cell) for cell in found]
        return found if None in read else read

    @cached_property
    def classes(self) -> Counter[str]:
        """Return the counts of classes, if nearly every cell is a class name, a class number, or a list of them.

        Empty otherwise.
        """
        names: list[str | None] = []
        for cell in self.values:
            names += map(label_name, cell) if isinstance(cell, list) else [label_name(cell)]
        return Counter() if None in names or "" in names else Counter(name for name in names if name is not None)

    @cached_property
    def is_decimal(self) -> bool:
        """Return whether nearly every cell is a number, and at least one has a fraction."""
        cells = [cell for cell in self.filled if not (isinstance(cell, str) and means_missing(cell))]
        return bool(cells) and all(map(_is_number, cells)) and any(float(cell) % 1 for cell in cells)

    @cached_property
    def is_numbers(self) -> bool:
        """Return whether nearly every cell is a number."""
        return bool(self.filled) and all(isinstance(cell, bool) or _is_number(cell) for cell in self.filled)

    @cached_property
    def is_dates(self) -> bool:
        """Return whether nearly every cell is a date, perhaps with a time."""
        return bool(self.filled) and all(
            isinstance(cell, str) and _DATE.fullmatch(cell.strip()) for cell in self.filled
        )

    @cached_property
    def is_text(self) -> bool:
        """Return whether the cells are long enough to be texts."""
        is_long = self.is_strings and self.mean_words >= _WORDS_OF_TEXT and len(set(self.cells)) > 1
        return is_long and not self.is_dates and isinstance(next(iter(self.values), ""), str)

    @cached_property
    def is_names(self) -> bool:
        """Return whether nearly every cell is a name of a person, a place, or a product: few words with capitals."""
        words = [word for cell in self.cells for word in str(cell).split()]
        num_small = sum(word[0].islower() for word in words)
        are_different = len(set(self.cells)) > _LEAST_NAMES * len(self.cells)
        return are_different and self.mean_words <= _WORDS_OF_A_NAME and num_small <= (1 - _LEAST_NAMES) * len(words)

    @cached_property
    def may_be_labels(self) -> bool:
        """Return whether the column repeats a few values, and they are not ids: product_id, userID, B000K2."""
        if self.is_text or self.is_decimal or self.is_dates:
            return False
        *before, last = words_of(self.name)
        if last in _ID_NAMES and LABEL_NAMES.isdisjoint(before):
            return False
        classes = self.classes
        are_codes = len(classes) >= _FEWEST_CODES and all(map(_CODE.fullmatch, classes))
        return 2 <= len(classes) <= min(_MOST_CLASSES, classes.total() // 2) and not are_codes

    @cached_property
    def is_binary(self) -> bool:
        """Return whether nearly every cell is filled in, and these are all 0 or 1."""
        return bool(self.filled) and all(binary_value(cell) is not None for cell in self.filled)

    @cached_property
    def is_ids(self) -> bool:
        """Return whether every cell is one word, and all cells are different."""
        return self.is_strings and self.mean_words <= 1 and len(set(self.cells)) == len(self.cells) > 1

    @cached_property
    def keys(self) -> frozenset[str]:
        """Return the keys of the first mapping, if the cells are mappings or lists of mappings, also as text."""
        first = nested(next(filter(None, self.cells), None))
        each = first if isinstance(first, list) else [first]
        mappings = [mapping for mapping in each if isinstance(mapping, dict)]
        return frozenset(mappings[0]) if mappings and len(mappings) == len(each) else frozenset()

    @cached_property
    def is_chat(self) -> bool:
        """Return whether the cells are lists of messages: their keys, or the usual name and other keys."""
        is_list = bool(self.keys) and any(isinstance(cell, list) for cell in self.cells)
        keys_of = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
        return is_list and (any(keys <= self.keys for keys in keys_of) or self.has_chat_name)

    @cached_property
    def has_chat_name(self) -> bool:
        """Return whether the name is a usual one for chats."""
        return self.name.lower() in _CHAT_NAMES

    @cached_property
    def is_image(self) -> bool:
        """Return whether the cells are names of image files, or images as `datasets` stores them."""
        first = self.cells[0]
        if isinstance(first, dict):
            return "bytes" in first and "path" in first
        return self.is_strings and all(cell.lower().endswith(IMAGE_SUFFIXES) for cell in self.cells)


@dataclass(frozen=True)
class Table:
    """A table with all its rows in memory."""

    path: Path
    columns: Mapping[str, Column]
    wheres: Sequence[str]
    """File and line or row of each row."""
    settings: Choices
    """Settings that are needed to read the table."""
    notes: Sequence[str]
    partial: Mapping[str, str]
    """Columns that only some rows have, each with the file and line of a row without it."""
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Class names, by column, of columns with class ids, if the file stores the names."""

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    @property
    def names(self) -> str:
        """Return the names of the columns as a list in text."""
        return ", ".join(self.columns)

    @property
    def found(self) -> tuple[str, ...]:
        """Return the names of all columns, with those that only some rows have."""
        return (*self.columns, *self.partial)

    @property
    def each(self) -> list[Column]:
        """Return the columns."""
        return list(self.columns.values())

    @property
    def strings(self) -> list[Column]:
        """Return the columns of strings."""
        return [column for column in self.each if column.is_strings]


def objects(cell: object) -> list[Mapping[str, Any]]:
    """Return the objects in a list."""
    return [each for each in cell if isinstance(each, Mapping)] if isinstance(cell, list) else []


def mapping(cell: object) -> Mapping[str, Any]:
    """Return a cell that is an object, or an empty one."""
    return cell if isinstance(cell, Mapping) else {}


def files_at(path: Path) -> list[Path]:
    """Return the files that match the pattern of a path, sorted, or the path if it exists."""
    return [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))


def readings(path: Path, asked: Asked) -> Choices:
    """Return the settings that are needed to read a file, if they are not the defaults: encoding and header."""
    settings, data = Choices(), asked.data
    if "data.encoding" not in asked.given and file_kind(path) != "parquet":
        guess = guess_encoding(path, data.encoding_errors)
        if guess is not None:
            if not guess[0].startswith("utf-16"):
                check_western(path)
            settings["data.encoding"] = Choice(*guess)
            data = with_settings(data, settings)
    is_open = file_kind(path) == "csv" and "data.header" not in asked.given
    if is_open and (why := _missing_header(path, data)) is not None:
        settings["data.header"] = Choice("none", why)
    return settings


def data_at(path: Path, asked: Asked) -> Data:
    """Return the settings that read a file."""
    return with_settings(asked.data, readings(path, asked))


def with_settings(data: Data, settings: Choices) -> Data:
    """Return `data` with these settings of its section."""
    return data.model_copy(update={name.removeprefix("data."): choice.value for name, choice in settings.items()})


def read_table(path: Path, asked: Asked) -> Table:
    """Return every row of the columns that all rows have.

    Raises:
        ValueError: a row cannot be read, or the table has no rows. The message names the file and line.
    """
    settings = {} if path.is_dir() else readings(files_at(path)[0], asked)
    data = with_settings(asked.data, settings)
    (source,) = resolve_sources(str(path), data, key=str(path))
    # Spreadsheets end rows with unnamed columns.
    names = list(filter(None, column_names(source, data)))
    partial: dict[str, str] = {}
    is_json = file_kind(path) in ("jsonl", "json")
    rows = read_rows(source, names, data, json_rows(source.files, names, partial, data) if is_json else None)
    known = {name: found for name in names if (found := class_names(source, name)) is not None}
    table = table_of(path, names, rows, settings, source.notes, partial, known)
    columns = {name: column for name, column in table.columns.items() if name not in partial}
    if not columns:
        raise ValueError(f"{path}: no column is in every row. Write the same keys on each line")
    if not table.wheres:
        raise ValueError(f"{path} has no rows. Name a table with rows")
    return replace(table, columns=columns)


def table_of(path: Path, names: Sequence[str], rows: Iterable[Row], *facts: Any) -> Table:
    """Return a table of these rows. `facts` are the fields after `wheres`."""
    cells: list[list[Any]] = [[] for _ in names]
    wheres = []
    for row in rows:
        wheres.append(row.where)
        for column, cell in zip(cells, row.cells):
            column.append(cell)
    return Table(path, {name: Column(name, tuple(each)) for name, each in zip(names, cells)}, wheres, *facts)


def source_of(path: Path) -> Source:
    """Return one file as a source."""
    return Source(str(path), str(path), (path,))


def _missing_header(path: Path, data: Data) -> str | None:
    """Return why the first row of a file is not a header, or None if it may be one."""
    try:
        records = islice(read_delimited(path, data.model_copy(update={"header": "none"})), 1 + _ROWS_LOOKED_AT)
        rows = [record.fields for record in records][1:]
    except (ValueError, csv.Error):
        # The reader will report the row.
        return None
    if len(rows) < 2 or all(field == str(number) for number, field in enumerate(filter(None, rows[0]))):
        # Numbers in order are the column names that pandas writes.
        return None
    # A header may be repeated. A row of data repeats, but its label also stands in other rows.
    rows[1:] = [row for row in rows[1:] if row != rows[0]]
    for number, cell in enumerate(rows[0]):
        if cell and _is_number(cell):
            return f"the first row holds the number {cell}, not the name of a column"
        if len(cell.split()) > _WORDS_OF_A_NAME:
            return f"the first row holds a text of {len(cell.split())} words, not the name of a column"
        if cell and any(row[number] == cell for row in rows[1:]) and len(rows[0]) > 1:
            return f"{cell!r} in the first row appears again in later rows, so it is not a column name"
    return None


def _is_number(cell: Any) -> bool:
    try:
        return isinstance(cell, str | int | float) and not isinstance(cell, bool) and math.isfinite(float(cell))
    except (ValueError, OverflowError):
        return False
