"""Turn the cells of a label column into training labels: class ids, sets of class ids, or numbers."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from accel_train.core.format import did_you_mean, is_whole
from accel_train.data.tables import show_cell

# Label of a position or sample without a label. Cross-entropy and metrics ignore it.
IGNORED_LABEL = -100

CLASSES_SHOWN = 12
"""Most classes that a message lists one by one."""
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_BINARY = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_NO_LABEL = "the row has no label; fill it in, or drop the row"

ProblemType = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True)
class LabelScheme:
    """The meaning of a data set's labels."""

    problem_type: ProblemType
    names: tuple[str, ...]
    """Class names in the order of their ids. For regression, the name of the number."""
    column: str
    are_ids: bool
    """Whether integers in the column are ids of `names`. If False, they are names."""
    reason: str
    first_id: int = 0
    """Number of the first class if labels are ids (`data.label_ids_from`)."""
    id_names: tuple[str, ...] = ()
    """Class names in the order of the column's ids, if that order differs from `names`."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on how values in the column were interpreted."""
    columns: tuple[str, ...] = ()
    """Columns of 0 and 1 (`data.label_columns`), which are `names`. A row's label is then a tuple of their cells."""

    def encode(self, values: Sequence[Any], where: Callable[[int], str]) -> NDArray[Any]:
        """Return the labels of rows: (N,) int64 ids, (N, C) fp32 zeros and ones, or (N,) fp32 numbers.

        A scheme without a column is for rows to predict and returns -100, rows of -1, or NaN. `where` names a row.

        Raises:
            ValueError: a label has the wrong type or is not in `names`; the message names row, column and value.
        """
        unknown, dtype = {
            "single_label": (IGNORED_LABEL, np.int64),
            "multi_label": (-1.0, np.float32),
            "regression": (np.nan, np.float32),
        }[self.problem_type]
        shape = (len(values), len(self.names)) if self.problem_type == "multi_label" else len(values)
        encoded: NDArray[Any] = np.full(shape, unknown, dtype)
        for row, value in enumerate(values if self.column else ()):
            if self.columns:
                encoded[row] = [_read_binary(*each, where(row)) for each in zip(value, self.columns, strict=True)]
                continue
            try:
                encoded[row] = self._encoded(value)
            except ValueError as error:
                raise ValueError(f"{where(row)}, column {self.column!r}: {error}") from None
        return encoded

    def _encoded(self, value: Any) -> Any:
        if is_missing(value):
            raise ValueError(_NO_LABEL)
        if self.problem_type == "single_label":
            return self._class_id(value)
        if self.problem_type == "multi_label":
            if not isinstance(value, list | tuple):
                raise _fault(value, "is not a list of labels", "write [] for none, or set model.problem_type")
            if len(value) > 2 and len({*map(str, value)}) <= 2 and {*map(str, value)} <= {"0", "1"}:
                raise _fault(
                    value, "is a row of zeros and ones", "write the labels that a text has, as a list of their names"
                )
            return np.isin(np.arange(len(self.names)), [self._class_id(label) for label in value])
        number = _as_number(value)
        if number is None or not math.isfinite(number):
            raise _fault(value, "is not a number", "repair or drop the row, or set model.problem_type")
        return number

    def _class_id(self, value: Any) -> int:
        name = label_name(value)
        remedy = "name every class in data.label_names, or drop the row"
        if name is None:
            raise _fault(value, "is not a label (a name or an integer)", "repair it, or set model.problem_type")
        if not self.are_ids:
            if name in self._ids:
                return self._ids[name]
            listed = ", ".join(self.names[:12]) + (" ..." if len(self.names) > 12 else "")
            remedy = did_you_mean(name, self.names, remedy, show=repr)
            raise _fault(value, f"is not one of the labels ({listed})", remedy)
        number, count, first = _as_number(value), len(self.id_names or self.names), self.first_id
        if number is None or not first <= number < first + count:
            raise _fault(value, f"is not an id of the {count} classes, {first} to {first + count - 1}", remedy)
        return self._ids[self.id_names[int(number) - first]] if self.id_names else int(number) - first

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


def label_scheme(
    values: Sequence[Any],
    where: Callable[[int], str],
    *,
    column: str | None,
    problem_type: str,
    label_names: Sequence[str] | None,
    feature_names: Sequence[str] | None,
    known_names: Sequence[str] | None = None,
    first_id: int = 0,
    may_drop: bool = False,
) -> LabelScheme:
    """Return the label scheme of the training rows. `where` names a row.

    `problem_type` and `label_names` come from the recipe. `feature_names` are a data set's own names for its ids.
    Without names, the classes are the sorted distinct labels (numbers by value). If they match the `known_names` of a
    pretrained classifier, they take its order. Without a column, the rows are for prediction and the recipe defines the
    meaning of the model's outputs. `may_drop` says whether `data.missing_labels` can drop rows.

    Raises:
        ValueError: a label is missing, the labels do not fit the problem type, or only one class exists.
    """
    if column is None:
        if label_names is None and problem_type != "regression":
            raise ValueError("data.label_column: none is for rows to predict; then data.label_names says the classes")
        asked: Any = problem_type if problem_type in ("multi_label", "regression") else "single_label"
        return LabelScheme(asked, tuple(label_names or ("value",)), "", False, "as set")
    missing = [row for row, value in enumerate(values) if is_missing(value)]
    if missing:
        drop = _how_to_drop(len(missing), len(values)) if may_drop else ""
        raise ValueError(f"{where(missing[0])}, column {column!r}: {_NO_LABEL}{drop}")
    given = label_names if label_names is not None else feature_names
    kind, reason = _problem_type(values, problem_type, given is not None)
    if kind == "regression":
        if label_names is not None and len(label_names) != 1:
            raise ValueError(
                f"data.label_names has {len(label_names)} names, but the problem is regression ({reason}); leave it "
                "out, or set model.problem_type: single_label"
            )
        mixed = tuple(_mixed_kinds(values, column))
        return LabelScheme(kind, tuple(label_names or (column,)), column, False, reason, notes=mixed)
    labels = values
    if kind == "multi_label":
        labels = [label for value in values if isinstance(value, list | tuple) for label in value]
    found = {name for label in labels if (name := label_name(label)) is not None}
    if given is not None:
        if len(set(given)) != len(given):
            raise ValueError(f"data.label_names names a class twice: {', '.join(given)}; each has one id")
        # A data set's own names define its ids. Otherwise, labels are names if every label is one of the names. If not,
        # integers are ids, unless the names are integers too. One rule applies to the whole column.
        order, notes = tuple(given), []
        are_ids = feature_names is not None and set(feature_names) <= set(given)
        if are_ids:
            order = tuple(feature_names or ())
        elif all(map(is_whole, found)) and not found <= set(given) and not all(map(is_whole, given)):
            are_ids = True
            ids = ", ".join(f"{number} is {name}" for number, name in enumerate(order[:12], start=first_id))
            notes = [f"column {column!r}: numbers are taken for ids: {ids}{' ...' if len(order) > 12 else ''}"]
        others = order if order != tuple(given) else ()
        scheme = LabelScheme(kind, tuple(given), column, are_ids, reason, first_id, others, tuple(notes))
    else:
        ordered = sorted(found, key=int) if all(map(is_whole, found)) else sorted(found)
        if known_names is not None and sorted(known_names) == sorted(ordered):
            ordered = list(known_names)
        several = several_in_one(ordered) if kind == "single_label" and problem_type == "auto" else None
        said = (
            ()
            if several is None
            else (f"column {column!r}: {several[0]!r} is one class, not several with {several[1]}",)
        )
        kinds = tuple(_mixed_kinds(labels, column))
        scheme = LabelScheme(kind, tuple(ordered), column, False, reason, notes=(*said, *kinds))
    if len(scheme.names) < (2 if kind == "single_label" else 1):
        # If a label has the wrong type, this raises a better message.
        scheme.encode(values, where)
        raise ValueError(
            f"column {column!r}: every row has the same label, {show_cell(values[0])}, so there is nothing to learn; "
            "is data.label_column the right one?"
        )
    return scheme


def columns_scheme(
    rows: Sequence[Sequence[Any]],
    where: Callable[[int], str],
    columns: Sequence[str],
    label_names: Sequence[str] | None = None,
) -> LabelScheme:
    """Return the multi-label scheme of columns of 0 and 1. `rows` are their cells, and `where` names a row.

    `label_names` are the classes of a trained model.

    Raises:
        ValueError: a cell is empty, or the model has other classes.
    """
    if label_names is not None and tuple(label_names) != tuple(columns):
        raise ValueError(
            f"data.label_columns=[{', '.join(columns)}] are not the labels of the model ({', '.join(label_names)}); "
            "name a column for each of its labels"
        )
    missing = [row for row, cells in enumerate(rows) if any(map(is_missing, cells))]
    if missing:
        column = next(name for name, cell in zip(columns, rows[missing[0]]) if is_missing(cell))
        raise ValueError(f"{where(missing[0])}, column {column!r}: {_NO_LABEL}{_how_to_drop(len(missing), len(rows))}")
    names = tuple(columns)
    return LabelScheme("multi_label", names, ", ".join(names), False, "columns of 0 and 1", columns=names)


def binary_value(cell: Any) -> bool | None:
    """Return whether a cell is 1 or true; None if it is neither 0 nor 1. Text as pandas writes it: 1, 1.0, True."""
    if isinstance(cell, list | tuple | dict):
        return None
    return _BINARY.get(str(cell).lower())


def _read_binary(cell: Any, column: str, where: str) -> bool:
    value = binary_value(cell)
    if value is None:
        fault = ValueError(_NO_LABEL) if is_missing(cell) else _fault(cell, "is not 0 or 1", "repair or drop the row")
        raise ValueError(f"{where}, column {column!r}: {fault}")
    return value


def _how_to_drop(missing: int, total: int) -> str:
    return f" ({missing:,} of {total:,} lack one; data.missing_labels: drop leaves them out)"


def label_name(value: Any) -> str | None:
    """Return a label as a class name: a string unchanged, 3 and 3.0 as "3", true as "true"; None for other types."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    is_whole = isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer())
    return str(int(value)) if is_whole else None


def class_counts(counts: Mapping[str, int]) -> str:
    """Return the sample count of each class, or of the most and least frequent classes if there are many.

    Spaces around a name are shown.
    """
    shown = [
        f"{repr(name) if name != name.strip() else name} {count:,}"
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    return ", ".join(shown if len(shown) <= CLASSES_SHOWN else [*shown[:8], "...", *shown[-3:]])


def class_notes(counts: Mapping[str, int]) -> list[str]:
    """Return a line with the classes and their sample counts, and a line for each kind of suspicious name."""
    notes = [f"{len(counts)} classes: {class_counts(counts)}"]
    alike: dict[str, list[str]] = {}
    for name in counts:
        alike.setdefault(" ".join(name.split()).casefold(), []).append(name)
    groups = [group for group in alike.values() if len(group) > 1]
    if groups:
        shown = "; ".join(", ".join(map(repr, group)) for group in groups[:3]) + ("; ..." if len(groups) > 3 else "")
        notes.append(
            f"class names that differ only by case or blanks: {shown}. Each is a separate class. Write one name in "
            f"the data if they mean the same"
        )
    decimals = [name for name in counts if _DECIMAL_COMMA.fullmatch(name.strip())]
    if decimals and len(decimals) > len(counts) // 2:
        notes.append(
            f"class names that look like numbers with a decimal comma: {', '.join(map(repr, decimals[:3]))}. For a "
            "regression write a decimal point"
        )
    return notes


def _mixed_kinds(labels: Sequence[Any], column: str) -> list[str]:
    """Return a note if one column mixes text, numbers and true/false, or an empty list."""
    first: dict[str, Any] = {}
    for label in labels:
        if isinstance(label, str | bool | np.bool_ | int | float | np.number):
            kind = (
                "text" if isinstance(label, str) else "true/false" if isinstance(label, bool | np.bool_) else "number"
            )
            first.setdefault(kind, label)
    if len(first) < 2:
        return []
    shown = ", ".join(f"{kind} {show_cell(value)}" for kind, value in first.items())
    return [f"column {column!r} mixes labels of several types: {shown}. Write all of them in one way"]


def several_in_one(names: Iterable[str]) -> tuple[str, str] | None:
    """Return (class name, separator) of a class that looks like several labels in one, or None.

    Names in brackets count if more than half of the names have them. A name with separators counts only if a part also
    occurs in another name: "css,html" next to "css". A shared last part does not count: "Austin, TX" and "Dallas, TX".
    """
    names = sorted(names)
    in_brackets = [name for name in names if len(name) > 1 and name[0] + name[-1] in ("[]", "{}", "()")]
    if 2 * len(in_brackets) > len(names):
        return in_brackets[-1], "brackets"
    for separator, called in ((",", "commas"), ("|", "vertical bars"), (";", "semicolons")):
        parts_of = {name: [part.strip() for part in name.split(separator)] for name in names}
        counts = Counter(part for parts in parts_of.values() for part in set(parts))
        before_last = {part for parts in parts_of.values() for part in parts[:-1] or parts}
        for name, parts in parts_of.items():
            if len(parts) > 1 and any(counts[part] > 1 and part in before_last for part in parts):
                return name, called
    return None


def _fault(value: Any, fault: str, remedy: str) -> ValueError:
    return ValueError(f"{show_cell(value)} {fault}; {remedy}")


def is_missing(value: Any) -> bool:
    """Return whether a label cell is empty."""
    return value is None or value == ""


def _problem_type(values: Sequence[Any], asked: str, are_named: bool) -> tuple[ProblemType, str]:
    if asked in ("single_label", "multi_label", "regression"):
        return asked, "as set"  # type: ignore[return-value]
    if all(isinstance(value, list | tuple) for value in values):
        return "multi_label", "the labels are lists"
    numbers = [_as_number(value) for value in values]
    if not are_named and None not in numbers:
        decimals = (number for number in numbers if number is not None and math.isfinite(number) and number % 1)
        if any(isinstance(value, float) for value in values) or any(decimals):
            return "regression", "the labels are decimal numbers"
    return "single_label", "the labels are names or integers"


def _as_number(value: Any) -> float | None:
    """Return the number in a cell, or None. Numbers in csv files are text."""
    if isinstance(value, bool | np.bool_ | list | tuple | dict) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
