"""Metrics by name: the package's own, which need no network, and with permission the hub's."""

import importlib
from typing import TYPE_CHECKING, Any

from accel_train.core.format import did_you_mean

if TYPE_CHECKING:
    from evaluate import EvaluationModule

_AVERAGED = {
    f"{name}{suffix}": name
    for name in ("precision", "recall", "f1")
    for suffix in ("", "_binary", "_macro", "_micro", "_weighted")
}
METRICS = _AVERAGED | {
    name: name for name in ("accuracy", "mcc", "auroc", "pearson", "spearman", "mean_iou", "perplexity")
}
"""Names, and their classes in `metrics.modules`, imported when a metric is loaded: `evaluate` takes seconds."""


def load_metric(name: str, *, allow_hub: bool = False, **options: Any) -> "EvaluationModule":
    """Return a metric with `add_batch` and `compute`, for use alone or in `evaluate.combine([...])`.

    `name` is one of METRICS (`f1` is the macro average); with `allow_hub`, others are loaded by `evaluate`, from the hub or a
    local script: code from there runs. `options` are those of `evaluate`: `num_process`, `process_id`, a shared
    `experiment_id`, `cache_dir`, `timeout`. In one process values are kept in memory; several exchange files in `cache_dir`.

    Raises:
        ValueError: there is no such metric; the message names the nearest.
    """
    options = {"keep_in_memory": options.get("num_process", 1) == 1, **options}
    if name in METRICS:
        modules = importlib.import_module(f"{__package__}.modules")
        average = name.rpartition("_")[2] if name in _AVERAGED and "_" in name else None
        module: EvaluationModule = getattr(modules, METRICS[name])(**{"config_name": average, **options})
        return module
    hint = did_you_mean(name, METRICS, f"there are {', '.join(sorted(METRICS))}.", show=repr)
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
