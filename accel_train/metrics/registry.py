"""Metrics by name: the package's own, which need no network, and with permission the hub's."""

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evaluate import EvaluationModule

_AVERAGED = {
    f"{name}{suffix}": class_name
    for name, class_name in (("precision", "Precision"), ("recall", "Recall"), ("f1", "F1"))
    for suffix in ("", "_binary", "_macro", "_micro", "_weighted")
}
METRICS = {
    "accuracy": "Accuracy",
    **_AVERAGED,
    "mcc": "MCC",
    "auroc": "AUROC",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "mean_iou": "MeanIou",
    "perplexity": "Perplexity",
}
"""Names and the classes of accel_train.metrics.modules, which is imported when a metric is loaded: `evaluate` takes seconds."""


def load_metric(name: str, *, allow_hub: bool = False, **options: Any) -> "EvaluationModule":
    """A metric to `add_batch` to and `compute`, alone or with others in `evaluate.combine([...])`.

    Args:
        name: one of METRICS; `f1` is the macro average, `f1_weighted` and the like another one.
        allow_hub: what is not in METRICS is loaded by `evaluate`, from the hub or a local script: code from there runs.
        options: of `evaluate`: `num_process`, `process_id` and an `experiment_id` they share, `cache_dir`, `timeout`.
            In one process values are kept in memory; several exchange them through files in `cache_dir`.

    Raises:
        ValueError: there is no such metric; the text names the nearest.
    """
    options = {"keep_in_memory": options.get("num_process", 1) == 1, **options}
    if name in METRICS:
        modules = importlib.import_module("accel_train.metrics.modules")
        average = name.rpartition("_")[2] if name in _AVERAGED and "_" in name else None
        module: EvaluationModule = getattr(modules, METRICS[name])(**{"config_name": average, **options})
        return module
    near = get_close_matches(name, METRICS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(METRICS))}."
    if not allow_hub:
        raise ValueError(
            f"metric {name!r} is none of accel_train's; {hint} "
            "The hub's are loaded with --evaluate.allow_hub_metrics true, which runs code from there"
        )
    from evaluate import loading

    try:
        hub_module: EvaluationModule = loading.load(name, **options)
    except (OSError, ImportError) as error:  # no such module, no network; a package that it needs
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"metric {name!r} is none of accel_train's and cannot be loaded from the hub: {reason[0]}; {hint}"
        ) from error
    return hub_module
