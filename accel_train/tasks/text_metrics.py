"""Further metrics of a text classifier by name (`evaluate.metrics`): of single rows, or counted where labels may occur together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train.data.labels import LabelScheme
from accel_train.metrics import METRICS, load_metric
from accel_train.metrics.scores import auroc_from_histogram
from accel_train.metrics.tally import histogram_bits, score_histogram
from accel_train.recipe import Recipe

_OF_LABELS = (
    "accuracy",
    "auroc",
    *(f"{name}{kind}" for name in ("precision", "recall", "f1") for kind in ("", "_macro", "_micro", "_weighted")),
)
_OF_NUMBERS = ("pearson", "spearman")
_OF_OTHER_TASKS = ("mean_iou", "perplexity")


@dataclass(frozen=True)
class FurtherMetrics:
    """What `evaluate.metrics` asks for."""

    names: tuple[str, ...]
    allow_hub: bool

    def compute(self, totals: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        """Every single number that the metrics return, from `rows_predictions`, `rows_labels` and `rows_scores`."""
        found: dict[str, float] = {}
        for name in self.names:
            metric = load_metric(name, allow_hub=self.allow_hub)
            references, said = totals["rows_labels"], totals["rows_predictions"]
            if "prediction_scores" in metric.inputs_description:
                result = metric.compute(prediction_scores=totals["rows_scores"], references=references)
            else:
                result = metric.compute(predictions=said, references=references)
            found |= {key: float(value) for key, value in (result or {}).items() if np.ndim(value) == 0}
        return found


@dataclass(frozen=True)
class MetricsOfLabels:
    """Those of the package that judge labels which may occur together: counted, so that memory stays flat."""

    names: tuple[str, ...]

    def count(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """What is counted beside `multilabel_counts`, of (N, C) logits and labels."""
        counted: dict[str, Tensor] = {}
        if "accuracy" in self.names:
            known = (labels >= 0).all(1)
            right = ((logits > 0) == (labels > 0)).all(1)
            counted["num_right"] = torch.stack([(right & known).sum(), known.sum()])
        if "auroc" in self.names:
            histogram = score_histogram(logits, labels, logits.shape[1])
            assert histogram is not None, "check_metrics refuses so many labels"
            counted["histogram"] = histogram
        return counted

    def compute(self, totals: Mapping[str, NDArray[Any]], averages: Mapping[str, float]) -> dict[str, float]:
        """accuracy: the share of samples all of whose labels are right; auroc: the mean of the labels' own; `f1` is the macro one."""
        found: dict[str, float] = {}
        for name in self.names:
            if name == "accuracy":
                right, known = totals["num_right"].tolist()
                found[name] = right / known if known else float("nan")
            elif name == "auroc":
                found[name] = auroc_from_histogram(totals["histogram"], may_occur_together=True)
            else:
                found[name] = averages[name if "_" in name else f"{name}_macro"]
        return found


def further_metrics(recipe: Recipe, scheme: LabelScheme) -> tuple[FurtherMetrics, MetricsOfLabels]:
    """What is computed from rows, and what is counted."""
    names = recipe.evaluate.metrics
    counted = tuple(name for name in names if name in METRICS) if scheme.problem_type == "multi_label" else ()
    of_rows = tuple(name for name in names if name not in counted)
    return FurtherMetrics(of_rows, recipe.evaluate.allow_hub_metrics), MetricsOfLabels(counted)


def check_metrics(recipe: Recipe, scheme: LabelScheme) -> None:
    """Load each metric once, before anything is trained, and refuse what does not fit the labels.

    Raises:
        ValueError: there is no such metric, or it judges something else.
    """
    for name in recipe.evaluate.metrics:
        load_metric(name, allow_hub=recipe.evaluate.allow_hub_metrics)
        fits = {
            "single_label": name not in (*_OF_NUMBERS, *_OF_OTHER_TASKS),
            "multi_label": name in _OF_LABELS,
            "regression": name in _OF_NUMBERS,
        }[scheme.problem_type]
        if name in METRICS and not fits:
            raise ValueError(
                f"evaluate.metrics names {name!r}, which does not fit a {scheme.problem_type} problem ({scheme.reason}); "
                "leave it out: what fits is reported anyway"
            )
        if scheme.problem_type == "multi_label" and name == "auroc" and histogram_bits(len(scheme.names)) is None:
            raise ValueError(f"evaluate.metrics: auroc of {len(scheme.names):,} labels is not counted; leave it out")
