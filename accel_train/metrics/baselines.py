"""Compare the model with baselines that need no training, and report the baselines that it does not beat."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from accel_train.core.metric_names import METRICS, is_lower_better, label, show_metric

Record = Mapping[str, Any]
"""Metrics or facts by name, as summary.json has them."""


class Unbeaten(NamedTuple):
    """A baseline that is as good as the model or better."""

    baseline: str
    metric: str
    model_value: float
    baseline_value: float

    def __str__(self) -> str:
        other = "the untrained model" if self.baseline == "untrained" else self.baseline
        own, best = (show_metric(self.metric, value) for value in (self.model_value, self.baseline_value))
        return f"The model does not beat a baseline on held-out data: {label(self.metric)} {own}, and {best} by {other}"


def by_baseline(baselines: Record, metrics: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Group baselines by displayed name, then metric: `tfidf_accuracy` is the accuracy of `TF-IDF`.

    Names that do not end with a metric are left out.
    """
    known, by_name = tuple(metrics), dict[str, dict[str, Any]]()
    for key, value in baselines.items():
        fitting = [metric for metric in known if key.endswith(f"_{metric}")]
        if fitting:
            metric = max(fitting, key=len)
            name = key.removesuffix(f"_{metric}").replace("_", " ").replace("tfidf", "TF-IDF")
            by_name.setdefault(name, {})[metric] = value
    return by_name


def format_scores(scores: Record, baselines: Record) -> str:
    """Return a table with a row for each metric, and a column for the model and for each baseline."""
    columns: dict[str, Record] = {"this model": scores, **by_baseline(baselines, scores)}
    cells = [
        [show_metric(metric, values[metric]) if metric in values else "" for values in columns.values()]
        for metric in scores
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    names = ["", *map(label, scores)]
    width = max(map(len, names))
    rows = zip(names, [[*columns], *cells], strict=True)
    lines = (f"  {name:{width}}  {'  '.join(map(str.rjust, row, widths))}".rstrip() for name, row in rows)
    return "\n".join(lines)


def unbeaten_baseline(
    scores: Record,
    baselines: Record,
    main_metric: str,
    is_lower_better: Callable[[str], bool] = is_lower_better,
) -> Unbeaten | None:
    """Return the best baseline that the model does not beat; None if the model beats all.

    The comparison uses the main metric, or the baseline's first metric if it does not have the main metric. A perfect
    score of both does not count as a defeat.
    """
    found = []
    for name, values in by_baseline(baselines, scores).items():
        metric = main_metric if main_metric in values else next(iter(values))
        own, other = scores[metric], values[metric]
        if not (is_number(own) and is_number(other)):
            continue
        lower = is_lower_better(metric)
        is_perfect = own == other == (0 if lower else 1)
        if not is_perfect and (own >= other if lower else own <= other):
            found.append(Unbeaten(name, metric, own, other))
    metrics = {each.metric for each in found}
    if not found:
        return None
    alike = [each for each in found if each.metric == (main_metric if main_metric in metrics else found[0].metric)]
    return (min if is_lower_better(alike[0].metric) else max)(alike, key=lambda each: each.baseline_value)


class Comparison(NamedTuple):
    """The main score and the best baseline's, in the same metric."""

    metric: str
    own: float
    baseline: str
    value: float
    is_beaten: bool
    rows: int | None
    """Held-out samples that the metric is a share of. None: it is no share of samples."""

    @property
    def verdict(self) -> str:
        """Return whether the baseline is beaten, and by how many samples: `beaten: +5 of 203 rows, within chance`.

        "Within chance" is a difference below 1.96 standard errors of the difference of two independent shares.
        """
        word = "beaten" if self.is_beaten else "equaled" if self.own == self.value else "not beaten"
        if not self.rows or self.own == self.value or not is_number(self.own):
            return word
        # Damaged records may hold shares above 1.
        error = math.sqrt(max(0.0, sum(share * (1 - share) for share in (self.own, self.value))) / self.rows)
        chance = ", within chance" if abs(self.own - self.value) < 1.96 * error else ""
        return f"{word}: {round((self.own - self.value) * self.rows):+,} of {self.rows:,} rows{chance}"

    def __str__(self) -> str:
        return f"{self.baseline} {show_metric(self.metric, self.value)} ({self.verdict})"


def compare(
    scores: Record,
    baselines: Record,
    main_metric: str,
    rows: int | None = None,
    is_lower_better: Callable[[str], bool] = is_lower_better,
) -> Comparison | None:
    """Compare the main metric with its best baseline; another metric if some baseline lacks the main one.

    `rows` is from `rows_of`.
    """
    found = by_baseline(baselines, scores)
    metrics = [metric for values in found.values() for metric in values]
    metrics = [each for each in metrics if all(each in values for values in found.values())] or metrics
    metric = main_metric if main_metric in metrics or not metrics else metrics[0]
    values = {name: each[metric] for name, each in found.items() if metric in each and is_number(each[metric])}
    if not values:
        return None
    lower, own = is_lower_better(metric), scores[metric]
    best = (min if lower else max)(values, key=lambda name: values[name])
    is_beaten = own < values[best] if lower else own > values[best]
    is_share = metric in METRICS and METRICS[metric].is_share_of_rows
    return Comparison(metric, own, best, values[best], is_beaten, rows if is_share else None)


def rows_of(scores: Record, facts: Record, targets: str) -> int | None:
    """Return the number of evaluated samples with a label; None where targets are parts of samples.

    Args:
        facts: `data` of a summary.
        targets: unit of the task's targets.
    """
    if targets not in ("samples", "images"):
        return None
    # A question has a target for each of its windows, and a sample without a label has none.
    known = [count for count in (scores.get("num_targets"), facts.get("num_eval")) if is_number(count)]
    return max(0, int(min(known))) if len(known) == 2 else None


def format_main_score(scores: Record, main_metric: str, compared: Comparison | None) -> str:
    """Return the main metric next to its best baseline, in another metric too if they were compared by another."""
    names = dict.fromkeys((main_metric, main_metric if compared is None else compared.metric))
    text = ", ".join(f"{label(name)} {show_metric(name, scores.get(name))}" for name in names)
    return text if compared is None else f"{text}; best baseline: {compared}"


def likely_causes(
    *,
    run_folder: str,
    steps: int,
    epochs: float,
    best_step: int | None,
    loss_rose: bool,
    pretrained: bool,
    parameters: int,
    samples: int,
) -> list[str]:
    """Return three likely causes for losing to a baseline, each with a remedy, the likeliest first.

    Args:
        best_step: step with the best evaluation; None if unknown.
        loss_rose: whether the held-out loss was higher at the end than at `best_step`.
    """
    size = f"{parameters:,} parameters from scratch on {samples:,} samples"
    data = (
        "wrong labels or columns: look at data.columns and at a few samples"
        if pretrained
        else f"wrong labels or columns, or too large a model for the data ({size}): begin with "
        "pretrained weights (model.pretrained), or take a smaller model"
    )
    rate = f"a learning rate too low or too high: accel-train find-lr {run_folder}/recipe.resolved.yaml suggests one"
    length = f"too few steps ({steps:,}; epochs: {epochs:.3g}): raise schedule.num_epochs or schedule.max_steps"
    if best_step is None:
        return [rate, length, data]
    if best_step == steps:
        return [f"{length}; the last evaluation was the best one", rate, data]
    best = f"step {best_step:,} of {steps:,} evaluated best"
    if not loss_rose:
        return [rate, data, f"more steps alone are unlikely to help: {best}"]
    remedy = "a lower learning rate" if pretrained else "pretrained weights, a smaller model"
    fits = f"later steps fit the training data alone: more data, {remedy}, or fewer steps"
    return [f"overfitting: {best}, and {fits}", rate, data]


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
