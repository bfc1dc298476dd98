"""The table of metrics: the label, direction, and number format of every name that a built-in task reports."""

import math
from collections.abc import Container
from typing import Any, NamedTuple

MISSING = "–"
AVERAGED = {"precision": "Precision", "recall": "Recall", "f1": "F1"}
AVERAGES = ("binary", "macro", "micro", "weighted")


class Metric(NamedTuple):
    """A metric as people see it."""

    label: str
    is_lower_better: bool = False
    places: int | None = 4
    """Decimal places. None: four significant digits, for values of any size."""
    follows_from_loss: bool = False
    variant_of: str = ""
    """Metric that represents it where both are reported, as a macro F1 the other averages over the classes."""
    is_share_of_rows: bool = False
    """Whether it counts each sample as right or wrong."""


METRICS = {
    "loss": Metric("Loss", is_lower_better=True, follows_from_loss=True),
    "uncalibrated_loss": Metric(
        "Loss before calibration", is_lower_better=True, follows_from_loss=True, variant_of="loss"
    ),
    "num_targets": Metric("Targets"),
    "perplexity": Metric("Perplexity", is_lower_better=True, places=None, follows_from_loss=True),
    "bits_per_byte": Metric("Bits per byte", is_lower_better=True, follows_from_loss=True),
    "token_accuracy": Metric("Token accuracy"),
    "accuracy": Metric("Accuracy", is_share_of_rows=True),
    "top_5_accuracy": Metric("Top-5 accuracy", is_share_of_rows=True),
    **{name: Metric(text) for name, text in AVERAGED.items()},
    **{
        f"{name}_{average}": Metric(f"{text}, {average}", variant_of="" if average == "binary" else "f1_macro")
        for name, text in AVERAGED.items()
        for average in AVERAGES
    },
    "mcc": Metric("Matthews correlation"),
    "auroc": Metric("AUROC"),
    "hamming_loss": Metric("Hamming loss", is_lower_better=True),
    "mse": Metric("Mean squared error", is_lower_better=True, places=None),
    "rmse": Metric("Root mean squared error", is_lower_better=True, places=None),
    "mae": Metric("Mean absolute error", is_lower_better=True, places=None),
    "r2": Metric("r²"),
    "pearson": Metric("Pearson correlation"),
    "spearman": Metric("Spearman correlation"),
    "mean_iou": Metric("Mean IoU"),
    "pixel_accuracy": Metric("Pixel accuracy"),
    "map": Metric("Mean average precision"),
    "map_50": Metric("mAP at IoU 0.5"),
    "map_75": Metric("mAP at IoU 0.75"),
    "bleu": Metric("BLEU", places=None),
    "chrf": Metric("chrF", places=None),
    "rouge1": Metric("ROUGE-1"),
    "rouge2": Metric("ROUGE-2"),
    "rougeL": Metric("ROUGE-L"),
    "exact_match": Metric("Exact match", is_share_of_rows=True),
    "has_answer_f1": Metric("F1 with an answer"),
    "no_answer_accuracy": Metric("Accuracy without an answer"),
    "best_f1": Metric("F1 at the best threshold"),
    "best_f1_threshold": Metric("Best threshold", places=None),
    "recall_at_1": Metric("Recall@1"),
    "recall_at_10": Metric("Recall@10"),
    "mrr_at_10": Metric("MRR@10"),
    "ndcg_at_10": Metric("nDCG@10"),
}
_OVER_CLASSES = (name for name, metric in METRICS.items() if metric.variant_of == "f1_macro")
OF_CLASSES = tuple(dict.fromkeys(("f1_macro", "accuracy", "mcc", *_OVER_CLASSES)))
"""Metrics of predicted classes."""
OF_EVERY_EVALUATION = ("loss", "num_targets")
"""Names that an evaluation of any task reports."""
LOWER_IS_BETTER = ("loss", "perplexity", "error", "mse", "mae", "bits_per_byte")
"""Words in the name of an unknown metric that make smaller values better. Otherwise, greater values are better."""


def metric_of(name: str) -> Metric | None:
    """Return the metric of a name, also of a named evaluation set: `loss`, `web/loss`. None if it is not known."""
    return METRICS.get(name.rpartition("/")[2])


def is_lower_better(name: str) -> bool:
    """Return whether smaller values of a metric are better. The name of an unknown metric decides by its words."""
    known = metric_of(name.removeprefix("eval_"))
    return any(word in name for word in LOWER_IS_BETTER) if known is None else known.is_lower_better


def label(name: str) -> str:
    """Return the display name of a metric: `F1, macro` for `f1_macro`, and `F1, macro, web` for `web/f1_macro`. The
    words of an unknown name: `My score`.
    """
    known, of_set = metric_of(name), name.split("/")[:-1]
    return ", ".join([known.label, *of_set]) if known else f"{name[:1].upper()}{name[1:]}".replace("_", " ")


def follows_from_loss(name: str) -> bool:
    """Return whether a metric is the loss, or the loss in another unit. That of a named set is not."""
    known = metric_of(name)
    return known is not None and known.follows_from_loss and not name.endswith("/loss")


def is_variant(name: str, names: Container[str]) -> bool:
    """Return whether another metric in `names` represents this one."""
    known = metric_of(name)
    return known is not None and known.variant_of in names and known.variant_of != name


def has_common_axis(name: str) -> bool:
    """Return whether a metric is a score up to 1, so that curves of several fit in one chart."""
    return name in METRICS and METRICS[name].places is not None and not METRICS[name].is_lower_better


def show_metric(name: str, value: Any) -> str:
    """Return the value of a metric as text, by its format in the table."""
    known = metric_of(name)
    return show_value(value, known.places if known else 4)


def show_value(value: Any, places: int | None = 4) -> str:
    """Return a value for a table, with four decimals by default, or fewer for large numbers."""
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
    usual = "#.4g" if places is None else f".{places}f"
    return format(value, usual if value == 0 or 1e-3 <= abs(value) < 1000 else ".4g")
