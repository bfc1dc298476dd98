"""How metrics are called on the page, how their values read, and which of them get a curve."""

import math
import re
from collections.abc import Sequence
from typing import Any

from accel_train.observe.curves import Curves

MISSING = "–"
MAX_CURVES = 12
"""Charts of evaluation metrics on one page; the table has all of them."""

LABELS = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "precision": "Precision",
    "recall": "Recall",
    "f1": "F1",
    "mcc": "Matthews correlation",
    "auroc": "AUROC",
    "hamming_loss": "Hamming loss",
    "mean_iou": "Mean IoU",
    "pixel_accuracy": "Pixel accuracy",
    "mse": "Mean squared error",
    "rmse": "Root mean squared error",
    "mae": "Mean absolute error",
    "r2": "r²",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
    "perplexity": "Perplexity",
    "bits_per_byte": "Bits per byte",
    "num_targets": "Targets",
}
NOT_A_SCORE = frozenset({"step", "split", "seconds", "num_targets"})
"""Columns of an evaluation's line that tell of the evaluation, not of the model."""

FOLLOWS_FROM_LOSS = frozenset({"loss", "perplexity", "bits_per_byte"})
_AVERAGED = re.compile(r"(.+)_(macro|micro|weighted|binary)")


def label(name: str) -> str:
    """`f1_macro` as `F1, macro`; a name that is not known as it is, without underscores."""
    averaged = _AVERAGED.fullmatch(name)
    if averaged and averaged[1] in LABELS:
        return f"{LABELS[averaged[1]]}, {averaged[2]}"
    return LABELS.get(name, name.replace("_", " "))


def show_value(value: Any) -> str:
    """A metric's value for a table: four decimals, fewer where there are digits before the point."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.1f}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1000 else f"{value:.4g}"


def metrics_with_curves(runs: Sequence[Curves]) -> list[str]:
    """The metrics, other than the loss, that some run has evaluated at least twice; at most MAX_CURVES.

    Of precision, recall and F1 only the macro F1: the curves of the others tell the same.
    """
    steps: dict[str, dict[int, set[int]]] = {}
    unusable = set(NOT_A_SCORE | FOLLOWS_FROM_LOSS)
    for number, run in enumerate(runs):
        for line in run.evals:
            for name, value in line.items():
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    unusable.add(name)
                elif value is not None:
                    steps.setdefault(name, {}).setdefault(number, set()).add(line["step"])
    names = [
        name
        for name, by_run in steps.items()
        if name not in unusable and max(len(seen) for seen in by_run.values()) > 1
    ]
    return [name for name in names if not is_variant(name, names)][:MAX_CURVES]


def is_variant(name: str, names: Sequence[str]) -> bool:
    """An average of precision, recall or F1 beside the macro F1 that stands for them."""
    averaged = _AVERAGED.fullmatch(name)
    return name != "f1_macro" and averaged is not None and averaged[1] in LABELS and "f1_macro" in names
