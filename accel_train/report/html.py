"""What the report says about a run in words, numbers and tables, and how runs compare."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from accel_train.observe.headlines import (
    HEADLINES,
    Run,
    final_metric,
    in_summary,
    large_number,
    shared_targets,
)
from accel_train.observe.incident_record import INCIDENTS, TEXT
from accel_train.observe.incident_text import main_facts
from accel_train.observe.metric_names import MISSING
from accel_train.observe.trackers import flatten
from accel_train.state import JsonRecord

BAD_EVENTS = frozenset({"skip", "stop", "checkpoint_invalid", "tracker_failed"})


def describe_run(run: Run) -> dict[str, Any]:
    """Everything the page shows of one run beside its curves, as the template takes it."""
    summary, targets = run.summary, run.targets
    status = str(summary.get("status", "no summary yet: still running, or killed"))
    return {
        "name": run.name,
        "status": status[:1].upper() + status[1:],
        "mood": {"done": "good", "finished": "good", "stopped early": "good", "stopped": "bad", "failed": "bad"}.get(
            status, ""
        ),
        "lead": _lead(run, targets),
        "numbers": [
            {
                "label": headline.label_for(targets),
                "value": headline.text(value),
                "unit": headline.unit_for(targets),
            }
            for headline in HEADLINES
            if (value := headline.read(run)) is not None
        ],
        "sample": _sample(summary.get("sample")),
        "events": [_event_row(event) for event in run.curves.events],
        "events_summary": ", ".join(
            f"{kind.replace('_', ' ')} ×{count}"
            for kind, count in Counter(event["event"] for event in run.curves.events).items()
        ),
        "incidents": [_incident(record) for record in run.incidents],
        "damage": run.damage,
        "tables": _tables(summary),
        "recipe": run.recipe_text,
    }


def compare_headlines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per headline number that some run has; `best` are the columns with the best value, if they differ."""
    rows, targets = [], shared_targets(list(runs))
    for headline in HEADLINES:
        values = [headline.read(run) for run in runs]
        if all(value is None for value in values):
            continue
        numbers = {value for value in values if value is not None and not math.isnan(value)}
        best = headline.better(numbers) if headline.better and len(numbers) > 1 else None
        unit = f" {headline.unit_for(targets)}" if headline.unit else ""
        rows.append(
            {
                "label": headline.label_for(targets),
                "cells": [MISSING if value is None else headline.text(value) + unit for value in values],
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
        (run.name if len(runs) > 1 else "this run", final_metric("bits_per_byte")(run), number)
        for number, run in enumerate(runs, start=1)
    ]
    for key, label in (("xz_bits_per_byte", "xz -9"), ("unigram_bits_per_byte", "byte frequencies")):
        values = {in_summary("baselines", key)(run) for run in runs}  # runs on the same data share them
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


def _lead(run: Run, targets: str) -> str:
    """`124.4 M parameters on 8 processes: 4,000 steps, 2.097 G tokens in 1h 15m. 2 steps were skipped.`"""
    summary = run.summary
    shown = {
        headline.label: headline.text(value) for headline in HEADLINES if (value := headline.read(run)) is not None
    }
    who = [f"{large_number(summary['parameters'])} parameters"] if "parameters" in summary else []
    if "world_size" in summary:
        who.append(f"on {_count(summary['world_size'], 'process', 'processes')}")
    did = [f"{shown['Steps']} steps"] if "Steps" in shown else []
    did += [f"{shown['{targets}']} {targets}"] if "{targets}" in shown else []
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


def _incident(record: JsonRecord) -> dict[str, Any]:
    """What the page shows of an incident: its sentence, what to do, and the main facts of its Markdown, which it links to."""
    return {
        "step": f"{record['step']:,}",
        "sentence": record["sentence"],
        "link": f"{INCIDENTS}/{record['folder']}/{TEXT}",
        "facts": main_facts(record),
        "next": record["next"],
    }


def _tables(summary: JsonRecord) -> list[dict[str, Any]]:
    """What is worth a look but not a headline: choices, evaluation, memory, environment."""
    phases = (summary.get("peak_memory_bytes") or {}).items()
    memory = {phase: f"{size / 2**30:.2f} GiB" for phase, size in phases if isinstance(size, int | float)}
    evaluation = {
        name: f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        for name, value in (summary.get("eval") or {}).items()
    }
    best = {"best evaluation": summary.get("best_metric"), "best at step": summary.get("best_step")}
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
