"""A table's format (delimiter, header, encoding) and its columns: texts, labels, numbers, chats, or images."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.state import Choice
from accel_train.data.delimited import read_delimited
from accel_train.data.encoding import check_western, guess_encoding
from accel_train.data.images.images import IMAGE_SUFFIXES
from accel_train.data.labels import is_missing, label_name
from accel_train.data.sources import Source, file_kind, resolve_sources
from accel_train.data.tables import class_names, column_names, read_rows, shared_keys
from accel_train.recipe.data import Data

_MOST_CLASSES = 1000
_MOST_MISSING = 0.2
"""Maximum share of empty cells in a column of labels."""
_ROWS_LOOKED_AT = 200
_WORDS_OF_A_NAME = 5
_WORDS_OF_TEXT = 3.0
"""Mean words per cell from which a column counts as text."""


class Column(NamedTuple):
    """A column of a table, with all its cells."""

    name: str
    cells: tuple[Any, ...]

    @property
    def is_strings(self) -> bool:
        """Return whether every cell is a string."""
        return all(isinstance(cell, str) for cell in self.cells)

    @property
    def mean_words(self) -> float:
        """Return the mean number of words per cell."""
        return sum(len(str(cell).split()) for cell in self.cells) / len(self.cells)

    @property
    def classes(self) -> Counter[str]:
        """Return the counts of classes, if nearly every cell is a class name, a class number, or a list of them.

        Empty otherwise.
        """
        names: list[str | None] = []
        present = [cell for cell in self.cells if not is_missing(cell)]
        for cell in present:
            names += map(label_name, cell) if isinstance(cell, list) else [label_name(cell)]
        if None in names or "" in names or len(self.cells) - len(present) > _MOST_MISSING * len(self.cells):
            return Counter()
        return Counter(name for name in names if name is not None)

    @property
    def is_decimal(self) -> bool:
        """Return whether every cell is a number, and at least one has decimals."""
        try:
            numbers = [float(cell) for cell in self.cells if not isinstance(cell, bool)]
        except (TypeError, ValueError):
            return False
        is_float = any(isinstance(cell, float) for cell in self.cells)
        return len(numbers) == len(self.cells) and (is_float or any(number % 1 for number in numbers))

    @property
    def is_numbers(self) -> bool:
        """Return whether every cell is a number."""
        return all(isinstance(cell, int | float) or (isinstance(cell, str) and _is_number(cell)) for cell in self.cells)

    @property
    def is_text(self) -> bool:
        """Return whether the cells are long enough to be texts."""
        return self.is_strings and self.mean_words >= _WORDS_OF_TEXT and len(set(self.cells)) > 1

    @property
    def may_be_labels(self) -> bool:
        """Return whether the column repeats a few values."""
        if self.is_text or self.is_decimal:
            return False
        return 2 <= len(self.classes) <= min(_MOST_CLASSES, len(self.cells) // 2)

    @property
    def is_ids(self) -> bool:
        """Return whether every cell is one word, and all cells are different."""
        return self.is_strings and self.mean_words <= 1 and len(set(self.cells)) == len(self.cells) > 1

    @property
    def is_chat(self) -> bool:
        """Return whether the cells are lists of messages."""
        first = next(filter(None, self.cells), None)
        return isinstance(first, list) and all(isinstance(each, dict) for each in first)

    @property
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
    settings: Mapping[str, Choice[Any]]
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


def readings(path: Path, data: Data, given: frozenset[str]) -> dict[str, Choice[Any]]:
    """Return the settings that are needed to read a file, if they are not the defaults: encoding and header."""
    settings: dict[str, Choice[Any]] = {}
    if "data.encoding" not in given and file_kind(path) != "parquet":
        guess = guess_encoding(path, data.encoding_errors)
        if guess is not None:
            if not guess[0].startswith("utf-16"):
                check_western(path)
            settings["data.encoding"] = Choice(*guess)
            data = data.model_copy(update={"encoding": guess[0]})
    if file_kind(path) == "csv" and "data.header" not in given and (why := _missing_header(path, data)) is not None:
        settings["data.header"] = Choice("none", why)
    return settings


def with_settings(data: Data, settings: Mapping[str, Choice[Any]]) -> Data:
    """Return `data` with these settings of its section."""
    return data.model_copy(update={name.removeprefix("data."): choice.value for name, choice in settings.items()})


def read_table(path: Path, data: Data, given: frozenset[str]) -> Table:
    """Return every row of the columns that all rows have.

    Raises:
        ValueError: a row cannot be read, or the table has no rows. The message names the file and line.
    """
    settings = readings(path, data, given)
    data = with_settings(data, settings)
    (source,) = resolve_sources(str(path), data, key=str(path))
    names, partial = (
        shared_keys(path, data) if file_kind(path) in ("jsonl", "json") else (column_names(source, data), {})
    )
    # Spreadsheets end rows with unnamed columns.
    names = [name for name in names if name]
    if not names:
        raise ValueError(f"{path}: no column is in every row; write the same keys on each line")
    rows = list(read_rows(source, names, data))
    if not rows:
        raise ValueError(f"{path} holds no rows; name a table that has some")
    columns = {name: Column(name, cells) for name, cells in zip(names, zip(*(row.cells for row in rows)))}
    notes = [f"column {name!r} is left out: {where} has none" for name, where in partial.items()]
    known = {name: found for name in names if (found := class_names(source, name)) is not None}
    return Table(path, columns, [row.where for row in rows], settings, [*source.notes, *notes], partial, known)


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
    for number, cell in enumerate(rows[0]):
        if cell and _is_number(cell):
            return f"the first row holds the number {cell}, which is no name of a column"
        if len(cell.split()) > _WORDS_OF_A_NAME:
            return f"the first row holds a text of {len(cell.split())} words, which is no name of a column"
        if cell and any(row[number] == cell for row in rows[1:]) and len(rows[0]) > 1:
            return f"{cell!r} of the first row comes again in later rows, so it is no name of a column"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
