"""Turn the cells of a label column into class ids, sets of class ids, or numbers, and doubt odd names of classes."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.core.format import did_you_mean, format_count, is_whole
from accel_train.core.json_io import nested
from accel_train.data.tables import LABEL_NAMES, binary_value, show_cell

# Label of a position or sample without a label. Cross-entropy and metrics ignore it.
IGNORED_LABEL = -100
_NO_LABEL = "the row has no label; fill it in, or drop the row"
ProblemType = Literal["single_label", "multi_label", "regression"]
CLASSES_SHOWN = 12
"""Most classes that a message lists one by one."""
_MOST_NUMBERS = 20
"""Different numbers up to which they are usually classes: stars, grades."""
_MISSING = re.compile(r"[-?.]+|#?n\.?/?a\.?|<na>|nan|null|none", re.IGNORECASE)
_PLAIN_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_CURRENCY = "[$€£¥₹]"
_WRITTEN_NUMBER = re.compile(rf"[-+]?{_CURRENCY}?\s?\d{{1,3}}(?:[.,\s]?\d{{3}})*(?:[.,]\d+)?\s?(?:%|‰|{_CURRENCY})?")
_LIST = re.compile(r"[\[{]\s*['\"]")
_FEWEST_IDS = 3
"""Ids from 0. Among them, -1 is a missing label. -1, 0, and 1 are a scale."""
_FEWEST_FREE_WORDS = 2
"""Words that stand both last and before another word, from which words between spaces are labels."""


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

    def counts(self, labels: NDArray[Any]) -> dict[str, int]:
        """Return the number of samples per class, from the encoded labels of a classification."""
        counts = (labels > 0).sum(0) if labels.ndim > 1 else np.bincount(labels[labels >= 0], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def _encoded(self, value: Any) -> Any:
        if is_missing(value):
            raise ValueError(_NO_LABEL)
        if self.problem_type == "single_label":
            return self._class_id(value)
        if self.problem_type == "multi_label":
            labels = labels_in(value)
            if labels is None:
                raise _fault(value, "is not a list of labels", "write [] for none, or set model.problem_type")
            if len(labels) > 2 and {*map(str, labels)} <= {"0", "1"}:
                remedy = "write the labels that a text has, as a list of their names"
                raise _fault(value, "is a row of zeros and ones", remedy)
            return np.isin(np.arange(len(self.names)), [self._class_id(label) for label in labels])
        number = _as_number(value)
        if number is None or not math.isfinite(number):
            words = f"data.missing_labels: {json.dumps([value])} leaves such rows out, or "
            remedy = words if isinstance(value, str) and means_missing(value) else ""
            raise _fault(value, "is not a number", f"{remedy}repair or drop the row, or set model.problem_type")
        return number

    def _class_id(self, value: Any) -> int:
        name = label_name(value)
        remedy = "name every class in data.label_names, or drop the row"
        if name is None:
            raise _fault(value, "is not a label (a name or an integer)", "repair it, or set model.problem_type")
        if not self.are_ids:
            if (found := self._ids.get(name, self._ids_of_numbers.get(number_in(name)))) is not None:
                return found
            listed = ", ".join(self.names[:12]) + (" ..." if len(self.names) > 12 else "")
            remedy = did_you_mean(name, self.names, remedy, show=repr)
            raise _fault(value, f"is not one of the labels ({listed})", remedy)
        number, count, first = _as_number(value), len(self.id_names or self.names), self.first_id
        if number is None or number % 1 or not first <= number < first + count:
            raise _fault(value, f"is not an id of the {count} classes, {first} to {first + count - 1}", remedy)
        return self._ids[self.id_names[int(number) - first]] if self.id_names else int(number) - first

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def _ids_of_numbers(self) -> dict[float | None, int]:
        """Class ids by number, because a file may have 1.0 for the class "1"."""
        return {number: index for name, index in self._ids.items() if (number := number_in(name)) is not None}


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
    if problem_type == "auto" and values:
        refuse_objects(values, column, where(0))
    given = label_names if label_names is not None else feature_names
    kind, reason = _problem_type(values, column, problem_type, given is not None)
    if kind == "regression":
        if label_names is not None and len(label_names) != 1:
            raise ValueError(
                f"data.label_names has {len(label_names)} names, but the problem is regression ({reason}); leave it "
                "out, or set model.problem_type: single_label"
            )
        names = tuple(label_names or (column,))
        return LabelScheme(kind, names, column, False, reason, notes=_mixed_kinds(values, column))
    labels = values
    if kind == "multi_label":
        labels = [label for value in values for label in labels_in(value) or ()]
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
        elif all(map(is_whole_number, found)) and not found <= set(given) and not all(map(is_whole_number, given)):
            are_ids = True
            ids = ", ".join(f"{number} is {name}" for number, name in enumerate(order[:12], start=first_id))
            notes = [f"column {column!r}: numbers are taken for ids: {ids}{' ...' if len(order) > 12 else ''}"]
        others = order if order != tuple(given) else ()
        scheme = LabelScheme(kind, tuple(given), column, are_ids, reason, first_id, others, tuple(notes))
    else:
        ordered = sorted(found, key=int) if all(map(is_whole, found)) else sorted(found)
        if known_names is not None and sorted(known_names) == sorted(ordered):
            ordered = list(known_names)
        scheme = LabelScheme(kind, tuple(ordered), column, False, reason, notes=_mixed_kinds(labels, column))
    if len(scheme.names) < (2 if kind == "single_label" else 1):
        # If a label has the wrong type, this raises a better message.
        scheme.encode(values, where)
        raise ValueError(
            f"column {column!r}: every row has the same label, {show_cell(values[0])}, so there is nothing to learn; "
            "name another column (data.label_column, or --label of finetune)"
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
    names = tuple(columns)
    if label_names is not None and tuple(label_names) != names:
        raise ValueError(
            f"data.label_columns=[{', '.join(columns)}] are not the labels of the model ({', '.join(label_names)}); "
            "name a column for each of its labels"
        )
    missing = [row for row, cells in enumerate(rows) if any(map(is_missing, cells))]
    if missing:
        column = next(name for name, cell in zip(columns, rows[missing[0]]) if is_missing(cell))
        raise ValueError(f"{where(missing[0])}, column {column!r}: {_NO_LABEL}{_how_to_drop(len(missing), len(rows))}")
    return LabelScheme("multi_label", names, ", ".join(names), False, "columns of 0 and 1", columns=names)


def labels_in(cell: Any) -> Sequence[Any] | None:
    """Return the labels in a list, or in the text of one, or None for another cell."""
    found = nested(cell)
    return None if isinstance(found, dict) else found


def refuse_objects(cells: Sequence[Any], column: str, where: str) -> None:
    """Raise ValueError if the first cell is an object or a list of objects, or the text of one."""
    found = nested(next(iter(cells), None))
    first = found if isinstance(found, dict) else next(iter(found or ()), None)
    if isinstance(first, dict):
        named = [key for key in first if key.lower() in LABEL_NAMES]
        raise ValueError(
            f"{where}: column {column!r} holds objects ({show_cell(found)}), not labels. Write the value of "
            f"{repr(named[0]) if len(named) == 1 else 'one key'} into a column of its own"
        )


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
        return str(value).lower()
    is_whole = isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer())
    return str(int(value)) if is_whole else None


def _mixed_kinds(labels: Sequence[Any], column: str) -> tuple[str, ...]:
    """Return a note if one column mixes text, numbers and true/false, or nothing."""
    first: dict[str, Any] = {}
    for label in labels:
        if isinstance(label, str | bool | np.bool_ | int | float | np.number):
            is_binary = isinstance(label, bool | np.bool_)
            first.setdefault("text" if isinstance(label, str) else "true/false" if is_binary else "number", label)
    if len(first) < 2:
        return ()
    shown = ", ".join(f"{kind} {show_cell(value)}" for kind, value in first.items())
    return (f"column {column!r} mixes labels of several types: {shown}. Write all of them in one way",)


def _fault(value: Any, fault: str, remedy: str) -> ValueError:
    return ValueError(f"{show_cell(value)} {fault}; {remedy}")


def is_missing(value: Any, words: Collection[str] = ()) -> bool:
    """Return whether a label cell is empty: None, NaN, spaces, or one of the words for a missing label."""
    if isinstance(value, str):
        return not value.strip() or value in words
    is_empty = value is None or (isinstance(value, float) and math.isnan(value))
    return is_empty or (bool(words) and label_name(value) in words)


def _problem_type(values: Sequence[Any], column: str, asked: str, are_named: bool) -> tuple[ProblemType, str]:
    """Return the problem type and the reason. It depends on the values: 1.0 is read as 1, and "1" of a csv file too.

    Raises:
        ValueError: many whole numbers are written with decimals, so they may be classes or numbers.
    """
    if asked in ("single_label", "multi_label", "regression"):
        return asked, "as set"  # type: ignore[return-value]
    if None not in map(labels_in, values):
        return "multi_label", "the labels are lists"
    if not are_named and None not in map(_as_number, values):
        different = {number for number in map(_as_number, values) if number is not None and math.isfinite(number)}
        if any(number % 1 for number in different):
            return "regression", "the labels are decimal numbers"
        decimal = next((value for value in values if isinstance(value, float) or "." in str(value)), None)
        if decimal is not None and different and not may_be_ids(different):
            raise ValueError(
                f"column {column!r} holds {len(different):,} different whole numbers, written with decimals "
                f"({show_cell(decimal)}): classes or numbers? Set model.problem_type to single_label or regression"
            )
    return "single_label", "the labels are names or integers"


def _as_number(value: Any) -> float | None:
    """Return the number in a cell, or None. Numbers in csv files are text."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


class Doubt(NamedTuple):
    """A sign that the values of a label column are not the classes that they seem to be."""

    problem: str
    remedy: str
    setting: tuple[str, str] = ("", "")
    """Setting that follows the remedy, and its value. Empty if the data has to be repaired."""
    is_question: bool = True
    """Whether the values are probably not classes. False: they probably are, and the doubt is only noted."""


def class_doubts(counts: Mapping[str, int]) -> list[Doubt]:
    """Return the doubts about classes, from their names and sample counts. Questions come first."""
    names = list(counts)
    combined = _written_numbers(names) or _several(names)
    found = (_missing(counts), combined, _alike(names), _numbers(names), _single(counts))
    return sorted((doubt for doubt in found if doubt is not None), key=lambda doubt: not doubt.is_question)


def class_notes(counts: Mapping[str, int]) -> list[str]:
    """Return a line with the sample count of each class (of many: the most and least frequent) and of each doubt."""
    largest = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{repr(name) if name != name.strip() else name} {count:,}" for name, count in largest]
    shown = shown if len(shown) <= CLASSES_SHOWN else [*shown[:8], "...", *shown[-3:]]
    notes = [f"{format_count(len(counts), 'class', 'classes')}: {', '.join(shown)}"]
    for doubt in class_doubts(counts):
        setting = f": {': '.join(doubt.setting)}" if doubt.setting[0] else ""
        notes.append(f"{doubt.problem}. {doubt.remedy}{setting}")
    return notes


def number_in(name: str) -> float | None:
    """Return the number that a class name is, or None: 1, 1.0, and 01 are one number."""
    return float(name) if _PLAIN_NUMBER.fullmatch(name.strip()) else None


def means_missing(name: str) -> bool:
    """Return whether a text is a usual sign of a missing value: NA, nan, None, -, ?"""
    return _MISSING.fullmatch(name.strip()) is not None


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _missing(counts: Mapping[str, int]) -> Doubt | None:
    """Doubt words for "no label", and -1 before ids from 0 to 2 or more. A sign among signs (+ and -) is a class."""
    before_ids = {"-1", *map(str, range(max(_FEWEST_IDS, len(counts) - 1)))}
    words = ["-1"] if counts.keys() == before_ids else list(filter(means_missing, counts))
    others = [name.strip() for name in counts if name not in words]
    if not all(any(map(str.isalnum, name)) for name in others):
        return None
    words = [word for word in words if not (others and _is_usual(word.strip(), others))]
    if not words:
        return None
    rows = sum(counts[word] for word in words)
    looks = f"{_few(words)} ({rows:,} of {sum(counts.values()):,} rows) {'looks' if len(words) == 1 else 'look'}"
    setting = ("data.missing_labels", json.dumps(words, ensure_ascii=False))
    return Doubt(f"{looks} like a missing label, not a class", "To leave these rows out", setting)


def _is_usual(word: str, others: Sequence[str]) -> bool:
    """Return whether "None" is among words in the same case, or "NA" among codes of two letters."""
    if word.lower() == "none":
        # Both words in capitals, both capitalized, or neither.
        case = (word[0].isupper(), word.isupper())
        return all(name[:1].isalpha() and (name[0].isupper(), name[:2].isupper()) == case for name in others)
    return word == "NA" and all(len(name) == 2 and name.isalpha() and name.isupper() for name in others)


def _written_numbers(names: Sequence[str]) -> Doubt | None:
    written = [name for name in names if number_in(name) is None and _WRITTEN_NUMBER.fullmatch(name.strip())]
    if 2 * len(written) <= len(names) or len(written) + sum(number_in(name) is not None for name in names) < len(names):
        return None
    have_commas = all(re.fullmatch(r"[-+]?\d+,\d+", name.strip()) for name in written)
    signs = "a decimal comma" if have_commas else "signs"
    problem = f"class names that look like numbers with {signs}: {_few(written)}"
    return Doubt(problem, "To predict numbers, write plain numbers with a decimal point, for example 4.5")


def _several(names: Sequence[str]) -> Doubt | None:
    """Doubt classes that look like several labels in one.

    Lists with quotes count. Names in brackets count if more than half of the names have them. A name with separators
    counts only if a part also occurs in another name: "css,html" next to "css". A shared last part does not count:
    "Austin, TX" and "Dallas, TX".
    """
    names, found = sorted(names), _several_words(names)
    for separator, called in ((";", "semicolons"), ("|", "vertical bars"), (",", "commas")):
        parts_of = {name: [part.strip() for part in name.split(separator)] for name in names}
        counts = Counter(part for parts in parts_of.values() for part in set(parts))
        before_last = {part for parts in parts_of.values() for part in parts[:-1] or parts}
        for name, parts in parts_of.items():
            if len(parts) > 1 and any(counts[part] > 1 and part in before_last for part in parts):
                found = name, called
                break
    in_brackets = [name for name in names if len(name) > 1 and name[0] + name[-1] in ("[]", "{}", "()")]
    written = [name for name in names if _LIST.match(name)]
    if 2 * len(in_brackets) > len(names) or written:
        found = (written or in_brackets)[-1], "brackets"
    return found and Doubt(
        f"{found[0]!r} looks like several labels in one cell, with {found[1]}, and each combination is a class",
        "For several labels, write lists of names in a .jsonl or .parquet file",
    )


def _several_words(names: Sequence[str]) -> tuple[str, str] | None:
    """Return (class name, "spaces") if the words of names combine freely, as labels do, or None.

    In "New York" and "very good", a word keeps its place: before others, or last. The words of labels stand anywhere.
    """
    words_of = [name.split() for name in names]
    before = {word for words in words_of for word in words[:-1]}
    free = before & {words[-1] for words in words_of if words}
    several = [words for words in words_of if len(words) > 1]
    combined = [words for words in several if not free.isdisjoint(words)]
    if len(free) < _FEWEST_FREE_WORDS or 2 * len(combined) <= len(several):
        return None
    return " ".join(sorted(combined, key=len)[-1]), "spaces"


def _alike(names: Sequence[str]) -> Doubt | None:
    alike: dict[object, list[str]] = defaultdict(list)
    for name in names:
        number = number_in(name)
        alike[" ".join(name.split()).casefold() if number is None else number].append(name)
    groups = [group for group in alike.values() if len(group) > 1]
    # Letters are classes of their own (A and a).
    if not groups or all(len(name) == 1 for group in groups for name in group):
        return None
    shown = "; ".join(", ".join(map(repr, group)) for group in groups[:3]) + ("; ..." if len(groups) > 3 else "")
    problem = f"classes with one name in several spellings: {shown}"
    return Doubt(problem, "Write one name in the data if they mean the same")


def _numbers(names: Sequence[str]) -> Doubt | None:
    numbers = [number for name in names if (number := number_in(name)) is not None]
    if len(numbers) < len(names) or len(numbers) <= _MOST_NUMBERS:
        return None
    low, high = min(numbers), max(numbers)
    return Doubt(
        f"{len(numbers):,} classes are the numbers {low:,.15g} to {high:,.15g}, without an order",
        "To predict numbers",
        ("model.problem_type", "regression"),
        is_question=not may_be_ids(numbers),
    )


def may_be_ids(numbers: Collection[float]) -> bool:
    """Return whether different numbers may be ids of classes: few, or from 0 or 1 on and at least half of them used."""
    return len(numbers) <= _MOST_NUMBERS or (min(numbers) >= 0 and max(numbers) < 2 * len(numbers))


def _single(counts: Mapping[str, int]) -> Doubt | None:
    rare = [name for name, count in counts.items() if count == 1]
    if not rare:
        return None
    shown = _few([name if len(name) <= 60 else f"{name[:57]}..." for name in rare])
    problem = f"{len(rare):,} of {len(counts):,} classes have one row: {shown}"
    return Doubt(problem, "Check that these are labels: a class of one row is not learned", is_question=False)


def is_whole_number(name: str) -> bool:
    """Return whether a class name is a whole number, also with zeros for decimals: 3, 3.0."""
    return is_whole(re.sub(r"\.0+$", "", name))
