"""The headline numbers of a run: where each comes from, how it reads, and which end is good."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from accel_train.observe.curves import Curves
from accel_train.observe.metric_names import label, show_value
from accel_train.observe.progress import format_seconds
from accel_train.state import JsonRecord
from accel_train.task import TARGET_UNITS, target_rate


@dataclass(frozen=True)
class Run:
    """What a run left in its folder; `summary` is empty if it has not ended, `evaluation` if it was never evaluated."""

    curves: Curves
    summary: JsonRecord
    recipe_text: str
    evaluation: JsonRecord = field(default_factory=dict)
    """evaluation.json: `step`, `metrics`, `details`."""
    incidents: list[JsonRecord] = field(default_factory=list)
    """The records of its incidents, by step."""
    damage: list[str] = field(default_factory=list)
    """What of its files cannot be read, a sentence each."""

    @property
    def name(self) -> str:
        return self.curves.name

    def details(self, part: str) -> Any:
        """A part of evaluation.json's details, None where there is none."""
        details = self.evaluation.get("details")
        return details.get(part) if isinstance(details, Mapping) else None

    @property
    def targets(self) -> str:
        """`tokens`, `images` ...: what `num_targets` counts; `targets` for a task of somebody's own."""
        try:
            recipe = yaml.safe_load(self.recipe_text) or {}
        except yaml.YAMLError:
            return "targets"
        return (
            TARGET_UNITS.get(str(recipe.get("task", "causal-lm")), "targets") if isinstance(recipe, dict) else "targets"
        )


@dataclass(frozen=True)
class Headline:
    """One headline number; `label` and `unit` may hold `{targets}`, which is what the run counts."""

    label: str
    read: Callable[[Run], float | None]
    show: Callable[[float], str]
    unit: str = ""
    better: Callable[..., float] | None = None

    def label_for(self, targets: str) -> str:
        """`Tokens`, `Images`."""
        text = self.label.format(targets=targets)
        return text[:1].upper() + text[1:]

    def unit_for(self, targets: str) -> str:
        return self.unit.format(targets=targets)

    def text(self, value: float) -> str:
        return self.show(value) if math.isfinite(value) else show_value(value)


def shared_targets(runs: list[Run]) -> str:
    """What runs that are compared count; `targets` where that differs."""
    words = {run.targets for run in runs}
    return words.pop() if len(words) == 1 else "targets"


def in_summary(*keys: str) -> Callable[[Run], float | None]:
    """A reader of one number of summary.json."""

    def read(run: Run) -> float | None:
        value: Any = run.summary
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) else None

    return read


def final_metrics(run: Run) -> dict[str, Any]:
    """All of the last evaluation: of evaluation.json, else of the summary, else of the last line."""
    for found in (run.evaluation.get("metrics"), run.summary.get("eval"), *reversed(run.curves.evals)):
        if isinstance(found, Mapping) and found:
            return dict(found)
    return {}


def final_metric(metric: str) -> Callable[[Run], float | None]:
    """A reader of one number of the last evaluation."""

    def read(run: Run) -> float | None:
        value = final_metrics(run).get(metric)
        return value if isinstance(value, int | float) else None

    return read


def large_number(value: float) -> str:
    """`950`, `12,300`, `124.4 M`, `2.10 G`."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:,.0f}"


def _last_logged(column: str) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.curves.train[-1].get(column) if run.curves.train else None
        return value if isinstance(value, int | float) else None

    return read


def _either(
    first: Callable[[Run], float | None], second: Callable[[Run], float | None]
) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = first(run)
        return second(run) if value is None else value

    return read


def _peak_memory(run: Run) -> float | None:
    phases = run.summary.get("peak_memory_bytes") or {}
    return max((size for size in phases.values() if isinstance(size, int | float)), default=None)


def _decimals(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _score(metric: str, better: Callable[..., float] = max) -> Headline:
    return Headline(label(metric), final_metric(metric), _decimals(4), better=better)


HEADLINES = (
    Headline("Evaluation loss", final_metric("loss"), _decimals(4), better=min),
    Headline("Perplexity", final_metric("perplexity"), lambda value: f"{value:.4g}", better=min),
    Headline("Bits per byte", final_metric("bits_per_byte"), _decimals(4), better=min),
    _score("accuracy"),
    _score("f1_macro"),
    _score("mcc"),
    _score("auroc"),
    _score("hamming_loss", min),
    _score("mean_iou"),
    _score("pixel_accuracy"),
    _score("mae", min),
    _score("r2"),
    _score("pearson"),
    _score("spearman"),
    Headline("Steps", _either(in_summary("steps"), _last_logged("step")), large_number),
    Headline("{targets}", in_summary("num_targets"), large_number),
    Headline("Training time", _either(in_summary("train_seconds"), _last_logged("train_seconds")), format_seconds),
    Headline(
        "Throughput",
        _either(lambda run: target_rate(run.summary), _last_logged("throughput")),
        large_number,
        "{targets}/s",
        better=max,
    ),
    Headline("Model FLOP utilisation", in_summary("mfu"), lambda value: f"{100 * value:.1f}", "%", better=max),
    Headline("Peak memory", _peak_memory, lambda value: f"{value / 2**30:.1f}", "GiB per device", better=min),
    Headline("Skipped steps", in_summary("skipped_steps"), large_number, better=min),
)
