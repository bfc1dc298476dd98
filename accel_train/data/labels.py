"""From the cells of a label column to what a model is trained on: ids of classes, sets of them, or numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.data.lines import show_cell

UNKNOWN_LABEL = -100
"""The id of a class that is not known; cross-entropy and scores leave such a sample out."""

ProblemType = Literal["single_label", "multi_label", "regression"]


class LabelCell(NamedTuple):
    """What stands in the label column of one row."""

    value: Any
    where: str
    """File and line or row."""


@dataclass(frozen=True)
class LabelScheme:
    """What the labels of a data set mean."""

    problem_type: ProblemType
    names: tuple[str, ...]
    """The classes in the order of their ids; for regression the one number's name."""
    column: str
    are_ids: bool
    """Whether integers in the column are ids of `names`, and not names themselves."""
    reason: str
    """Why this problem type."""

    def encode(self, cells: Sequence[LabelCell]) -> NDArray[Any]:
        """The labels of rows: (N,) int64 ids, (N, C) fp32 zeros and ones, or (N,) fp32 numbers.

        Raises:
            ValueError: a label is of another type, or none of `names`; the text names row, column and value.
        """
        for cell in cells:
            check_present(cell, self.column)
        if self.problem_type == "regression":
            return np.array([self._number(cell) for cell in cells], dtype=np.float32)
        ids = {name: index for index, name in enumerate(self.names)}
        if self.problem_type == "single_label":
            return np.array([self._class_id(cell.value, cell.where, ids) for cell in cells], dtype=np.int64)
        encoded = np.zeros((len(cells), len(self.names)), dtype=np.float32)
        for row, cell in zip(encoded, cells, strict=True):
            if not isinstance(cell.value, list | tuple):
                raise self._error(cell, "is not a list of labels", "write [] for none, or set model.problem_type")
            row[[self._class_id(value, cell.where, ids) for value in cell.value]] = 1.0
        return encoded

    def without_labels(self, num_rows: int) -> NDArray[Any]:
        """What stands for labels that are not known: -100, rows of -1, or NaN."""
        if self.problem_type == "regression":
            return np.full(num_rows, np.nan, dtype=np.float32)
        if self.problem_type == "single_label":
            return np.full(num_rows, UNKNOWN_LABEL, dtype=np.int64)
        return np.full((num_rows, len(self.names)), -1.0, dtype=np.float32)

    def renamed(self, names: tuple[str, ...]) -> "LabelScheme":
        """The same classes in another order of ids; a scheme whose column holds ids keeps its own."""
        return self if self.are_ids else replace(self, names=names)

    def _number(self, cell: LabelCell) -> float:
        number = _as_number(cell.value)
        if number is None or not math.isfinite(number):
            raise self._error(cell, "is not a number", "repair or drop the row, or set model.problem_type")
        return number

    def _class_id(self, value: Any, where: str, ids: Mapping[str, int]) -> int:
        name = label_name(value)
        if name is None:
            raise self._error(
                LabelCell(value, where), "is not a label (a name or an integer)", "repair it, or set model.problem_type"
            )
        if not self.are_ids:
            if name in ids:
                return ids[name]
            near = get_close_matches(name, self.names, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "name every class in data.label_names, or drop the row"
            listed = ", ".join(self.names[:12]) + (" ..." if len(self.names) > 12 else "")
            raise self._error(LabelCell(value, where), f"is none of the labels ({listed})", remedy)
        number = _as_number(value)
        if number is None or not 0 <= number < len(self.names):
            raise self._error(
                LabelCell(value, where),
                f"is no id of the {len(self.names)} classes, 0 to {len(self.names) - 1}",
                "name every class in data.label_names, or drop the row",
            )
        return int(number)

    def _error(self, cell: LabelCell, fault: str, remedy: str) -> ValueError:
        return ValueError(f"{cell.where}, column {self.column!r}: {show_cell(cell.value)} {fault}; {remedy}")


def label_scheme(
    cells: Sequence[LabelCell],
    *,
    column: str,
    problem_type: str,
    label_names: Sequence[str] | None,
    feature_names: Sequence[str] | None,
) -> LabelScheme:
    """Decide what the labels of the training rows mean.

    `problem_type` and `label_names` are the recipe's; `feature_names` are the names that a data set brings for its ids.
    Without either the classes are the labels that occur, sorted (numbers by value).

    Raises:
        ValueError: a label is missing, the labels do not fit the problem type, or there is only one class.
    """
    for cell in cells:
        check_present(cell, column)
    kind, reason = _problem_type(cells, problem_type, label_names, feature_names)
    if kind == "regression":
        if label_names is not None and len(label_names) != 1:
            raise ValueError(
                f"data.label_names has {len(label_names)} names, but the problem is regression ({reason}); leave it out, "
                "or set model.problem_type: single_label"
            )
        return LabelScheme(kind, tuple(label_names or (column,)), column, False, reason)
    values = _flat(cells) if kind == "multi_label" else [cell.value for cell in cells]
    found = {name for value in values if (name := label_name(value)) is not None}
    given = label_names if label_names is not None else feature_names
    if given is not None:
        if len(set(given)) != len(given):
            raise ValueError(f"data.label_names names a class twice: {', '.join(given)}; each has one id")
        # Where every label is one of the names, they are names; else integers are ids. One rule for the whole column.
        are_ids = label_names is None or (not found <= set(given) and all(map(_is_integer, found)))
        scheme = LabelScheme(kind, tuple(given), column, are_ids, reason)
    else:
        ordered = sorted(found, key=int) if all(map(_is_integer, found)) else sorted(found)
        scheme = LabelScheme(kind, tuple(ordered), column, False, reason)
    if len(scheme.names) < (2 if kind == "single_label" else 1):
        scheme.encode(cells)  # a label of the wrong type is the better message
        raise ValueError(
            f"column {column!r}: every row has the same label, {show_cell(cells[0].value)}, so there is nothing to learn; "
            "is data.label_column the right one?"
        )
    return scheme


def check_present(cell: LabelCell, column: str) -> None:
    """Refuse a row without a label.

    Raises:
        ValueError: the cell is empty.
    """
    if cell.value is None or cell.value == "":
        raise ValueError(f"{cell.where}, column {column!r}: there is no label; fill it in, or drop the row")


def scheme_without_labels(problem_type: str, label_names: Sequence[str] | None) -> LabelScheme:
    """For rows that are to be predicted and have no label: what the recipe says of a trained model's answers.

    Raises:
        ValueError: nothing says what the classes are.
    """
    reason = "as the recipe says"
    if problem_type == "regression":
        return LabelScheme("regression", tuple(label_names or ("value",)), "", False, reason)
    if label_names is None:
        raise ValueError("data.label_column: none is for texts to predict; then data.label_names says the classes")
    return LabelScheme(
        "multi_label" if problem_type == "multi_label" else "single_label", tuple(label_names), "", False, reason
    )


def label_name(value: Any) -> str | None:
    """A label as the name of a class: strings as they are, 3 and 3.0 as "3", true as "true"; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return None


def _problem_type(
    cells: Sequence[LabelCell], asked: str, label_names: Sequence[str] | None, feature_names: Sequence[str] | None
) -> tuple[ProblemType, str]:
    if asked in ("single_label", "multi_label", "regression"):
        return asked, "as the recipe says"  # type: ignore[return-value]
    num_lists = sum(isinstance(cell.value, list | tuple) for cell in cells)
    if num_lists == len(cells):
        return "multi_label", "the labels are lists"
    if label_names is None and feature_names is None and not num_lists:
        numbers = [_as_number(cell.value) for cell in cells]
        are_floats = any(isinstance(cell.value, float) for cell in cells)
        if all(number is not None for number in numbers) and (
            are_floats
            or any(number != int(number) for number in numbers if number is not None and math.isfinite(number))
        ):
            return "regression", "the labels are decimal numbers"
    return "single_label", "the labels are names or integers"


def _flat(cells: Sequence[LabelCell]) -> list[Any]:
    return [value for cell in cells if isinstance(cell.value, list | tuple) for value in cell.value]


def _as_number(value: Any) -> float | None:
    """The number that a cell holds; csv writes it as text."""
    if isinstance(value, bool | np.bool_ | list | tuple | dict) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_integer(name: str) -> bool:
    return name.removeprefix("-").isascii() and name.removeprefix("-").isdigit()
