"""The metrics as modules of Hugging Face's `evaluate`: no network, no remote code, the arithmetic of scikit-learn and scipy.

`add_batch` takes lists, numpy arrays or tensors; `compute` returns a dict, and None on processes other than the first.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import evaluate
import numpy as np
import torch
from datasets import Features, Sequence, Value
from numpy.typing import ArrayLike
from sklearn import metrics

from accel_train.metrics import scores
from accel_train.metrics.tally import confusion_counts

LABELS = {"predictions": Value("int64"), "references": Value("int64")}
NUMBERS = {"predictions": Value("float64"), "references": Value("float64")}
MASKS = dict.fromkeys(("predictions", "references"), Sequence(Sequence(Value("int32"))))
SCORES = {"prediction_scores": Value("float64"), "references": Value("int64")}
SCORES_OF_CLASSES = {**SCORES, "prediction_scores": Sequence(Value("float64"))}
LOSSES = {"loss_sums": Value("float64"), "num_targets": Value("int64")}

Function = Callable[..., Any]


def _module(*schemas: dict[str, Any]) -> Callable[[Function], type[evaluate.Metric]]:
    """Make a function, with its name and docstring, a module of `evaluate` for columns of a schema (one of several)."""

    def make(function: Function) -> type[evaluate.Metric]:
        def info(module: evaluate.Metric) -> evaluate.MetricInfo:
            return _info(function.__doc__ or "", *schemas)

        def compute(module: evaluate.Metric, **inputs: Any) -> dict[str, Any]:
            found = function(**inputs)
            return found if isinstance(found, dict) else {function.__name__: found}

        members = {"__doc__": function.__doc__, "__module__": __name__, "_info": info, "_compute": compute}
        return type(function.__name__, (evaluate.Metric,), members)

    return make


def _info(text: str, *schemas: dict[str, Any]) -> evaluate.MetricInfo:
    # As numpy arrays labels take a tenth of the memory; numbers would come back as fp32, and nested columns cannot be.
    features = [Features(columns) for columns in schemas]
    return evaluate.MetricInfo(
        description=text,
        citation="",
        inputs_description=text,
        features=features if len(features) > 1 else features[0],
        format="numpy" if schemas == (LABELS,) else None,
    )


def _score(score: Function, predictions: ArrayLike, references: ArrayLike, **how: Any) -> float:
    """scikit-learn's score of labels; NaN without a sample."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A single label was found")  # Matthews' correlation is 0 then
        return float(score(references, predictions, **how)) if len(np.asarray(references)) else math.nan


class _Averaged(evaluate.Metric):
    """`compute(average=...)` or `config_name`: macro (default), micro, weighted, or binary: of `pos_label` (1) alone."""

    score: Function

    def _info(self) -> evaluate.MetricInfo:
        return _info(f"{type(self).__doc__}\n\n{_Averaged.__doc__}", LABELS)

    def _compute(self, *, average: str | None = None, pos_label: int = 1, **labels: ArrayLike) -> dict[str, float]:
        chosen = None if self.config_name == "default" else self.config_name
        how = {"average": average or chosen or "macro", "pos_label": pos_label, "zero_division": 0}
        return {"_".join(filter(None, (self.name, chosen))): _score(type(self).score, **labels, **how)}


class precision(_Averaged):  # `evaluate` names a module after its class
    """The share of the samples given a label that have it; `precision`."""

    score = metrics.precision_score


class recall(_Averaged):
    """The share of the samples that have a label that are given it; `recall`."""

    score = metrics.recall_score


class f1(_Averaged):
    """The harmonic mean of precision and recall; `f1`."""

    score = metrics.f1_score


@_module(LABELS)
def accuracy(**labels: ArrayLike) -> float:
    """The share of predictions that are right; `accuracy`."""
    return _score(metrics.accuracy_score, **labels)


@_module(LABELS)
def mcc(**labels: ArrayLike) -> float:
    """Matthews' correlation of labels and predictions, for any number of classes; `mcc`."""
    return _score(metrics.matthews_corrcoef, **labels)


@_module(SCORES, SCORES_OF_CLASSES)
def auroc(prediction_scores: ArrayLike, references: ArrayLike) -> float:
    """The exact area under the ROC curve; `auroc`.

    `prediction_scores`, of which only the order matters: a number a sample for labels 0 and 1, or a list with one for each
    class: one-versus-rest, averaged over the classes that occur and are not alone (of two columns, the second counts).
    """
    return scores.auroc(prediction_scores, references)


@_module(NUMBERS)
def pearson(predictions: ArrayLike, references: ArrayLike) -> float:
    """Pearson's correlation; `pearson`, NaN where one side is constant."""
    return scores.pearson_correlation(predictions, references)


@_module(NUMBERS)
def spearman(predictions: ArrayLike, references: ArrayLike) -> float:
    """Spearman's rank correlation; `spearman`, NaN where one side is constant."""
    return scores.spearman_correlation(predictions, references)


@_module(MASKS)
def mean_iou(
    predictions: list[Any], references: list[Any], num_labels: int, ignore_index: int | None = None
) -> dict[str, Any]:
    """Intersection over union of masks; `mean_iou` over the classes that occur, `per_class_iou` (NaN for others), `pixel_accuracy`.

    Masks are (H, W) label ids and may differ in size. `compute(num_labels=..., ignore_index=None)`: pixels whose reference
    is `ignore_index`, or no id below `num_labels`, do not count.
    """
    confusion = np.zeros((num_labels, num_labels), dtype=np.int64)
    for mask in zip(predictions, references, strict=True):
        predicted, truth = (np.asarray(rows, dtype=np.int64) for rows in mask)
        if predicted.shape != truth.shape:
            raise ValueError(
                f"a mask of {truth.shape} is compared with one of {predicted.shape}; resize the prediction"
            )
        if ignore_index is not None:
            truth = np.where(truth == ignore_index, -1, truth)
        confusion += confusion_counts(torch.from_numpy(truth), torch.from_numpy(predicted), num_labels).numpy()
    found = scores.segmentation_scores(confusion, [])
    return {**found.metrics, "per_class_iou": scores.intersection_over_union(confusion).tolist()}


@_module(LOSSES)
def perplexity(loss_sums: ArrayLike, num_targets: ArrayLike) -> float:
    """exp of the mean loss in nats; `perplexity`. It loads no model: it is given losses.

    `loss_sums` and `num_targets`, of which each pair is a batch, a document or a single token (then `num_targets` is 1):
    exp(sum of loss_sums / sum of num_targets).
    """
    total = int(np.sum(np.asarray(num_targets, dtype=np.int64)))
    loss = float(np.sum(np.asarray(loss_sums, dtype=np.float64)))
    return scores.perplexity(loss / total) if total else math.nan
