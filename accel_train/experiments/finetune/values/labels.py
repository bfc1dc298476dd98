"""The label column of a table, or several columns of 0 and 1: found by names and values, or refused with the flag."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from accel_train.core.state import Choice, Choices
from accel_train.data.encoding import read_lines
from accel_train.data.labels import (
    CLASSES_SHOWN,
    class_doubts,
    columns_scheme,
    is_missing,
    is_whole_number,
    label_scheme,
    refuse_objects,
)
from accel_train.data.tables import LABEL_NAMES
from accel_train.experiments.finetune.columns import Column, Table
from accel_train.experiments.finetune.recipe import Asked, listed
from accel_train.recipe.data import Data

NAME_FILES = ("classes.txt", "labels.txt", "label_names.txt")
_FEWEST_BINARY = 3
"""Columns of 0 and 1 from which they are taken for one multi-label problem."""


class Label(NamedTuple):
    """The column of labels, or several columns of 0 and 1."""

    name: str
    settings: Choices
    counts: Mapping[str, int]
    """Rows of each class. Empty for a regression."""
    is_one: bool
    """Whether each row has exactly one label instead of a list."""
    num_dropped: int
    """Number of left-out rows without a label."""


def recognise_label(asked: Asked, table: Table, *used: str, is_text: bool = True) -> Label:
    """Return the label column, or several, among columns that are not `used`.

    Only text classification (`is_text`) has `data.label_columns` and `data.missing_labels`.

    Raises:
        ValueError: no column or several columns may be the label, or a row has a missing or wrong label. The message
            names the row or shows the flag.
    """
    drops = is_text and asked.data.missing_labels != "error"
    if drops:
        # None stands for the words for a missing label, and any share of cells may be empty.
        words = asked.data.words_for_missing
        columns_without = {
            name: Column(name, tuple(None if is_missing(cell, words) else cell for cell in each.cells), most_missing=1)
            for name, each in table.columns.items()
        }
        table = replace(table, columns=columns_without)
    columns, why = _labels_of(asked, table, *used, is_text=is_text)
    if len(columns) > 1:
        return _binary_labels(asked, table, columns, why)
    (column,) = columns
    if (
        not asked.label
        and column.name not in table.class_names
        and (names := _names_beside(table, column, used)) is not None
    ):
        column, why = names, f"it has one name for each number in column {column.name!r}"
    settings: Choices = {"data.label_column": Choice(column.name, why)}
    kept: Sequence[int] = range(len(column.cells))
    if drops:
        kept = [row for row in kept if not is_missing(column.cells[row])]
    dropped = len(column.cells) - len(kept)
    if dropped:
        column = Column(column.name, tuple(column.cells[row] for row in kept))

    def where(row: int) -> str:
        return table.wheres[kept[row]]

    first = _with_names(asked, table, column, settings)
    scheme = label_scheme(
        column.cells,
        where,
        column=column.name,
        problem_type=asked.problem_type,
        label_names=settings["data.label_names"].value if "data.label_names" in settings else asked.data.label_names,
        feature_names=table.class_names.get(column.name),
        first_id=first,
        may_drop=is_text,
    )
    encoded = scheme.encode(column.cells, where)
    if scheme.problem_type == "regression":
        if asked.problem_type == "auto":
            settings["model.problem_type"] = Choice("regression", scheme.reason)
        return Label(column.name, settings, {}, False, dropped)
    if scheme.problem_type == "multi_label":
        counts = dict(zip(scheme.names, map(int, encoded.sum(0))))
    else:
        counts = {scheme.names[number]: count for number, count in sorted(Counter(encoded.tolist()).items())}
    is_open = asked.problem_type == "auto" and "data.label_names" not in asked.given
    if is_open and scheme.problem_type == "single_label" and not scheme.are_ids:
        _refuse_doubts(table, column, counts, is_text=is_text)
    if len(counts) > max(2, len(kept) // 2) and "data.label_names" not in asked.given:
        raise ValueError(
            f"{table.path}: column {column.name!r} has {len(counts):,} different values in {len(kept):,} rows, "
            "too many for labels. Name another column: --label COLUMN; or predict numbers: "
            "--model.problem_type regression"
        )
    return Label(column.name, settings, counts, scheme.problem_type == "single_label", dropped)


def _refuse_doubts(table: Table, label: Column, counts: Mapping[str, int], *, is_text: bool) -> None:
    """Raise ValueError if the classes are probably something else. The message shows the flags for both readings."""
    keep = "--model.problem_type single_label"
    if not is_text:
        names = json.dumps(list(counts), ensure_ascii=False) if len(counts) <= CLASSES_SHOWN else "NAMES"
        keep = f"--data.label_names {quote(names)}"
    for problem, remedy, (setting, value), is_question in class_doubts(counts):
        # An image has one class and no number, and `data.missing_labels` is for texts.
        if is_question and (is_text or setting != "model.problem_type"):
            flag = f": --{setting} {quote(value)}" if setting and is_text else ""
            raise ValueError(
                f"{table.path}: column {label.name!r}: {problem}. {remedy}{flag}; or keep the classes as they are: "
                f"{keep}"
            )


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
    cells, where = [rows[row] for row in kept], [table.wheres[row] for row in kept].__getitem__
    scheme = columns_scheme(cells, where, names)
    encoded = scheme.encode(cells, where)
    if kept and (encoded.sum(1) == 1).all():
        why += "; every row has exactly one 1: a column of class names would train a model that chooses one"
    counts = dict(zip(names, map(int, encoded.sum(0))))
    return Label(listed(names), {"data.label_columns": Choice(names, why)}, counts, False, len(rows) - len(kept))


def _adjacent_binary(table: Table, likely: Sequence[Column]) -> list[Column]:
    """Return the adjacent columns of 0 and 1 that contain all `likely` columns, or an empty list."""
    columns = table.each
    first, last = (columns.index(column) for column in (likely[0], likely[-1]))
    # At the edges, a column of zeros is a rare label.
    while first > 0 and columns[first - 1].is_binary:
        first -= 1
    while last + 1 < len(columns) and columns[last + 1].is_binary:
        last += 1
    group = columns[first : last + 1]
    return group if all(column.is_binary for column in group) else []


def _labels_of(asked: Asked, table: Table, *used: str, is_text: bool) -> tuple[list[Column], str]:
    others = [column for column in table.each if column.name not in used]
    if len(asked.label) > 1 and not is_text:
        raise ValueError(f"--label {','.join(asked.label)}: an image has one label. Name one column")
    if asked.label:
        return [table[name] for name in asked.label], "from --label"
    for name, where in table.partial.items():
        if name.lower() in LABEL_NAMES:
            raise ValueError(
                f"{where} does not have {name!r}, but other rows do. Fill it in, drop the row, or name another column: "
                "--label COLUMN"
            )
    for names in (("label",), LABEL_NAMES):
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
        also = f"; or predict {how_many} together: --label {both}" if is_open and len(binary) > 1 else ""
        raise ValueError(f"{table.path}: {len(likely)} columns may be the label. Choose one: {' or '.join(some)}{also}")
    decimal = [column for column in others if column.is_decimal]
    if len(decimal) == 1:
        return decimal, "the only column of decimal numbers"
    for column in others:
        refuse_objects(column.filled, column.name, str(table.path))
        whole = replace(column, most_missing=1)
        if not column.filled and is_text and (whole.is_decimal or whole.may_be_labels):
            raise ValueError(
                f"{table.path}: column {column.name!r} may be the label, and it is empty in "
                f"{len(column.cells) - len(whole.filled):,} of {len(column.cells):,} rows. To leave these rows out: "
                f"--data.missing_labels drop; or name another column: --label COLUMN"
            )
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
    others = [column for column in table.each if column.name not in (label.name, *used)]
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
    return bool(column.classes) and all(map(is_whole_number, column.classes))


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
        numbers = {int(float(number)) for number in label.classes}
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
