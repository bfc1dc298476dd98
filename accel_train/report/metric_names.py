"""Names and values of metrics on the page, and the choice of metrics with a curve."""

import math
import re
from collections.abc import Sequence
from typing import Any

from accel_train.metrics.baselines import is_number as is_number
from accel_train.report.run import Run

MISSING = "–"
MAX_CURVES = 12
"""Maximum number of charts of evaluation metrics on a page. The table contains all metrics."""

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
    "bleu": "BLEU",
    "chrf": "chrF",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "exact_match": "Exact match",
    "token_accuracy": "Token accuracy",
    "num_targets": "Targets",
    "command": "Command",
    "host": "Host",
    "folder": "Started in",
    "git_commit": "Git commit",
    "gpu": "GPU",
    "cpu_cores": "CPU cores",
    "python": "Python",
    "platform": "Platform",
}
NOT_A_SCORE = frozenset({"step", "split", "seconds", "num_targets"})
"""Columns of an evaluation's line that describe the evaluation, not the model."""

FOLLOWS_FROM_LOSS = frozenset({"loss", "perplexity", "bits_per_byte"})
_AVERAGED = re.compile(r"(.+)_(macro|micro|weighted|binary)")


def label(name: str) -> str:
    """Return the display name of a metric: `F1, macro` for `f1_macro`. An unknown name loses its underscores."""
    averaged = _AVERAGED.fullmatch(name)
    if averaged and averaged[1] in LABELS:
        return f"{LABELS[averaged[1]]}, {averaged[2]}"
    return LABELS.get(name, name.replace("_", " "))


def words(name: str) -> str:
    """Return a name as words.

    `num_empty_documents` becomes `Empty documents`, and `num_train_of_label.cat` becomes `Train of label: cat`.
    """
    name, _, part = name.partition(".")
    text = LABELS.get(name, name.removeprefix("num_").replace("_", " "))
    return text[:1].upper() + text[1:] + (f": {part}" if part else "")


def show_value(value: Any) -> str:
    """Return a metric's value for a table, with four decimals, or fewer for large numbers."""
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


def metrics_with_curves(runs: Sequence[Run]) -> list[str]:
    """Return at most `MAX_CURVES` metrics, without the loss, that some run has evaluated at least twice.

    Of the averages of precision, recall and F1 it returns only the macro F1, because their curves look alike.
    """
    # Whether some run has evaluated a metric twice, by name.
    found: dict[str, bool] = {}
    unusable = set(NOT_A_SCORE | FOLLOWS_FROM_LOSS)
    for run in runs:
        first_step: dict[str, int] = {}
        for line in run.evals:
            for name, value in line.items():
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    unusable.add(name)
                elif value is not None:
                    again = first_step.setdefault(name, line["step"]) != line["step"]
                    found[name] = found.get(name, False) or again
    names = [name for name, is_curve in found.items() if is_curve and name not in unusable]
    return [name for name in names if not is_variant(name, names)][:MAX_CURVES]


def is_variant(name: str, names: Sequence[str]) -> bool:
    """Return whether a metric is an average of precision, recall or F1 that the macro F1 in `names` represents."""
    averaged = _AVERAGED.fullmatch(name)
    return name != "f1_macro" and averaged is not None and averaged[1] in LABELS and "f1_macro" in names
