"""What the report says about a run in words, numbers and tables, and how runs compare."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from accel_train.observe.curves import Curves
from accel_train.observe.progress import format_seconds
from accel_train.observe.trackers import flatten
from accel_train.state import JsonRecord

BAD_EVENTS = frozenset({"skip", "stop", "checkpoint_invalid", "tracker_failed"})
MISSING = "–"


@dataclass(frozen=True)
class Run:
    """What a run left in its folder; `summary` is empty if it has not ended."""

    curves: Curves
    summary: JsonRecord
    recipe_text: str

    @property
    def name(self) -> str:
        return self.curves.name


@dataclass(frozen=True)
class Headline:
    """One headline number: where it comes from, how it reads, and which end is good."""

    label: str
    read: Callable[[Run], float | None]
    show: Callable[[float], str]
    unit: str = ""
    better: Callable[..., float] | None = None


def describe_run(run: Run) -> dict[str, Any]:
    """Everything the page shows of one run beside its curves, as the template takes it."""
    summary = run.summary
    status = str(summary.get("status", "no summary yet: still running, or killed"))
    return {
        "name": run.name,
        "status": status[:1].upper() + status[1:],
        "mood": {"done": "good", "finished": "good", "stopped": "bad", "failed": "bad"}.get(status, ""),
        "lead": _lead(run),
        "numbers": [
            {"label": headline.label, "value": headline.show(value), "unit": headline.unit}
            for headline in HEADLINES
            if (value := headline.read(run)) is not None
        ],
        "sample": _sample(summary.get("sample")),
        "events": [_event_row(event) for event in run.curves.events],
        "events_summary": ", ".join(
            f"{kind.replace('_', ' ')} ×{count}"
            for kind, count in Counter(event["event"] for event in run.curves.events).items()
        ),
        "tables": _tables(summary),
        "recipe": run.recipe_text,
    }


def compare_headlines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per headline number that some run has; `best` are the columns with the best value, if they differ."""
    rows = []
    for headline in HEADLINES:
        values = [headline.read(run) for run in runs]
        present = [value for value in values if value is not None]
        if not present:
            continue
        best = headline.better(present) if headline.better and len(set(present)) > 1 else None
        unit = f" {headline.unit}" if headline.unit else ""
        rows.append(
            {
                "label": headline.label,
                "cells": [MISSING if value is None else headline.show(value) + unit for value in values],
                "best": [column for column, value in enumerate(values) if best is not None and value == best],
            }
        )
    return rows


def compare_recipes(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs' recipes differ, with each run's value."""
    recipes = [_flat_recipe(run.recipe_text) for run in runs]
    settings = list(dict.fromkeys(name for recipe in recipes for name in recipe))
    table = [(name, [str(recipe.get(name, MISSING)) for recipe in recipes]) for name in settings]
    return [(name, values) for name, values in table if len(set(values)) > 1]


def compare_baselines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Bars: each run's bits per byte beside what needs no training, xz and the frequencies of single bytes."""
    bars: list[tuple[str, float | None, int]] = [
        (run.name if len(runs) > 1 else "this run", _final_eval("bits_per_byte")(run), number)
        for number, run in enumerate(runs, start=1)
    ]
    for key, label in (("xz_bits_per_byte", "xz -9"), ("unigram_bits_per_byte", "byte frequencies")):
        values = {_in_summary("baselines", key)(run) for run in runs}  # runs on the same data share them
        bars += [(label, value, 0) for value in sorted(value for value in values if value is not None)]
    present = [(label, value, run) for label, value, run in bars if value is not None and math.isfinite(value)]
    if all(run for _, _, run in present):
        return []
    longest = max(value for _, value, _ in present)
    return [
        {"label": label, "value": f"{value:.3f}", "percent": round(82 * value / longest, 2), "run": run}
        for label, value, run in present
    ]


def _flat_recipe(text: str) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        recipe = None
    return flatten(recipe) if isinstance(recipe, dict) else {"recipe.yaml": "cannot be read"}


def _lead(run: Run) -> str:
    """`124.4 M parameters on 8 processes: 4,000 steps, 2.097 G tokens in 1h 15m. 2 steps were skipped.`"""
    summary = run.summary
    shown = {
        headline.label: headline.show(value) for headline in HEADLINES if (value := headline.read(run)) is not None
    }
    who = [f"{large_number(summary['parameters'])} parameters"] if "parameters" in summary else []
    if "world_size" in summary:
        who.append(f"on {_count(summary['world_size'], 'process', 'processes')}")
    did = [f"{shown['Steps']} steps"] if "Steps" in shown else []
    did += [f"{shown['Tokens']} tokens"] if "Tokens" in shown else []
    sentence = ", ".join(did) + (f" in {shown['Training time']}" if did and "Training time" in shown else "")
    lead = ": ".join(part for part in (" ".join(who), sentence) if part)
    skipped = summary.get("skipped_steps")
    return (f"{lead}." if lead else "") + (f" {_count(skipped, 'step was', 'steps were')} skipped." if skipped else "")


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _sample(sample: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Prompt and continuation apart, whether or not the text repeats its prompt."""
    if not sample:
        return None
    prompt, text = str(sample.get("prompt") or ""), str(sample.get("text") or "")
    return {"prompt": prompt, "text": text.removeprefix(prompt)}


def _event_row(event: JsonRecord) -> dict[str, Any]:
    kind = str(event["event"])
    return {
        "step": f"{event['step']:,}",
        "kind": kind.replace("_", " "),
        "message": event.get("message", ""),
        "rank": event.get("rank"),
        "time": str(event.get("time", ""))[:16].replace("T", " "),
        "bad": kind in BAD_EVENTS,
    }


def _tables(summary: JsonRecord) -> list[dict[str, Any]]:
    """What is worth a look but not a headline: choices, evaluation, memory, environment."""
    memory = {phase: f"{size / 2**30:.2f} GiB" for phase, size in (summary.get("peak_memory_bytes") or {}).items()}
    evaluation = {
        name: f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        for name, value in (summary.get("eval") or {}).items()
    }
    best = {"best loss": summary.get("best_eval_loss"), "best loss at step": summary.get("best_step")}
    sections = [
        ("Choices", "what was decided for you, and why", summary.get("choices")),
        ("Evaluation", "all its numbers", evaluation and evaluation | best),
        ("Memory", "the most that one device held, by phase", memory),
        ("Data", "what it was trained and evaluated on", summary.get("data")),
        ("Environment", "what it ran on", summary.get("environment")),
    ]
    return [
        {"title": title, "hint": hint, "rows": list(flatten(values).items())}
        for title, hint, values in sections
        if values
    ]


def _in_summary(*keys: str) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value: Any = run.summary
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) else None

    return read


def _final_eval(metric: str) -> Callable[[Run], float | None]:
    """From the summary, or from the last evaluation of a run that has not ended."""

    def read(run: Run) -> float | None:
        last = run.curves.evals[-1] if run.curves.evals else {}
        value = _in_summary("eval", metric)(run)
        return last.get(metric) if value is None else value

    return read


def _last_logged(column: str) -> Callable[[Run], float | None]:
    return lambda run: run.curves.train[-1].get(column) if run.curves.train else None


def _either(
    first: Callable[[Run], float | None], second: Callable[[Run], float | None]
) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = first(run)
        return second(run) if value is None else value

    return read


def _peak_memory(run: Run) -> float | None:
    phases = run.summary.get("peak_memory_bytes") or {}
    return max(phases.values(), default=None)


def large_number(value: float) -> str:
    """`950`, `12,300`, `124.4 M`, `2.10 G`."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:,.0f}"


def _decimals(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


HEADLINES = (
    Headline("Evaluation loss", _final_eval("loss"), _decimals(4), better=min),
    Headline("Perplexity", _final_eval("perplexity"), lambda value: f"{value:.4g}", better=min),
    Headline("Bits per byte", _final_eval("bits_per_byte"), _decimals(4), better=min),
    Headline("Steps", _either(_in_summary("steps"), _last_logged("step")), large_number),
    Headline("Tokens", _in_summary("num_targets"), large_number),
    Headline("Training time", _either(_in_summary("train_seconds"), _last_logged("train_seconds")), format_seconds),
    Headline(
        "Throughput",
        _either(_in_summary("tokens_per_second"), _last_logged("tokens_per_second")),
        large_number,
        "tokens/s",
        better=max,
    ),
    Headline("Model FLOP utilisation", _in_summary("mfu"), lambda value: f"{100 * value:.1f}", "%", better=max),
    Headline("Peak memory", _peak_memory, lambda value: f"{value / 2**30:.1f}", "GiB per device", better=min),
    Headline("Skipped steps", _in_summary("skipped_steps"), large_number, better=min),
)
