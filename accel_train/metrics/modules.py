"""The metrics as modules of Hugging Face's `evaluate`: no network, no remote code, the arithmetic of `scores.py`.

`add_batch` takes lists, numpy arrays or tensors; `compute` returns a dict, and None on processes other than the first.
"""

from typing import Any

import evaluate
import numpy as np
from datasets import Features, Sequence, Value
from numpy.typing import ArrayLike, NDArray

from accel_train.metrics.classes import average as average_over_classes
from accel_train.metrics.classes import class_figures
from accel_train.metrics.scores import (
    auroc,
    intersection_over_union,
    matthews_correlation,
    mean_of_known,
    pearson_correlation,
    perplexity,
    spearman_correlation,
)

LABELS = {"predictions": Value("int64"), "references": Value("int64")}
NUMBERS = {"predictions": Value("float64"), "references": Value("float64")}


class Accuracy(evaluate.Metric):
    """The share of predictions that are right; `accuracy`."""

    def _info(self) -> evaluate.MetricInfo:
        return _describe(self, LABELS)

    def _compute(self, *, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        right = np.asarray(predictions) == np.asarray(references)
        return {"accuracy": float(right.mean()) if right.size else float("nan")}


class Precision(evaluate.Metric):
    """Of the samples given a label, the share that have it; `precision`.

    `compute(average=...)` or `config_name`: macro (default), micro, weighted, or binary: of `pos_label` (1) alone.
    """

    def _info(self) -> evaluate.MetricInfo:
        return _describe(self, LABELS)

    def _compute(self, **inputs: Any) -> dict[str, float]:
        return _averaged("precision", "precision", self.config_name, **inputs)


class Recall(evaluate.Metric):
    """Of the samples that have a label, the share that are given it; `recall`.

    `compute(average=...)` or `config_name`: macro (default), micro, weighted, or binary: of `pos_label` (1) alone.
    """

    def _info(self) -> evaluate.MetricInfo:
        return _describe(self, LABELS)

    def _compute(self, **inputs: Any) -> dict[str, float]:
        return _averaged("recall", "recall", self.config_name, **inputs)


class F1(evaluate.Metric):
    """The harmonic mean of precision and recall; `f1`.

    `compute(average=...)` or `config_name`: macro (default), micro, weighted, or binary: of `pos_label` (1) alone.
    """

    def _info(self) -> evaluate.MetricInfo:
        return _describe(self, LABELS)

    def _compute(self, **inputs: Any) -> dict[str, float]:
        return _averaged("f1", "f1-score", self.config_name, **inputs)


class MCC(evaluate.Metric):
    """Matthews' correlation of labels and predictions, for any number of classes; `mcc`."""

    def _info(self) -> evaluate.MetricInfo:
        return _describe(self, LABELS)

    def _compute(self, *, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"mcc": matthews_correlation(_confusion(references, predictions)[0])}


class AUROC(evaluate.Metric):
    """The exact area under the ROC curve; `auroc`.

    `prediction_scores`, of which only the order matters: a number a sample for labels 0 and 1, or a list with one for each
    class: one-versus-rest, averaged over the classes that occur and are not alone (of two columns, the second counts).
    """

    def _info(self) -> evaluate.MetricInfo:
        labels, score = {"references": Value("int64")}, Value("float64")
        return _describe(self, {"prediction_scores": score, **labels}, {"prediction_scores": Sequence(score), **labels})

    def _compute(self, *, prediction_scores: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"auroc": auroc(prediction_scores, references)}


class Pearson(evaluate.Metric):
    """Pearson's correlation; `pearson`, NaN where one side is constant."""

    def _info(self) -> evaluate.MetricInfo:
        return _describe(self, NUMBERS)

    def _compute(self, *, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"pearson": pearson_correlation(predictions, references)}


class Spearman(evaluate.Metric):
    """Spearman's rank correlation; `spearman`, NaN where one side is constant."""

    def _info(self) -> evaluate.MetricInfo:
        return _describe(self, NUMBERS)

    def _compute(self, *, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"spearman": spearman_correlation(predictions, references)}


class MeanIou(evaluate.Metric):  # `evaluate` would call a MeanIoU mean_io_u
    """Intersection over union of masks; `mean_iou` over the classes that occur, `per_class_iou` (NaN for others), `pixel_accuracy`.

    Masks are (H, W) label ids and may differ in size. `compute(num_labels=..., ignore_index=None)`: pixels whose reference
    is `ignore_index`, or no id below `num_labels`, do not count.
    """

    def _info(self) -> evaluate.MetricInfo:
        mask = Sequence(Sequence(Value("int32")))
        return _describe(self, {"predictions": mask, "references": mask})

    def _compute(
        self, *, predictions: list[Any], references: list[Any], num_labels: int, ignore_index: int | None = None
    ) -> dict[str, Any]:
        confusion = np.zeros((num_labels, num_labels), dtype=np.int64)
        for mask in zip(predictions, references, strict=True):
            said, truth = (np.asarray(rows, dtype=np.int64) for rows in mask)
            if said.shape != truth.shape:
                raise ValueError(f"a mask of {truth.shape} is compared with one of {said.shape}; resize the prediction")
            valid = (truth >= 0) & (truth < num_labels) & (said >= 0) & (said < num_labels)
            if ignore_index is not None:
                valid &= truth != ignore_index
            cells = truth[valid] * num_labels + said[valid]
            confusion += np.bincount(cells, minlength=num_labels**2).reshape(num_labels, num_labels)
        ious = intersection_over_union(confusion)
        accuracy = float(np.trace(confusion) / confusion.sum()) if confusion.any() else float("nan")
        return {"mean_iou": mean_of_known(ious), "per_class_iou": ious.tolist(), "pixel_accuracy": accuracy}


class Perplexity(evaluate.Metric):
    """exp of the mean loss in nats; `perplexity`. It loads no model: it is given losses.

    `loss_sums` and `num_targets`, of which each pair is a batch, a document or a single token (then `num_targets` is 1):
    exp(sum of loss_sums / sum of num_targets).
    """

    def _info(self) -> evaluate.MetricInfo:
        return _describe(self, {"loss_sums": Value("float64"), "num_targets": Value("int64")})

    def _compute(self, *, loss_sums: ArrayLike, num_targets: ArrayLike) -> dict[str, float]:
        total = int(np.sum(np.asarray(num_targets, dtype=np.int64)))
        loss = float(np.sum(np.asarray(loss_sums, dtype=np.float64)))
        return {"perplexity": perplexity(loss / total) if total else float("nan")}


def _describe(module: evaluate.Metric, *features: dict[str, Any]) -> evaluate.MetricInfo:
    """What `evaluate` wants to know of a module; more than one of `features` are alternatives."""
    schemas = [Features(columns) for columns in features]
    # As numpy arrays labels take a tenth of the memory; numbers would come back as fp32, and nested columns cannot be.
    integers = len(schemas) == 1 and all(column == Value("int64") for column in schemas[0].values())
    text = type(module).__doc__ or ""
    return evaluate.MetricInfo(
        description=text,
        citation="",
        inputs_description=text,
        features=schemas if len(schemas) > 1 else schemas[0],
        format="numpy" if integers else None,
    )


def _confusion(references: ArrayLike, predictions: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(C, C) counts, rows the truth, over the ids that occur, and those ids in order."""
    pairs = np.stack([np.asarray(references, dtype=np.int64), np.asarray(predictions, dtype=np.int64)])
    ids, flat = np.unique(pairs, return_inverse=True)
    truth, said = flat.reshape(pairs.shape)
    cells = np.bincount(truth * len(ids) + said, minlength=len(ids) ** 2)
    return cells.reshape(len(ids), len(ids)), ids


def _averaged(
    key: str,
    figure: str,
    default_average: str,
    *,
    predictions: ArrayLike,
    references: ArrayLike,
    average: str | None = None,
    pos_label: int = 1,
) -> dict[str, float]:
    """One figure, averaged; under `f1`, or `f1_weighted` if the module was loaded for that average."""
    kind = average or {"default": "macro"}.get(default_average, default_average)
    if kind not in ("binary", "macro", "micro", "weighted"):
        raise ValueError(f"average={kind!r} is unknown; there are binary, macro, micro and weighted")
    confusion, ids = _confusion(references, predictions)
    figures = class_figures(confusion)
    if kind == "binary":
        if len(ids) > 2 or (len(ids) == 2 and pos_label not in ids):
            raise ValueError(
                f"average='binary' needs two classes, one of them pos_label={pos_label}, and the labels are {ids.tolist()}; use macro, micro or weighted"
            )
        value = float(figures.rates()[figure][ids == pos_label].sum())
    else:
        value = average_over_classes(figures, kind)[figure]
    return {key if default_average == "default" else f"{key}_{default_average}": value}
