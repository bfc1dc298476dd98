"""Further metrics of a text classifier by name (`evaluate.metrics`), computed from single rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.data.labels import LabelScheme
from accel_train.metrics import METRICS, load_metric
from accel_train.recipe import Recipe

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


def check_metrics(recipe: Recipe, scheme: LabelScheme) -> None:
    """Load each metric once, before anything is trained, and refuse what does not fit the labels.

    Raises:
        ValueError: there is no such metric, or it judges something else.
    """
    for name in recipe.evaluate.metrics:
        load_metric(name, allow_hub=recipe.evaluate.allow_hub_metrics)
        fits = {
            "single_label": name not in (*_OF_NUMBERS, *_OF_OTHER_TASKS),
            "multi_label": False,  # the package's modules compare one label a sample
            "regression": name in _OF_NUMBERS,
        }[scheme.problem_type]
        if name in METRICS and not fits:
            raise ValueError(
                f"evaluate.metrics names {name!r}, which does not fit a {scheme.problem_type} problem ({scheme.reason}); "
                "leave it out: what fits is reported anyway"
            )
