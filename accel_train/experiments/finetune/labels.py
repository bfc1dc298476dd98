"""The column of labels, the names of its values, and the count of each value."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.state import Choice
from accel_train.data.encoding import read_lines
from accel_train.data.labels import is_missing, label_scheme, several_in_one
from accel_train.experiments.finetune.columns import Column, Table
from accel_train.experiments.finetune.found import Asked
from accel_train.recipe.data import Data

_USUAL = "label labels class category target sentiment intent topic genre stars rating tag y"
_LABEL_NAMES = frozenset(_USUAL.split())
NAME_FILES = ("classes.txt", "labels.txt", "label_names.txt")


class Label(NamedTuple):
    """The column of labels."""

    name: str
    settings: Mapping[str, Choice[Any]]
    counts: Mapping[str, int]
    """Rows of each class. Empty for a regression."""
    is_one: bool = False
    """Whether each row has exactly one label instead of a list."""
    num_dropped: int = 0
    """Number of left-out rows without a label."""


def recognise_label(asked: Asked, table: Table, *used: str, may_drop: bool = True) -> Label:
    """Return the label column among columns that are not `used`. `may_drop`: the task supports `data.missing_labels`.

    Raises:
        ValueError: no column or several columns may be the label, or a row has a missing or wrong label. The message
            names the row or shows the flag.
    """
    column, why = _label_of(asked, table, *used)
    drops = asked.data.missing_labels == "drop"
    if (
        asked.label is None
        and column.name not in table.class_names
        and (names := _names_beside(table, column, used)) is not None
    ):
        column, why = names, f"it names the numbers in column {column.name!r}, one by one"
    settings: dict[str, Choice[Any]] = {"data.label_column": Choice(column.name, why)}
    kept = [row for row, cell in enumerate(column.cells) if not (may_drop and drops and is_missing(cell))]
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
        may_drop=may_drop,
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
            f"with {several[1]} ({several[0]!r}), and each combination would be a class. Write lists of names, "
            "in a .jsonl or .parquet file; or keep the combinations: --model.problem_type single_label"
        )
    if scheme.problem_type == "multi_label":
        counts = dict(zip(scheme.names, map(int, encoded.sum(0))))
    else:
        counts = {scheme.names[number]: count for number, count in sorted(Counter(encoded.tolist()).items())}
    _check_classes(asked, table, column, counts)
    return Label(column.name, settings, counts, scheme.problem_type == "single_label", dropped)


def _label_of(asked: Asked, table: Table, *used: str) -> tuple[Column, str]:
    others = [column for column in table.columns.values() if column.name not in used]
    if asked.label is not None:
        return table[asked.label], "as --label says"
    for name, where in table.partial.items():
        if name.lower() in _LABEL_NAMES:
            raise ValueError(
                f"{where} has no {name!r}, which other rows have; fill it in, drop the row, or name another column: "
                "--label COLUMN"
            )
    for names in (("label",), _LABEL_NAMES):
        named = [column for column in others if column.name.lower() in names]
        if len(named) == 1:
            return named[0], "its name"
        if named:
            break
    likely = named or [column for column in others if column.may_be_labels]
    if len(likely) == 2 and _are_the_same(*likely):
        likely = [column for column in likely if _are_integers(column)] or likely[:1]
    if len(likely) == 1:
        return likely[0], f"the only column of few values: {len(likely[0].classes)} in {len(likely[0].cells):,} rows"
    if likely:
        some = [f"--label {column.name}" for column in likely]
        is_several = all({*column.classes} <= {"0", "1"} for column in likely)
        also = (
            "; to predict all at once, write one column with the list of those that are 1, in a .jsonl file"
            if is_several
            else ""
        )
        raise ValueError(f"{table.path}: {len(likely)} columns may be the label; choose one: {' or '.join(some)}{also}")
    decimal = [column for column in others if column.is_decimal]
    if len(decimal) == 1:
        return decimal[0], "the only column of decimal numbers"
    there = f"there are {', '.join(column.name for column in others)}" if others else "there is no other column"
    there += f"; not in all rows: {', '.join(table.partial)}" if table.partial else ""
    raise ValueError(
        f"{table.path}: no column looks like a label beside {', '.join(used)} ({there}); name it: --label COLUMN; "
        f"or --task causal-lm --text {used[0]} for a language model of the texts"
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
    return bool(column.classes) and all(name.removeprefix("-").isdecimal() for name in column.classes)


def _with_names(asked: Asked, table: Table, label: Column, settings: dict[str, Choice[Any]]) -> int:
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
            "too many for labels; name another: --label COLUMN; or for numbers to predict: "
            "--model.problem_type regression"
        )
