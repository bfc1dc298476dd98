"""Compute scores from counts, with the definitions (and, up to rounding, the values) of scikit-learn and scipy.

scikit-learn takes samples, or a matrix's cells as weights, and returns the same values. But it takes 2 s to import and
2 s more for 1,000 classes (here 0.05 s). Its classification report leaves out the classes that do not occur.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accel_train.core.state import JsonRecord
from accel_train.task import Scores

Names = Sequence[str]

Floats = NDArray[np.float64]
_FIGURES = ("precision", "recall", "f1-score")
SUMMARY_ROWS = ("accuracy", "micro avg", "macro avg", "weighted avg")  # rows of a report that are not classes

Counts = NDArray[np.int64]  # (3, C): true positives, false positives and false negatives of each class


def classification_scores(confusion: ArrayLike, label_names: Names) -> Scores:
    """Return accuracy, precision, recall, F1, and Matthews' correlation from a confusion matrix.

    Precision, recall, and F1 come as `_macro`, `_micro`, and `_weighted`. `confusion` is (C, C), and its rows are the
    truth. Averages leave out a class that occurs neither in the truth nor among the predictions, as in scikit-learn. A
    class that is never predicted has precision 0. Without samples, every score is NaN. `details["classification"]`
    holds scikit-learn's `classification_report` as a dict and as text, and the matrix.
    """
    matrix = _integers(confusion)
    right = np.diag(matrix)
    counts = np.stack([right, matrix.sum(0) - right, matrix.sum(1) - right])
    accuracy = _share(int(np.trace(matrix)), int(matrix.sum()))
    metrics, details = _class_scores(counts, counts.sum(0) > 0, label_names, accuracy)
    details["confusion_matrix"] = matrix.tolist()
    return Scores({"accuracy": accuracy, **metrics, "mcc": matthews_correlation(matrix)}, {"classification": details})


def multilabel_scores(counts: ArrayLike, label_names: Names) -> Scores:
    """Return precision, recall, F1, and Hamming loss of labels that may occur together.

    Precision, recall, and F1 come as `_macro`, `_micro`, and `_weighted`. `counts` are (C, 4) true positives, false
    positives, false negatives, and true negatives. All labels count in averages, also labels that never occur (with 0),
    as in scikit-learn. Without samples, every score is NaN.
    """
    table = _integers(counts).reshape(-1, 4)
    every = np.full(len(table), table.sum() > 0)
    metrics, details = _class_scores(table[:, :3].T, every, label_names)
    hamming_loss = _share(int(table[:, 1:3].sum()), int(table.sum()))
    return Scores({**metrics, "hamming_loss": hamming_loss}, {"classification": details})


def entity_scores(counts: ArrayLike, types: Names, num_right: int, num_words: int) -> Scores:
    """Return precision, recall, F1, and `f1_macro` of entities, and the accuracy of words.

    Precision, recall, and F1 are micro averages, as in seqeval and CoNLL. `counts` are (types, 3): found, predicted,
    and true entities. Averages leave out a type that occurs neither in the truth nor among the predictions.
    `details["classification"]` is the report by type.
    """
    found, predicted, true = _integers(counts).reshape(-1, 3).T
    table = np.stack([found, predicted - found, true - found])
    metrics, details = _class_scores(table, table.sum(0) > 0, types)
    micro = {figure: metrics[f"{figure}_micro"] for figure in ("precision", "recall", "f1")}
    accuracy = _share(num_right, num_words)
    return Scores({**micro, "f1_macro": metrics["f1_macro"], "accuracy": accuracy}, {"classification": details})


def _class_scores(
    counts: Counts, known: NDArray[np.bool_], label_names: Names, accuracy: float | None = None
) -> tuple[dict[str, float], JsonRecord]:
    """Return averages over the `known` classes, and the report on all classes.

    The report is `classification_report(output_dict=True)`: figures by class name, then `accuracy` and averages. A
    class that is not known has None for its rates. A class with the name of an average is shown as `NAME (class)`.
    """
    means = _averages(counts[:, known])
    report: JsonRecord = {}
    for name, values, support, is_known in zip(label_names, _rates(counts).T.tolist(), counts[0] + counts[2], known):
        key = f"{name} (class)" if name in SUMMARY_ROWS else name
        report[key] = {**dict(zip(_FIGURES, values if is_known else [None] * 3)), "support": int(support)}
    # The micro average of classes that exclude each other is the accuracy.
    report |= {"micro avg": means["micro"]} if accuracy is None else {"accuracy": accuracy}
    report |= {f"{kind} avg": means[kind] for kind in ("macro", "weighted")}
    metrics = {
        f"{figure.removesuffix('-score')}_{kind}": means[kind][figure]
        for figure in _FIGURES
        for kind in ("macro", "micro", "weighted")
    }
    return metrics, {"label_names": list(label_names), "report": report, "report_text": _format_report(report)}


def _rates(counts: Counts) -> NDArray[np.float64]:
    """Return precision, recall, and F1 of each class, (3, C); 0 if the divisor is 0."""
    tp, fp, fn = counts
    wholes = np.stack([tp + fp, tp + fn, 2 * tp + fp + fn])
    return np.where(wholes > 0, np.stack([tp, tp, 2 * tp]) / np.maximum(wholes, 1), 0.0)


def _averages(counts: Counts) -> dict[str, dict[str, float]]:
    """Return average figures: `micro` over all samples, `macro` over classes, and `weighted` by the support of classes.

    Without classes, the figures are NaN.
    """
    support = counts[0] + counts[2]
    total, each = int(support.sum()), _rates(counts)
    means = {
        "micro": _rates(counts.sum(1)),
        "macro": each.sum(1) / max(len(support), 1),
        "weighted": (each * support).sum(1) / max(total, 1),
    }
    if not len(support):
        means = dict.fromkeys(means, np.full(3, math.nan))
    return {kind: {**dict(zip(_FIGURES, mean.tolist())), "support": total} for kind, mean in means.items()}


def _format_report(report: Mapping[str, Any]) -> str:
    """Return the report as text in scikit-learn's layout. None is shown as a dash."""
    width = max(map(len, (*report, "weighted avg")))

    def line(name: str, values: Sequence[float | None], support: int) -> str:
        cells = ("" if value is None else f"{value:.2f}" for value in values)
        return f"{name:>{width}} " + "".join(f" {cell or '-':>9}" for cell in cells) + f" {support:>9}"

    rows = {name: row for name, row in report.items() if name != "accuracy"}
    lines = {name: line(name, [row[figure] for figure in _FIGURES], row["support"]) for name, row in rows.items()}
    if "accuracy" in report:
        total = report["weighted avg"]["support"]
        lines["accuracy"] = f"{'accuracy':>{width}} {'':>20} {report['accuracy']:>9.2f} {total:>9}"
    classes = [lines[name] for name in lines if name not in SUMMARY_ROWS]
    heading = " " * width + " " + "".join(f" {figure:>9}" for figure in (*_FIGURES, "support"))
    return "\n".join([heading, "", *classes, "", *(lines[name] for name in SUMMARY_ROWS if name in lines)]) + "\n"


def segmentation_scores(confusion: ArrayLike, label_names: Names) -> Scores:
    """Return the mean intersection over union of the classes that occur, and the share of right pixels.

    `confusion` is (C, C) pixel counts, and its rows are the truth. `details["segmentation"]["iou"]` has None for a
    class that does not occur.
    """
    matrix = _integers(confusion)
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


def regression_scores(predictions: ArrayLike, targets: ArrayLike) -> Scores:
    """Return mse, rmse, mae, r2, pearson, and spearman of (N,) numbers; NaN without samples.

    r2 of constant targets is 1 for a perfect prediction and 0 for any other, as in scikit-learn.
    """
    predicted, truth = _floats(predictions), _floats(targets)
    if not len(truth):
        return Scores(dict.fromkeys(("mse", "rmse", "mae", "r2", "pearson", "spearman"), math.nan))
    errors = truth - predicted
    squared, spread = float((errors**2).sum()), float(((truth - truth.mean()) ** 2).sum())
    mse = squared / len(truth)
    metrics = {
        "mse": mse,
        "rmse": math.sqrt(mse),
        "mae": float(np.abs(errors).mean()),
        "r2": float(squared == 0) if spread == 0 else 1 - squared / spread,
        "pearson": pearson_correlation(predicted, truth),
        "spearman": spearman_correlation(predicted, truth),
    }
    return Scores(metrics)


def auroc_from_histogram(histogram: ArrayLike, *, may_occur_together: bool = False) -> float:
    """Return the area under the ROC curve from the counts of `tally.score_histogram`: (C, 2, bins).

    With two classes, it is the area of the second class, as in scikit-learn's binary case. With more classes, it is the
    mean of one-versus-rest over the classes with both positive and negative samples. The result is NaN without such a
    class. A pair of positive and negative samples in one bin counts half. So the error is at most half the share of
    such pairs.

    Args:
        may_occur_together: whether labels may occur together. Then each label counts separately, even with two labels.
    """
    counts = _floats(histogram)
    chosen = counts[1:] if len(counts) == 2 and not may_occur_together else counts
    return mean_of_known([_area(positives, negatives) for negatives, positives in chosen])


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Return the exact area under the ROC curve, from (N,) scores with labels 0 and 1, or from (N, C) scores.

    Two columns are judged by the second. More columns are judged one-versus-rest and averaged as in
    `auroc_from_histogram`. The result is NaN if a score is NaN, or if no class has both positive and negative samples.
    """
    values, truth = _floats(scores), np.asarray(labels)
    if values.ndim == 2 and values.shape[1] == 2:
        values = values[:, 1]
    if values.ndim == 1:
        return _exact_area(values, truth == 1)
    return mean_of_known([_exact_area(values[:, label], truth == label) for label in range(values.shape[1])])


def matthews_correlation(confusion: ArrayLike) -> float:
    """Return Matthews' correlation (Gorodkin 2004): 0 if truth or prediction has only one class, NaN if empty."""
    matrix = _integers(confusion)
    # Products of pixel counts overflow 64 bits. Python's integers do not.
    truth, predicted = matrix.sum(1).tolist(), matrix.sum(0).tolist()
    total, correct = sum(truth), int(np.trace(matrix))
    if total == 0:
        return math.nan
    covariance = correct * total - sum(t * p for t, p in zip(truth, predicted, strict=True))
    spread = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(t * t for t in truth))
    return covariance / math.sqrt(spread) if spread else 0.0


def intersection_over_union(confusion: ArrayLike) -> Floats:
    """Return the intersection over union of each class, (C,); NaN if it occurs neither in truth nor prediction."""
    matrix = _integers(confusion)
    union = matrix.sum(0) + matrix.sum(1) - np.diag(matrix)
    return np.where(union > 0, np.diag(matrix) / np.maximum(union, 1), np.nan)


def pearson_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Return Pearson's correlation; NaN for fewer than two values, NaN or infinite values, or a constant side."""
    return _correlation("pearsonr", first, second)


def spearman_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Return Pearson's correlation of the ranks. Equal values share their mean rank.

    The result is NaN as in `pearson_correlation`, but infinity has a rank.
    """
    return _correlation("spearmanr", first, second)


def _correlation(name: str, first: ArrayLike, second: ArrayLike) -> float:
    from scipy import stats  # 0.7 s

    x, y = _floats(first), _floats(second)
    if len(x) < 2:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns of constant and infinite values, and returns NaN
        return float(getattr(stats, name)(x, y).statistic)


def perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats; infinity if the result is too large for a float."""
    return math.exp(loss) if not loss > 709 else math.inf


def mean_of_known(values: ArrayLike) -> float:
    """Return the mean without NaN values; NaN if nothing is left."""
    array = _floats(values)
    known = array[~np.isnan(array)]
    return float(known.mean()) if len(known) else math.nan


def _area(positives: Floats, negatives: Floats) -> float:
    """Return the share of pairs in which the positive has the higher score. Pairs in one bin count half."""
    pairs = positives.sum() * negatives.sum()
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else math.nan


def _exact_area(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Return Mann and Whitney's U of the positives, divided by the number of pairs."""
    from scipy.stats import mannwhitneyu

    pairs = int(positive.sum()) * int((~positive).sum())
    if not pairs or np.isnan(scores).any():
        return math.nan
    return float(mannwhitneyu(scores[positive], scores[~positive], method="asymptotic").statistic) / pairs


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _integers(values: ArrayLike) -> NDArray[np.int64]:
    return np.asarray(values).astype(np.int64)


def _floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float64)
