"""Metrics by name, as modules of Hugging Face's `evaluate`, with the arithmetic of scikit-learn and scipy.

They need no network and no remote code. `add_batch` takes lists, numpy arrays, or tensors. `compute` returns a dict on
the first process and None on the others. Loading a metric imports `evaluate`, and the import takes seconds.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from accel_train.core.format import did_you_mean
from accel_train.core.metric_names import AVERAGED, AVERAGES
from accel_train.metrics import scores
from accel_train.task import load_function

if TYPE_CHECKING:
    from evaluate import EvaluationModule

_LABELS, _NUMBERS, _MASKS = (
    dict.fromkeys(("predictions", "references"), kind) for kind in ("int64", "float64", [["int32"]])
)
_SCORES = tuple({"prediction_scores": kind, "references": "int64"} for kind in ("float64", ["float64"]))
_CLASSES = ("single_label", "multi_label")


class _Definition(NamedTuple):
    usage: str
    score: Callable[..., Any]
    """Function that takes the columns by position and the options of `compute` by name. Returns a number or a dict of
    numbers."""
    schemas: tuple[dict[str, Any], ...] = (_LABELS,)
    """Types of the columns by name. Several schemas if columns may have several types."""
    problems: tuple[str, ...] = ()
    """Problems of `model.problem_type` whose predictions it scores."""


def _score_labels(function: str, predictions: ArrayLike, references: ArrayLike, **options: Any) -> float:
    """Return scikit-learn's score of labels, by the name of its function; NaN without samples."""
    from sklearn import metrics

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A single label was found")  # Matthews' correlation is 0 then
        score = getattr(metrics, function)
        return float(score(references, predictions, **options)) if len(np.asarray(references)) else math.nan


def _averaged(name: str, meaning: str) -> _Definition:
    usage = "`compute(average=...)` or `config_name`: macro (default), micro, weighted, or binary (`pos_label` alone)."
    score = partial(_score_labels, f"{name}_score", zero_division=0)
    return _Definition(f"{meaning}; `{name}`.\n\n{usage}", score, problems=_CLASSES)


def _mean_iou(
    predictions: list[Any], references: list[Any], num_labels: int, ignore_index: int | None = None
) -> dict[str, Any]:
    from torch import from_numpy

    from accel_train.metrics.tally import confusion_counts

    confusion = np.zeros((num_labels, num_labels), dtype=np.int64)
    for mask in zip(predictions, references, strict=True):
        predicted, truth = (np.asarray(rows, dtype=np.int64) for rows in mask)
        if predicted.shape != truth.shape:
            raise ValueError(f"prediction of {predicted.shape}, reference of {truth.shape}: resize the prediction")
        if ignore_index is not None:
            truth = np.where(truth == ignore_index, -1, truth)
        confusion += confusion_counts(from_numpy(truth), from_numpy(predicted), num_labels).numpy()
    found = scores.segmentation_scores(confusion, [])
    return {**found.metrics, "per_class_iou": scores.intersection_over_union(confusion).tolist()}


def _perplexity(loss_sums: ArrayLike, num_targets: ArrayLike) -> float:
    total = int(np.sum(np.asarray(num_targets, dtype=np.int64)))
    return scores.perplexity(float(np.sum(np.asarray(loss_sums, dtype=np.float64))) / total) if total else math.nan


_DEFINITIONS = {
    "accuracy": _Definition(
        "Share of right predictions; `accuracy`.", partial(_score_labels, "accuracy_score"), problems=_CLASSES
    ),
    "mcc": _Definition(
        "Matthews' correlation of labels and predictions, for any number of classes; `mcc`.",
        partial(_score_labels, "matthews_corrcoef"),
        problems=("single_label",),
    ),
    "precision": _averaged("precision", "Share of the samples given a label that have it"),
    "recall": _averaged("recall", "Share of the samples that have a label that are given it"),
    "f1": _averaged("f1", "Harmonic mean of precision and recall"),
    "auroc": _Definition(
        "Exact area under the ROC curve; `auroc`. Only the order of `prediction_scores` matters: a number per sample "
        "for labels 0 and 1, or a list with one per class: one-versus-rest, averaged over the classes that occur.",
        scores.auroc,
        _SCORES,
        _CLASSES,
    ),
    "pearson": _Definition(
        "Pearson's correlation; `pearson`, NaN if one side is constant.",
        scores.pearson_correlation,
        (_NUMBERS,),
        ("regression",),
    ),
    "spearman": _Definition(
        "Spearman's rank correlation; `spearman`, NaN if one side is constant.",
        scores.spearman_correlation,
        (_NUMBERS,),
        ("regression",),
    ),
    "mean_iou": _Definition(
        "Intersection over union of masks; `mean_iou` over the classes that occur, `per_class_iou` (NaN for others), "
        "and `pixel_accuracy`. Masks are (H, W) label ids and may differ in size. `compute(num_labels=..., "
        "ignore_index=None)` skips pixels whose reference is `ignore_index`, or not an id below `num_labels`.",
        _mean_iou,
        (_MASKS,),
    ),
    "perplexity": _Definition(
        "exp of the mean loss in nats, exp(sum of loss_sums / sum of num_targets); `perplexity`. It loads no model: "
        "a pair of `loss_sums` and `num_targets` is a batch, a document, or a token (`num_targets` 1).",
        _perplexity,
        ({"loss_sums": "float64", "num_targets": "int64"},),
    ),
}
METRICS = {name: (name, None) for name in _DEFINITIONS} | {
    f"{name}_{average}": (name, average) for name in AVERAGED for average in AVERAGES
}
"""Metrics by name, each with its module and the average that the module is configured for."""


def fits(name: str, problem: str) -> bool:
    """Return whether a metric of METRICS scores the predictions of a problem of `model.problem_type`."""
    base, average = METRICS[name]
    return problem in _DEFINITIONS[base].problems and (problem, average) != ("multi_label", "binary")


class OwnMetric:
    """A function of (predictions, references) that a recipe names as `module:function`."""

    inputs_description = ""

    def __init__(self, name: str) -> None:
        self._function = load_function("evaluate.metrics", name, "(predictions, references)")
        self._name = name.rpartition(":")[2]

    def compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        """Return the function's numbers by name. A single number has the function's name."""
        found = self._function(predictions, references)
        return found if isinstance(found, dict) else {self._name: found}


def load_metric(name: str, *, allow_hub: bool = False, **options: Any) -> "EvaluationModule | OwnMetric":
    """Return a metric with `add_batch` and `compute`, for use alone or in `evaluate.combine([...])`.

    Args:
        name: a name in METRICS (`f1` is the macro average). `module:function` has only `compute`.
        allow_hub: whether `evaluate` may load other metrics from the hub or a local script, and run their code.
        options: passed to `evaluate`: `num_process`, `process_id`, `cache_dir`, `timeout`, and a shared
            `experiment_id`. One process keeps values in memory. Several processes exchange files in `cache_dir`.

    Raises:
        ValueError: the metric does not exist. The message names the nearest metric.
    """
    options = {"keep_in_memory": options.get("num_process", 1) == 1, **options}
    if name in METRICS:
        base, average = METRICS[name]
        return _module(base)(**{"config_name": average, **options})
    if ":" in name:
        return OwnMetric(name)
    hint = did_you_mean(name, METRICS, f"there are {', '.join(sorted(METRICS))}.", show=repr)
    if not allow_hub:
        raise ValueError(
            f"accel_train has no metric {name!r}; {hint} "
            "Metrics of the hub are loaded with --evaluate.allow_hub_metrics true. This runs code from the hub"
        )
    from evaluate import loading

    try:
        hub_module: EvaluationModule = loading.load(name, **options)
    except (OSError, ImportError) as error:  # unknown module, no network, or a missing package
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"accel_train has no metric {name!r}, and it cannot be loaded from the hub: {reason[0]}; "
            f"{hint.removesuffix('.')}"
        ) from error
    return hub_module


@cache
def _module(name: str) -> "type[EvaluationModule]":
    """Return a metric as a class of `evaluate`. `evaluate` names a module after its class."""
    from datasets import Features, Value
    from evaluate import Metric, MetricInfo

    usage, score, schemas, _ = _DEFINITIONS[name]

    def feature(kind: Any) -> Any:
        return Value(kind) if isinstance(kind, str) else [feature(kind[0])]

    def info(module: "EvaluationModule") -> MetricInfo:
        features = [Features({column: feature(kind) for column, kind in schema.items()}) for schema in schemas]
        return MetricInfo(
            description=usage,
            citation="",
            inputs_description=usage,
            features=features if len(features) > 1 else features[0],
            # Labels take a tenth of the memory as numpy arrays. Numbers would come back as fp32. Nested columns are not
            # supported.
            format="numpy" if schemas == (_LABELS,) else None,
        )

    def compute(module: "EvaluationModule", **inputs: Any) -> dict[str, Any]:
        key = name
        if name in AVERAGED:
            chosen = "" if module.config_name == "default" else module.config_name
            inputs["average"] = inputs.get("average") or chosen or "macro"
            key = f"{name}_{chosen}".rstrip("_")
        columns = [inputs.pop(column) for column in schemas[0]]
        found = score(*columns, **inputs)
        return found if isinstance(found, dict) else {key: found}

    return type(name, (Metric,), {"__doc__": usage, "__module__": __name__, "_info": info, "_compute": compute})


def __getattr__(name: str) -> Any:
    """Return a metric's class by its name. `pickle` looks for the class here."""
    if name in _DEFINITIONS:
        return _module(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
