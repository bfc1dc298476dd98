"""Precision, recall and F1 of classes and their averages, and the classification report that scikit-learn made known."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

AVERAGES = ("macro", "micro", "weighted")
FIGURES = ("precision", "recall", "f1-score")
SUMMARY_ROWS = ("accuracy", "micro avg", "macro avg", "weighted avg")
"""Rows of a report that are no classes."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class ClassFigures:
    """Of each class: how often it was rightly said, wrongly said, and missed; (C,) int64 each."""

    true_positives: Counts
    false_positives: Counts
    false_negatives: Counts

    @property
    def support(self) -> Counts:
        """Samples of the class."""
        return self.true_positives + self.false_negatives

    def occurs(self) -> NDArray[np.bool_]:
        """In the truth, or among the predictions."""
        return self.support + self.false_positives > 0

    def only(self, chosen: NDArray[np.bool_]) -> "ClassFigures":
        """Some of the classes."""
        return ClassFigures(self.true_positives[chosen], self.false_positives[chosen], self.false_negatives[chosen])

    def rates(self) -> dict[str, NDArray[np.float64]]:
        """Precision, recall and F1 of each class; 0 where there is nothing to divide by."""
        tp, fp, fn = self.true_positives, self.false_positives, self.false_negatives
        return {
            "precision": _ratio(tp, tp + fp),
            "recall": _ratio(tp, tp + fn),
            "f1-score": _ratio(2 * tp, 2 * tp + fp + fn),
        }


def class_figures(confusion: Counts) -> ClassFigures:
    """From (C, C) counts, rows the truth."""
    right = np.diag(confusion)
    return ClassFigures(right, confusion.sum(0) - right, confusion.sum(1) - right)


def average(figures: ClassFigures, kind: str) -> dict[str, float]:
    """Precision, recall, F1 and support over all classes: `macro` mean, `weighted` by support, `micro` over all samples.

    NaN without a single class.
    """
    support = int(figures.support.sum())
    if not len(figures.support):
        return {**dict.fromkeys(FIGURES, math.nan), "support": 0}
    if kind == "micro":
        columns = (figures.true_positives, figures.false_positives, figures.false_negatives)
        pooled = ClassFigures(*(column.sum(keepdims=True) for column in columns))
        means = {name: float(values[0]) for name, values in pooled.rates().items()}
    else:
        weights = figures.support if kind == "weighted" else np.ones_like(figures.support)
        total = max(int(weights.sum()), 1)
        means = {name: float((values * weights).sum() / total) for name, values in figures.rates().items()}
    return {**means, "support": support}


def report_dict(
    figures: ClassFigures,
    known: NDArray[np.bool_],
    label_names: Sequence[str],
    averages: Mapping[str, Mapping[str, float]],
    accuracy: float | None = None,
) -> dict[str, Any]:
    """`classification_report(output_dict=True)`: figures by class name, then `accuracy` and the averages.

    A class that is not known has None for its rates. One that is called like a row of averages is `... (class)` here.
    """
    rates, support = figures.rates(), figures.support
    report: dict[str, Any] = {}
    for index, name in enumerate(label_names):
        key = f"{name} (class)" if name in SUMMARY_ROWS else name
        values = {figure: float(rates[figure][index]) if known[index] else None for figure in FIGURES}
        report[key] = {**values, "support": int(support[index])}
    if accuracy is not None:
        report["accuracy"] = accuracy
    return report | {f"{kind} avg": dict(values) for kind, values in averages.items()}


def format_report(report: Mapping[str, Any]) -> str:
    """The report as text, laid out as scikit-learn's; None is a dash."""
    averages = [name for name in SUMMARY_ROWS if isinstance(report.get(name), Mapping)]
    width = max(len(name) for name in (*report, "weighted avg"))
    total = report[averages[-1]]["support"]
    lines = [" " * width + " " + "".join(f" {heading:>9}" for heading in (*FIGURES, "support")), ""]
    classes = [name for name in report if name not in SUMMARY_ROWS]
    lines += [_report_line(name, report[name], width) for name in classes]
    lines.append("")
    if "accuracy" in report:
        lines.append(f"{'accuracy':>{width}} {'':>10}{'':>10} {_cell(report['accuracy'])} {total:>9}")
    lines += [_report_line(name, report[name], width) for name in averages]
    return "\n".join(lines) + "\n"


def _report_line(name: str, row: Mapping[str, Any], width: int) -> str:
    return f"{name:>{width}} " + "".join(f" {_cell(row[figure])}" for figure in FIGURES) + f" {row['support']:>9}"


def _cell(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:>9.2f}"


def _ratio(part: Counts, whole: Counts) -> NDArray[np.float64]:
    return np.where(whole > 0, part / np.maximum(whole, 1), 0.0)
