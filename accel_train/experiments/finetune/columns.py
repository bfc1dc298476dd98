"""A table's format (delimiter, header, encoding), its columns (texts, numbers, chats, images), and its labels."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from accel_train.core.format import is_whole
from accel_train.core.state import Choice
from accel_train.data.delimited import read_delimited
from accel_train.data.encoding import check_western, guess_encoding, read_lines
from accel_train.data.images.images import IMAGE_SUFFIXES
from accel_train.data.labels import (
    binary_value,
    columns_scheme,
    is_missing,
    label_name,
    label_scheme,
    several_in_one,
)
from accel_train.data.sources import Source, file_kind, resolve_sources
from accel_train.data.tables import class_names, column_names, read_rows, shared_keys
from accel_train.experiments.finetune.recipe import Asked, Choices, listed
from accel_train.recipe.data import Data

_USUAL = "label labels class category target sentiment intent topic genre stars rating tag y"
_LABEL_NAMES = frozenset(_USUAL.split())
NAME_FILES = ("classes.txt", "labels.txt", "label_names.txt")


_MOST_CLASSES = 1000
_MOST_MISSING = 0.2
"""Maximum share of empty cells in a column of labels."""
_ROWS_LOOKED_AT = 200
_FEWEST_BINARY = 3
"""Columns of 0 and 1 from which they are taken for one multi-label problem."""
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
    def is_binary(self) -> bool:
        """Return whether nearly every cell is filled in, and these are all 0 or 1."""
        present = [cell for cell in self.cells if not is_missing(cell)]
        is_filled = len(self.cells) - len(present) <= _MOST_MISSING * len(self.cells)
        return is_filled and all(binary_value(cell) is not None for cell in present)

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


def files_at(path: Path) -> list[Path]:
    """Return the files that match the pattern of a path, sorted, or the path if it exists."""
    return [path] if path.exists() else sorted(path.parent.glob(path.name))


def readings(path: Path, data: Data, given: frozenset[str]) -> Choices:
    """Return the settings that are needed to read a file, if they are not the defaults: encoding and header."""
    settings: Choices = {}
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


def with_settings(data: Data, settings: Choices) -> Data:
    """Return `data` with these settings of its section."""
    return data.model_copy(update={name.removeprefix("data."): choice.value for name, choice in settings.items()})


def read_table(path: Path, data: Data, given: frozenset[str]) -> Table:
    """Return every row of the columns that all rows have.

    Raises:
        ValueError: a row cannot be read, or the table has no rows. The message names the file and line.
    """
    settings = {} if path.is_dir() else readings(files_at(path)[0], data, given)
    data = with_settings(data, settings)
    (source,) = resolve_sources(str(path), data, key=str(path))
    names, partial = (
        shared_keys(source.files, data) if file_kind(path) in ("jsonl", "json") else (column_names(source, data), {})
    )
    # Spreadsheets end rows with unnamed columns.
    names = [name for name in names if name]
    if not names:
        raise ValueError(f"{path}: no column is in every row. Write the same keys on each line")
    rows = list(read_rows(source, names, data))
    if not rows:
        raise ValueError(f"{path} has no rows. Name a table with rows")
    columns = {name: Column(name, cells) for name, cells in zip(names, zip(*(row.cells for row in rows)))}
    known = {name: found for name in names if (found := class_names(source, name)) is not None}
    return Table(path, columns, [row.where for row in rows], settings, source.notes, partial, known)


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
            return f"the first row holds the number {cell}, not the name of a column"
        if len(cell.split()) > _WORDS_OF_A_NAME:
            return f"the first row holds a text of {len(cell.split())} words, not the name of a column"
        if cell and any(row[number] == cell for row in rows[1:]) and len(rows[0]) > 1:
            return f"{cell!r} in the first row appears again in later rows, so it is not a column name"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Label(NamedTuple):
    """The column of labels, or several columns of 0 and 1."""

    name: str
    settings: Choices
    counts: Mapping[str, int]
    """Rows of each class. Empty for a regression."""
    is_one: bool = False
    """Whether each row has exactly one label instead of a list."""
    num_dropped: int = 0
    """Number of left-out rows without a label."""


def recognise_label(asked: Asked, table: Table, *used: str, is_text: bool = True) -> Label:
    """Return the label column, or several, among columns that are not `used`.

    Only text classification (`is_text`) has `data.label_columns` and `data.missing_labels`.

    Raises:
        ValueError: no column or several columns may be the label, or a row has a missing or wrong label. The message
            names the row or shows the flag.
    """
    columns, why = _labels_of(asked, table, *used, is_text=is_text)
    if len(columns) > 1:
        return _binary_labels(asked, table, columns, why)
    (column,) = columns
    drops = asked.data.missing_labels == "drop"
    if (
        not asked.label
        and column.name not in table.class_names
        and (names := _names_beside(table, column, used)) is not None
    ):
        column, why = names, f"it has one name for each number in column {column.name!r}"
    settings: Choices = {"data.label_column": Choice(column.name, why)}
    kept = [row for row, cell in enumerate(column.cells) if not (is_text and drops and is_missing(cell))]
    dropped = len(column.cells) - len(kept)
    column = Column(column.name, tuple(column.cells[row] for row in kept))
    wheres = [table.wheres[row] for row in kept]
    first = _with_names(asked, table, column, settings)
    scheme = label_scheme(
        column.cells,
        lambda index: wheres[index],
        column=column.name,
        problem_type=asked.problem_type,
        label_names=settings["data.label_names"].value if "data.label_names" in settings else asked.data.label_names,
        feature_names=table.class_names.get(column.name),
        first_id=first,
        may_drop=is_text,
    )
    encoded = scheme.encode(column.cells, lambda index: wheres[index])
    if scheme.problem_type == "regression":
        if asked.problem_type == "auto":
            settings["model.problem_type"] = Choice("regression", scheme.reason)
        return Label(column.name, settings, {}, num_dropped=dropped)
    several = (
        several_in_one(scheme.names) if scheme.problem_type == "single_label" and asked.problem_type == "auto" else None
    )
    if several is not None and not scheme.are_ids:
        raise ValueError(
            f"{table.path}: column {column.name!r} holds several labels in one cell, "
            f"with {several[1]} ({several[0]!r}), so each combination would become a class. Write lists of names "
            "in a .jsonl or .parquet file; or keep the combinations: --model.problem_type single_label"
        )
    if scheme.problem_type == "multi_label":
        counts = dict(zip(scheme.names, map(int, encoded.sum(0))))
    else:
        counts = {scheme.names[number]: count for number, count in sorted(Counter(encoded.tolist()).items())}
    _check_classes(asked, table, column, counts)
    return Label(column.name, settings, counts, scheme.problem_type == "single_label", dropped)


def _binary_labels(asked: Asked, table: Table, columns: Sequence[Column], why: str) -> Label:
    """Return the labels of columns of 0 and 1.

    Raises:
        ValueError: a cell is empty or another value. The message names the row and the column.
    """
    names = [column.name for column in columns]
    rows = list(zip(*(column.cells for column in columns)))
    kept = [
        row for row, cells in enumerate(rows) if asked.data.missing_labels == "error" or not any(map(is_missing, cells))
    ]
    cells, wheres = [rows[row] for row in kept], [table.wheres[row] for row in kept]
    scheme = columns_scheme(cells, lambda index: wheres[index], names)
    encoded = scheme.encode(cells, lambda index: wheres[index])
    if kept and (encoded.sum(1) == 1).all():
        why += "; every row has exactly one 1: a column of class names would train a model that chooses one"
    counts = dict(zip(names, map(int, encoded.sum(0))))
    return Label(listed(names), {"data.label_columns": Choice(names, why)}, counts, False, len(rows) - len(kept))


def _adjacent_binary(table: Table, likely: Sequence[Column]) -> list[Column]:
    """Return the adjacent columns of 0 and 1 that contain all `likely` columns, or an empty list."""
    columns = list(table.columns.values())
    first, last = (columns.index(column) for column in (likely[0], likely[-1]))
    # At the edges, a column of zeros is a rare label.
    while first > 0 and columns[first - 1].is_binary:
        first -= 1
    while last + 1 < len(columns) and columns[last + 1].is_binary:
        last += 1
    group = columns[first : last + 1]
    return group if all(column.is_binary for column in group) else []


def _labels_of(asked: Asked, table: Table, *used: str, is_text: bool) -> tuple[list[Column], str]:
    others = [column for column in table.columns.values() if column.name not in used]
    if len(asked.label) > 1 and not is_text:
        raise ValueError(f"--label {','.join(asked.label)}: an image has one label. Name one column")
    if asked.label:
        return [table[name] for name in asked.label], "from --label"
    for name, where in table.partial.items():
        if name.lower() in _LABEL_NAMES:
            raise ValueError(
                f"{where} does not have {name!r}, but other rows do. Fill it in, drop the row, or name another column: "
                "--label COLUMN"
            )
    for names in (("label",), _LABEL_NAMES):
        named = [column for column in others if column.name.lower() in names]
        if len(named) == 1:
            return named, "its name"
        if named:
            break
    likely = named or [column for column in others if column.may_be_labels]
    if len(likely) == 2 and _are_the_same(*likely):
        likely = [column for column in likely if _are_integers(column)] or likely[:1]
    if len(likely) == 1:
        return likely, f"the only column with few values: {len(likely[0].classes)} in {len(likely[0].cells):,} rows"
    if likely:
        binary = [column for column in likely if is_text and column.is_binary]
        is_open = asked.problem_type in ("auto", "multi_label") and "data.label_names" not in asked.given
        are_alone = not named and len(binary) == len(likely) >= _FEWEST_BINARY
        if is_open and are_alone and (group := _adjacent_binary(table, likely)):
            one = quote(group[0].name)
            return group, f"{len(group)} adjacent columns hold only 0 and 1; for one of them: --label {one}"
        some = [f"--label {quote(column.name)}" for column in likely]
        both = quote(",".join(column.name for column in binary))
        how_many = "both" if len(binary) == 2 else f"the {len(binary)} columns of 0 and 1"
        also = f"; or predict {how_many} together: --label {both}" if len(binary) > 1 else ""
        raise ValueError(f"{table.path}: {len(likely)} columns may be the label. Choose one: {' or '.join(some)}{also}")
    decimal = [column for column in others if column.is_decimal]
    if len(decimal) == 1:
        return decimal, "the only column of decimal numbers"
    there = f"other columns: {', '.join(column.name for column in others)}" if others else "the only column in all rows"
    there += f"; only in some rows: {', '.join(table.partial)}" if table.partial else ""
    raise ValueError(
        f"{table.path}: no column next to {', '.join(used)} looks like a label ({there}). Name it: --label COLUMN; "
        f"or train a language model of the texts: --task causal-lm --text {used[0]}"
    )


def _names_beside(table: Table, label: Column, used: tuple[str, ...]) -> Column | None:
    """Return the column with a name for each number of the label, or None."""
    if not _are_integers(label):
        return None
    others = [column for column in table.columns.values() if column.name not in (label.name, *used)]
    named = [
        column
        for column in others
        if column.is_strings and "" not in column.cells and not _are_integers(column) and _are_the_same(label, column)
    ]
    return named[0] if len(named) == 1 and len(set(label.cells)) < len(label.cells) else None


def _are_the_same(one: Column, other: Column) -> bool:
    """Return whether the values of two columns correspond one to one."""
    try:
        pairs = set(zip(one.cells, other.cells))
        return len(pairs) == len(set(one.cells)) == len(set(other.cells))
    # Lists cannot be hashed.
    except TypeError:
        return False


def _are_integers(column: Column) -> bool:
    return bool(column.classes) and all(map(is_whole, column.classes))


def _with_names(asked: Asked, table: Table, label: Column, settings: Choices) -> int:
    """Add label names from a file next to the table if the labels are numbers. Return the first class's number."""
    if (
        not _are_integers(label)
        or label.name in table.class_names
        or {"data.label_names", "data.label_ids_from"} & asked.given
    ):
        return asked.data.label_ids_from
    for name in NAME_FILES:
        path = table.path.with_name(name)
        if not path.is_file():
            continue
        names = names_in(path, asked.data)
        numbers = {int(number) for number in label.classes}
        for first in (0, 1):
            if (
                len(set(names)) == len(names) > 1
                and numbers <= set(range(first, first + len(names)))
                and max(numbers) >= len(names) - 1
            ):
                settings["data.label_names"] = Choice(names, f"the lines of {path}")
                if first:
                    settings["data.label_ids_from"] = Choice(first, f"column {label.name!r} counts from {first}")
                return first
    return 0


def names_in(path: Path, data: Data) -> list[str]:
    """Return the names of classes in a file, one a line."""
    return [line.strip() for line, _ in read_lines(path, data) if line.strip()]


def _check_classes(asked: Asked, table: Table, label: Column, counts: Mapping[str, int]) -> None:
    """Raise ValueError if the label differs in nearly every row."""
    num_rows = len(label.cells)
    if len(counts) > max(2, num_rows // 2) and "data.label_names" not in asked.given:
        raise ValueError(
            f"{table.path}: column {label.name!r} has {len(counts):,} different values in {num_rows:,} rows, "
            "too many for labels. Name another column: --label COLUMN; or predict numbers: "
            "--model.problem_type regression"
        )
