"""The words, numbers and tables of the report: headline numbers of each run, details, and the comparison of runs."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from accel_train.core.format import format_count, format_seconds
from accel_train.core.json_io import dotted_items
from accel_train.core.metric_names import MISSING, is_lower_better, is_variant, label, show_metric, show_value
from accel_train.core.state import JsonRecord
from accel_train.metrics.baselines import Comparison, compare, is_number, rows_of
from accel_train.observe.goodput import ACCOUNTS
from accel_train.observe.trackers import flatten
from accel_train.recipe.names import look_up
from accel_train.recipe.tasks import TASKS
from accel_train.report.metric_names import LABELS, NOT_A_SCORE, words
from accel_train.report.run import Run, command_to_use

MOST_SCORES = 5
"""Maximum number of the task's metrics among the headline numbers of a run. The table contains all metrics."""
MOST_EVENTS = 1_000
"""Maximum number of rows in the table of events, half from the start and half from the end."""
BAD_EVENTS = frozenset({"skip", "stop", "checkpoint_invalid", "tracker_failed", "notify_failed"})


@dataclass(frozen=True)
class Headline:
    """A headline number of a run. `label` and `unit` may contain `{targets}`, the unit of labels."""

    label: str
    find: Callable[[Run], Any]
    show: Callable[[float], str]
    unit: str = ""
    better: Callable[..., float] | None = None
    is_in_lead: bool = False
    """Whether the first sentence about a run has the number."""

    def read(self, run: Run) -> float | None:
        """Return the run's number, or None if it has not been recorded."""
        value = self.find(run)
        return value if isinstance(value, int | float) else None

    def label_for(self, targets: str) -> str:
        """Return the label, with the capitalized `targets` filled in."""
        return self.label.format(targets=targets[:1].upper() + targets[1:])

    def text(self, value: float) -> str:
        return self.show(value) if math.isfinite(value) else show_value(value)


def shared_targets(runs: Sequence[Run]) -> str:
    """Return the unit of labels that all compared runs share, or `targets` if units differ."""
    words = {run.targets for run in runs}
    return words.pop() if len(words) == 1 else "targets"


def final_metric(metric: str, run: Run) -> Any:
    """Return one metric of the run's last evaluation."""
    return run.final_metrics().get(metric)


def large_number(value: float) -> str:
    """Return a value as text with a unit prefix: `950`, `12,300`, `124.4 M` or `2.10 G`."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:,.0f}"


def _logged(key: str, column: str, run: Run) -> Any:
    """Return a value of the summary, or of the last log line if the run has not ended."""
    value = run.summary.get(key)
    return run.train[-1].get(column) if value is None and run.train else value


def _peak_memory(run: Run) -> float | None:
    phases = run.summary.get("peak_memory_bytes") or {}
    return max((size for size in phases.values() if isinstance(size, int | float)), default=None)


HEADLINES = (
    Headline("Steps", partial(_logged, "steps", "step"), large_number, is_in_lead=True),
    Headline("{targets}", lambda run: run.summary.get("num_targets"), large_number, is_in_lead=True),
    Headline("Training time", partial(_logged, "train_seconds", "train_seconds"), format_seconds, is_in_lead=True),
    Headline(
        "Productive time", lambda run: run.goodput.get("productive_share"), lambda share: f"{100 * share:.1f}", "%", max
    ),
    Headline("Throughput", partial(_logged, "throughput", "throughput"), large_number, "{targets}/s", max),
    Headline("Model FLOP utilization", lambda run: run.summary.get("mfu"), lambda mfu: f"{100 * mfu:.1f}", "%", max),
    Headline("Peak memory", _peak_memory, lambda value: f"{value / 2**30:.1f}", "GiB per device", min),
    Headline("Skipped steps", lambda run: run.summary.get("skipped_steps"), large_number, "", min, is_in_lead=True),
)


def main_metrics(run: Run) -> list[str]:
    """Return the metrics that a person looks at first: the one that chooses the best weights, then those of
    `evaluate.metrics` and of the task, the main one first, then the loss.

    A custom task's metrics come in the order in which they are reported.
    """
    reported = run.final_metrics()
    own = TASKS[run.task].metrics if run.task in TASKS else ()
    asked = look_up(run.recipe, "evaluate.metrics")
    asked = [name.rpartition(":")[2] for name in asked] if isinstance(asked, list) else []
    names = dict.fromkeys((*asked, *own, *reported))
    shown = [
        name
        for name in names
        if isinstance(reported.get(name), int | float)
        and name not in (*NOT_A_SCORE, "loss")
        and not is_variant(name, reported)
    ]
    return list(dict.fromkeys((_best_metric(run), *shown[:MOST_SCORES], "loss")))


def _is_lower_better(name: str, runs: Sequence[Run]) -> bool:
    """Return whether smaller values of a metric are better, by the first recipe that says so, or by the name."""
    for run in runs:
        is_greater_better = look_up(run.recipe, "evaluate.greater_is_better")
        if name == _best_metric(run) and isinstance(is_greater_better, bool):
            return not is_greater_better
    return is_lower_better(name)


def _best_metric(run: Run) -> str:
    return str(look_up(run.recipe, "evaluate.metric_for_best_model") or "loss").removeprefix("eval_")


def compare_with_baseline(run: Run) -> Comparison | None:
    """Return the run's main score next to its best baseline, or None without a baseline."""
    summary = run.summary
    reported = {**summary.get("eval", {}), **run.final_metrics()}
    scores = {name: value for name, value in reported.items() if isinstance(value, int | float)}
    rows = rows_of(scores, summary.get("data", {}), run.targets)
    better = partial(_is_lower_better, runs=[run])
    return compare(scores, summary.get("baselines", {}), _best_metric(run), rows, better)


def headlines(runs: Sequence[Run]) -> list[Headline]:
    """Return the headline numbers of runs: their main metrics, then the numbers of every run."""
    names = dict.fromkeys(name for run in runs for name in main_metrics(run))
    scores = [
        Headline(
            "Evaluation loss" if name == "loss" else label(name).replace("{", "{{").replace("}", "}}"),
            partial(final_metric, name),
            partial(show_metric, name),
            better=min if _is_lower_better(name, runs) else max,
        )
        for name in names
    ]
    return [*scores, *HEADLINES]


def describe_run(run: Run) -> JsonRecord:
    """Return the template data of one run, except its curves."""
    summary, targets = run.summary, run.targets
    status = str(summary.get("status", "no summary yet: still running, or killed"))
    sample = summary.get("sample") or {}
    # The text may begin with the prompt.
    prompt = str(sample.get("prompt") or "")
    kinds = Counter(event["event"] for event in run.events)
    first = min(MOST_EVENTS // 2, len(run.events))
    last = max(first, len(run.events) - MOST_EVENTS // 2)
    numbers: list[JsonRecord] = [
        {
            "label": each.label_for(targets),
            "value": each.text(value),
            "note": "",
            "unit": each.unit.format(targets=targets),
        }
        for each in headlines([run])
        if not each.is_in_lead and (value := each.read(run)) is not None
    ]
    if (found := compare_with_baseline(run)) is not None:
        tile = {"label": f"Best baseline: {found.baseline}", "value": show_metric(found.metric, found.value)}
        numbers.insert(_place_after(found.metric, numbers), {**tile, "unit": "", "note": found.verdict})
    return {
        "name": run.name,
        "status": status[:1].upper() + status[1:],
        "mood": "good" if "status" in summary else "",
        "lead": _lead(run, targets),
        "numbers": numbers,
        "sample": {"prompt": prompt, "text": str(sample.get("text") or "").removeprefix(prompt)} if sample else None,
        "events": [*map(_event_row, run.events[:first]), *map(_event_row, run.events[last:])],
        "has_bad_events": any(event["event"] in BAD_EVENTS for event in run.events),
        "num_events_left_out": last - first,
        "events_summary": ", ".join(f"{kind.replace('_', ' ')} ×{count}" for kind, count in kinds.items()),
        "incidents": run.incidents,
        "not_beaten": _not_beaten(summary),
        "time": describe_time(run),
        "profiles": run.profiles,
        "damage": run.damage,
        "tables": _tables(summary),
        "command": command_to_use(run.folder, run.recipe) if run.example else "",
        "example": run.example,
        "recipe": run.recipe_text,
    }


def differ_in_evaluation_data(runs: Sequence[Run]) -> bool:
    """Return whether the runs were evaluated on different samples, according to their recipes and sample counts."""
    known: list[set[str]] = [set(), set(), set()]
    for run in runs:
        settings = look_up(run.recipe, "data")
        data = settings if isinstance(settings, dict) else {}
        split = [data.get(name) for name in ("eval_fraction", "split_seed", "group_column", "stratify")]
        source = data.get("eval") or (data.get("train") and [data["train"], *(value or None for value in split)])
        num_eval = look_up(run.summary, "data.num_eval")
        for values, value in zip(known, (source, num_eval, final_metric("num_targets", run)), strict=True):
            if value is not None and run.final_metrics():
                values.add(str(value))
    return any(len(values) > 1 for values in known)


def compare_headlines(runs: Sequence[Run]) -> list[JsonRecord]:
    """Return one row per headline number that some run has.

    `best` lists the columns with the best value if values differ. Scores have no best value if the runs were evaluated
    on different data, and the throughput has none if models, processes, or devices differ.
    """
    machines = [look_up(run.summary, "environment.gpu") for run in runs]
    models = [[run.summary.get(name) for name in ("parameters", "world_size")] for run in runs]
    is_unlike = len(set(map(str, zip(machines, models)))) > 1
    rows, targets, is_other = [], shared_targets(runs), differ_in_evaluation_data(runs)
    for headline in headlines(runs):
        values = [headline.read(run) for run in runs]
        if all(value is None for value in values):
            continue
        numbers = {value for value in values if value is not None and not math.isnan(value)}
        best = headline.better(numbers) if headline.better and len(numbers) > 1 else None
        is_score = headline not in HEADLINES
        if (is_other and is_score) or (is_unlike and headline.label == "Throughput"):
            best = None
        unit = f" {headline.unit.format(targets=targets)}" if headline.unit else ""
        rows.append(
            {
                "label": headline.label_for(targets),
                "cells": [MISSING if value is None else headline.text(value) + unit for value in values],
                "best": [column for column, value in enumerate(values) if best is not None and value == best],
            }
        )
    if any(found := [compare_with_baseline(run) for run in runs]):
        cells = [MISSING if each is None else str(each) for each in found]
        metric = next(each.metric for each in found if each is not None)
        rows.insert(_place_after(metric, rows), {"label": "Best baseline", "cells": cells, "best": []})
    return rows


def _place_after(metric: str, shown: Sequence[JsonRecord]) -> int:
    """Return the place after a metric, or after the first number if it is not shown."""
    return next((place for place, each in enumerate(shown, start=1) if each["label"] == label(metric)), 1)


def compare_recipes(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between the runs' recipes, with each run's value."""
    read = [run.recipe for run in runs]
    recipes = [{"recipe.yaml": "cannot be read"} if recipe is None else flatten(recipe) for recipe in read]
    settings = list(dict.fromkeys(name for recipe in recipes for name in recipe))
    table = [
        (name, [str(recipe.get(name, MISSING)) for recipe in recipes]) for name in settings if name != "output_dir"
    ]
    return [(name, values) for name, values in table if len(set(values)) > 1]


def compare_baselines(runs: Sequence[Run]) -> list[JsonRecord]:
    """Return bars that compare each run's bits per byte with baselines without training: xz and byte frequencies."""
    bars: list[tuple[str, Any, int]] = [
        (run.name if len(runs) > 1 else "this run", final_metric("bits_per_byte", run), number)
        for number, run in enumerate(runs, start=1)
    ]
    baselines = [run.summary.get("baselines", {}) for run in runs]
    for key, name in (("xz_bits_per_byte", "xz -9"), ("unigram_bits_per_byte", "byte frequencies")):
        # Runs on the same data share these values.
        values = {found[key] for found in baselines if is_number(found.get(key))}
        bars += [(name, value, 0) for value in sorted(values)]
    present = [(name, value, run) for name, value, run in bars if is_number(value)]
    if all(run for _, _, run in present):
        return []
    longest = max(value for _, value, _ in present)
    return [
        {"label": name, "value": f"{value:.3f}", "percent": round(72 * value / longest, 2), "run": run}
        for name, value, run in present
    ]


def _lead(run: Run, targets: str) -> str:
    """Return the lead sentence of a run.

    For example: `124.4 M parameters on 8 processes: 4,000 steps, 2.097 G tokens in 1h 15m. 2 steps were skipped.`
    """
    summary = run.summary
    shown = {
        headline.label: headline.text(value) for headline in HEADLINES if (value := headline.read(run)) is not None
    }
    who = [f"{large_number(summary['parameters'])} parameters"] if "parameters" in summary else []
    if "world_size" in summary:
        who.append(f"on {format_count(summary['world_size'], 'process', 'processes')}")
    did = [f"{shown['Steps']} steps"] if "Steps" in shown else []
    did += [f"{shown['{targets}']} {targets}"] if "{targets}" in shown else []
    sentence = ", ".join(did) + (f" in {shown['Training time']}" if did and "Training time" in shown else "")
    lead = ": ".join(part for part in (" ".join(who), sentence) if part)
    skipped = summary.get("skipped_steps")
    return (f"{lead}." if lead else "") + (
        f" {format_count(skipped, 'step was', 'steps were')} skipped." if skipped else ""
    )


def _not_beaten(summary: JsonRecord) -> JsonRecord | None:
    """Return the `sentence` on a baseline that the model does not beat, with likely `causes`, or None."""
    found: JsonRecord = summary.get("not_beaten") or {}
    return found if isinstance(found.get("sentence"), str) and isinstance(found.get("causes"), list) else None


def _event_row(event: JsonRecord) -> JsonRecord:
    kind = str(event["event"])
    return {
        "step": f"{event['step']:,}",
        "kind": kind.replace("_", " "),
        "message": event.get("message", ""),
        "rank": event.get("rank"),
        "time": str(event.get("time", ""))[:16].replace("T", " "),
        "bad": kind in BAD_EVENTS,
    }


def _tables(summary: JsonRecord) -> list[JsonRecord]:
    """Return the tables below the curves: choices, evaluation, memory, data, environment."""
    phases = (summary.get("peak_memory_bytes") or {}).items()
    memory = {phase: f"{size / 2**30:.2f} GiB" for phase, size in phases if isinstance(size, int | float)}
    best = {"best evaluation": summary.get("best_metric"), "best at step": summary.get("best_step")}
    evaluation = summary.get("eval") or {}
    sections: list[tuple[str, str, Any, Callable[[str], str]]] = [
        ("Choices", "settings chosen automatically, with reasons", summary.get("choices"), str),
        ("Evaluation", "all numbers", evaluation and evaluation | best, label),
        ("Memory", "peak of one device, by phase", memory, str),
        ("Data", "training and evaluation data", summary.get("data"), words),
        ("Environment", "hardware and software", summary.get("environment"), lambda name: LABELS.get(name, name)),
    ]
    return [
        {"title": title, "hint": hint, "rows": [(name_of(name), text) for name, text in _texts(values)]}
        for title, hint, values, name_of in sections
        if values
    ]


def _texts(values: JsonRecord) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and text of each value, without empty values."""
    for name, value in dotted_items(values):
        if isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif isinstance(value, int):
            yield name, f"{value:,}"
        elif isinstance(value, float):
            yield name, f"{value:.6g}"
        elif isinstance(value, list | tuple) and value:
            yield name, "; ".join(map(str, value))
        elif value is not None and not isinstance(value, list | tuple):
            yield name, str(value)


LONGEST_PERCENT = 36
"""Width of the longest bar: its text needs room on a phone."""


def describe_time(run: Run) -> JsonRecord | None:
    """Return a sentence and a bar for each account, the productive steps first; None where nothing is recorded."""
    goodput = run.goodput
    accounts, wall = goodput.get("accounts"), goodput.get("wall_seconds")
    if not accounts or not wall:
        return None
    names = sorted(accounts, key=lambda name: (name != "productive_steps", -accounts[name]))
    longest = max(accounts.values())
    launches = format_count(goodput["launches"], "launch", "launches")
    return {
        "lead": f"{goodput['productive_share']:.1%} of {format_seconds(wall)} were productive steps, over {launches}: "
        "from the first start to the last end.",
        "bars": [
            {
                "label": ACCOUNTS[name],
                "value": _time_in(run, name),
                "percent": round(LONGEST_PERCENT * accounts[name] / longest, 2),
                "this": name == "productive_steps",
            }
            for name in names
        ],
    }


def compare_times(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return a row an account: its name, and for each run its seconds and its share; none where nothing is recorded."""
    recorded = {name for run in runs for name in run.goodput.get("accounts") or {}}
    return [(ACCOUNTS[name], [_time_in(run, name) for run in runs]) for name in ACCOUNTS if name in recorded]


def _time_in(run: Run, account: str) -> str:
    """Return the seconds of an account and their share of the run's time; a dash if it has none."""
    seconds = look_up(run.goodput, f"accounts.{account}")
    if seconds is None:
        return MISSING
    text = format_seconds(seconds) if seconds >= 60 else f"{seconds:.1f} s"
    return f"{text}, {seconds / run.goodput['wall_seconds']:.1%}"
