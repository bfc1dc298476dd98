"""From counts to scores, with the definitions (and, to rounding, the values) of scikit-learn and scipy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accel_train.metrics.classes import (
    AVERAGES,
    ClassFigures,
    average,
    class_figures,
    format_report,
    report_dict,
)
from accel_train.task import Scores

Floats = NDArray[np.float64]


def classification_scores(confusion: ArrayLike, label_names: Sequence[str]) -> Scores:
    """Accuracy, precision, recall and F1 (`_macro`, `_micro`, `_weighted`) and Matthews' correlation of a confusion matrix.

    Args:
        confusion: (C, C) counts, rows are the truth.
        label_names: C names.

    A class that occurs neither in the truth nor among the predictions is left out of averages, as scikit-learn does; one
    that occurs and is never predicted has precision 0. Without a single sample every score is NaN.
    `details["classification"]` holds scikit-learn's `classification_report` as a dict and as text, and the matrix.
    """
    matrix = np.asarray(confusion).astype(np.int64)
    figures = class_figures(matrix)
    occurs = figures.occurs()
    accuracy = _share(int(np.trace(matrix)), int(matrix.sum()))
    averages = {kind: average(figures.only(occurs), kind) for kind in AVERAGES}
    report = report_dict(
        figures, occurs, label_names, {kind: averages[kind] for kind in ("macro", "weighted")}, accuracy
    )
    details = {
        "label_names": list(label_names),
        "report": report,
        "report_text": format_report(report),
        "confusion_matrix": matrix.tolist(),
    }
    metrics = {"accuracy": accuracy, **_flat(averages), "mcc": matthews_correlation(matrix)}
    return Scores(metrics, {"classification": details})


def multilabel_scores(counts: ArrayLike, label_names: Sequence[str]) -> Scores:
    """Precision, recall and F1 (`_macro`, `_micro`, `_weighted`) and the Hamming loss of labels that may occur together.

    Args:
        counts: (C, 4) true positives, false positives, false negatives, true negatives of each label.
        label_names: C names.

    All labels count in averages, also those that never occur (with 0), as in scikit-learn. NaN without
    a single sample.
    """
    table = np.asarray(counts).astype(np.int64).reshape(-1, 4)
    figures = ClassFigures(*table[:, :3].T)
    every = np.full(len(table), table.sum() > 0)
    averages = {kind: average(figures.only(every), kind) for kind in AVERAGES}
    report = report_dict(figures, every, label_names, {kind: averages[kind] for kind in ("micro", "macro", "weighted")})
    details = {"label_names": list(label_names), "report": report, "report_text": format_report(report)}
    hamming_loss = _share(int(table[:, 1:3].sum()), int(table.sum()))
    return Scores({**_flat(averages), "hamming_loss": hamming_loss}, {"classification": details})


def segmentation_scores(confusion: ArrayLike, label_names: Sequence[str]) -> Scores:
    """Mean intersection over union of the classes that occur (in the truth or the prediction), and the share of right pixels.

    `confusion` is (C, C) pixel counts, rows are the truth. `details["segmentation"]["iou"]` has None for a class that
    does not occur.
    """
    matrix = np.asarray(confusion).astype(np.int64)
    ious = intersection_over_union(matrix)
    pixel_accuracy = _share(int(np.trace(matrix)), int(matrix.sum()))
    details = {
        "label_names": list(label_names),
        "iou": [None if math.isnan(iou) else iou for iou in ious.tolist()],
        "pixel_accuracy": pixel_accuracy,
        "confusion_matrix": matrix.tolist(),
    }
    metrics = {"mean_iou": mean_of_known(ious), "pixel_accuracy": pixel_accuracy}
    return Scores(metrics, {"segmentation": details})


def regression_scores(
    moments: ArrayLike, rows_predictions: ArrayLike | None = None, rows_targets: ArrayLike | None = None
) -> Scores:
    """Errors, r² and correlations: mse, rmse, mae, r2, pearson, and spearman if the single values are given.

    Args:
        moments: (8,) as `tally.moments` counts them. r² and Pearson's correlation lose digits if the values' mean is
            large beside their spread (at a ratio of 1e6, about 12 of 16).
        rows_predictions, rows_targets: (N,) the values themselves; with them nothing is lost, and Spearman's is known.
    """
    n, sum_p, sum_t, sum_pp, sum_tt, sum_pt, sum_absolute, sum_squared = np.asarray(moments, dtype=np.float64).tolist()
    if n == 0:
        metrics = dict.fromkeys(("mse", "rmse", "mae", "r2", "pearson"), math.nan)
    else:
        mse = sum_squared / n
        spread_p, spread_t = sum_pp - sum_p * sum_p / n, sum_tt - sum_t * sum_t / n
        covariance = sum_pt - sum_p * sum_t / n
        known = spread_p > 0 and spread_t > 0
        metrics = {
            "mse": mse,
            "rmse": math.sqrt(mse) if mse >= 0 else math.nan,
            "mae": sum_absolute / n,
            "r2": _r2(sum_squared, spread_t),
            "pearson": _clip(covariance / math.sqrt(spread_p) / math.sqrt(spread_t)) if known else math.nan,
        }
    if rows_predictions is not None and rows_targets is not None:
        predictions, targets = _floats(rows_predictions), _floats(rows_targets)
        spread = float(((targets - targets.mean()) ** 2).sum()) if len(targets) else math.nan
        metrics["r2"] = _r2(float(((targets - predictions) ** 2).sum()), spread)
        metrics["pearson"] = pearson_correlation(predictions, targets)
        metrics["spearman"] = spearman_correlation(predictions, targets)
    return Scores(metrics)


def auroc_from_histogram(histogram: ArrayLike, *, may_occur_together: bool = False) -> float:
    """Area under the ROC curve from the counts of `tally.score_histogram`: (C, 2, bins).

    With two classes that of the second (scikit-learn's binary one), with more the mean of one-versus-rest over the
    classes that have samples and are not alone; NaN where there is none. Samples of a class and of the rest that share
    a bin count half, so it is wrong by half their share of all pairs at most: `auroc_error_bound`. Labels that
    `may_occur_together` count each for itself, also where there are two.
    """
    problems = _binary_problems(histogram, may_occur_together)
    return mean_of_known([_area(positives, negatives) for negatives, positives in problems])


def auroc_error_bound(histogram: ArrayLike) -> float:
    """How far `auroc_from_histogram` can be from the exact area, for these very counts.

    Half the share of pairs (a sample of the class, one of the rest) whose scores lie in one bin. Scores that are equal
    count half by definition, so with ties the true error is smaller.
    """
    bounds = []
    for negatives, positives in _binary_problems(histogram):
        pairs = negatives.sum() * positives.sum()
        bounds.append(float((negatives * positives).sum() / (2 * pairs)) if pairs else math.nan)
    return mean_of_known(bounds)


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve, exactly: of (N,) scores with labels 0 and 1, or one-versus-rest of (N, C) scores.

    Several columns are averaged as in `auroc_from_histogram`. NaN if a score is NaN, or no class can be judged.
    """
    values, truth = _floats(scores), np.asarray(labels)
    if values.ndim == 2 and values.shape[1] == 2:
        values = values[:, 1]
    if values.ndim == 1:
        return _exact_area(values, truth == 1)
    return mean_of_known([_exact_area(values[:, label], truth == label) for label in range(values.shape[1])])


def matthews_correlation(confusion: ArrayLike) -> float:
    """Matthews' correlation of C classes (Gorodkin 2004): 0 where truth or prediction has one class only, NaN if empty."""
    matrix = np.asarray(confusion).astype(np.int64)
    # Products of pixel counts overflow 64 bits: Python's integers do not.
    truth, said = matrix.sum(1).tolist(), matrix.sum(0).tolist()
    total, correct = sum(truth), int(np.trace(matrix))
    if total == 0:
        return math.nan
    covariance = correct * total - sum(t * p for t, p in zip(truth, said, strict=True))
    spread = (total**2 - sum(p * p for p in said)) * (total**2 - sum(t * t for t in truth))
    return covariance / math.sqrt(spread) if spread else 0.0


def intersection_over_union(confusion: ArrayLike) -> Floats:
    """(C,) of each class; NaN where it occurs neither in the truth nor in the prediction."""
    matrix = np.asarray(confusion).astype(np.int64)
    union = matrix.sum(0) + matrix.sum(1) - np.diag(matrix)
    return np.where(union > 0, np.diag(matrix) / np.maximum(union, 1), np.nan)


def pearson_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """NaN for fewer than two values, and where one side is constant."""
    x, y = _floats(first), _floats(second)
    if len(x) < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return _clip(float(np.dot(x / np.linalg.norm(x), y / np.linalg.norm(y))))


def spearman_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of theirs. NaN as for Pearson's, and with NaN."""
    x, y = _floats(first), _floats(second)
    if np.isnan(x).any() or np.isnan(y).any():
        return math.nan
    return pearson_correlation(_ranks(x), _ranks(y))


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinity where that is too large for a float."""
    return math.exp(loss) if not loss > 709 else math.inf


def mean_of_known(values: ArrayLike) -> float:
    """The mean without NaN; NaN if nothing is left."""
    array = _floats(values)
    known = array[~np.isnan(array)]
    return float(known.mean()) if len(known) else math.nan


def _flat(averages: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    names = {"precision": "precision", "recall": "recall", "f1-score": "f1"}
    return {f"{names[name]}_{kind}": averages[kind][name] for name in names for kind in ("macro", "micro", "weighted")}


def _binary_problems(histogram: ArrayLike, may_occur_together: bool = False) -> list[tuple[Floats, Floats]]:
    counts = _floats(histogram)
    chosen = counts[1:] if len(counts) == 2 and not may_occur_together else counts
    return [(of_class[0], of_class[1]) for of_class in chosen]


def _area(positives: Floats, negatives: Floats) -> float:
    """The share of pairs in which the positive has the higher score; pairs of one bin count half."""
    pairs = positives.sum() * negatives.sum()
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else math.nan


def _exact_area(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Mann and Whitney's U of the positives over the number of pairs."""
    num_positive = int(positive.sum())
    pairs = num_positive * (len(positive) - num_positive)
    if not pairs or np.isnan(scores).any():
        return math.nan
    return float((_ranks(scores)[positive].sum() - num_positive * (num_positive + 1) / 2) / pairs)


def _ranks(values: Floats) -> Floats:
    """1..N; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _r2(squared_error: float, spread: float) -> float:
    """1 for a perfect prediction of constant targets, 0 for any other of them, as in scikit-learn."""
    if math.isnan(spread) or math.isnan(squared_error):
        return math.nan
    return 1 - squared_error / spread if spread > 0 else float(squared_error == 0)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _clip(correlation: float) -> float:
    return max(-1.0, min(1.0, correlation))


def _floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float64)
