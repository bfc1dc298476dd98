"""The table of a sweep: the mean and spread of each combination over seeds, the best first."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.state import JsonRecord
from accel_train.metrics.baselines import is_lower_better
from accel_train.observe.run_folder import METRICS_FILE
from accel_train.recipe.schema import Recipe
from accel_train.report.metric_names import MISSING, is_number
from accel_train.report.run import load_run


class Row(NamedTuple):
    """A run in the table: its combination without the seed, and its metric. A missing value is None."""

    name: str
    metric: str
    value: float | None
    loss: float | None = None
    """Held-out loss, for the order of equal values. None without an evaluation."""


class Table(NamedTuple):
    """The combinations in order: as records, as a block for the report, and as names."""

    metric: str
    facts: list[JsonRecord]
    block: dict[str, Any]
    order: list[str]


def row_of(folder: Path, recipe: Recipe, values: Mapping[str, str], status: str = "finished") -> Row:
    """Return the row of a run: the last evaluation's `evaluate.metric_for_best_model`, or the last training loss.

    The training loss is used only for a run without evaluations.
    """
    name = ", ".join(f"{name} {value}" for name, value in values.items() if name != "seed") or "all seeds"
    metric = recipe.evaluate.metric_for_best_model.removeprefix("eval_")
    if status != "finished" or not (folder / METRICS_FILE).is_file():
        return Row(name, metric, None)
    run = load_run(folder)
    if found := run.final_metrics():
        value = found.get(metric)
        loss = found.get("loss")
        return Row(name, metric, *(float(each) if is_number(each) else None for each in (value, loss)))
    last = run.train[-1].get("loss") if run.train else None
    return Row(name, "training loss", float(last) if is_number(last) else None)


def is_greater_better(recipe: Recipe, metric: str) -> bool:
    """Return whether a greater value of a metric is better, by `evaluate.greater_is_better` or the metric's name."""
    greater = recipe.evaluate.greater_is_better
    return not is_lower_better(metric) if greater == "auto" or metric == "training loss" else bool(greater)


def describe_rows(rows: Sequence[Row], recipe: Recipe) -> Table:
    """Return mean, sample standard deviation, and number of runs per combination, best first.

    Of equal means, the lower loss comes first.
    """
    metric = next((row.metric for row in rows if row.value is not None), rows[0].metric)
    greater = is_greater_better(recipe, metric)
    facts: list[JsonRecord] = []
    mean_losses: dict[str, float] = {}
    for name in dict.fromkeys(row.name for row in rows):
        values = [row.value for row in rows if row.name == name and row.value is not None]
        spread = statistics.stdev(values) if len(values) > 1 else None
        mean = statistics.fmean(values) if values else None
        num_runs = sum(row.name == name for row in rows)
        losses = [row.loss for row in rows if row.name == name and row.value is not None and row.loss is not None]
        mean_losses[name] = statistics.fmean(losses) if losses else math.inf
        facts.append(
            {"combination": name, "metric": metric, "mean": mean, "spread": spread, "values": values, "runs": num_runs}
        )
    sign = -1 if greater else 1
    facts.sort(key=lambda fact: (fact["mean"] is None, sign * (fact["mean"] or 0.0), mean_losses[fact["combination"]]))
    head = ["combination", f"{metric}, mean", "spread", "finished", "values"]
    body = [{"name": fact["combination"], "cells": _cells(fact)} for fact in facts]
    title = "Combinations, best first"
    return Table(metric, facts, {"title": title, "head": head, "rows": body}, [fact["combination"] for fact in facts])


def format_rows(table: Table, *, failed: Sequence[tuple[str, int]]) -> str:
    """Return the table as aligned text, with unfinished runs and their exit codes below it."""
    lines = [table.block["head"], *([row["name"], *row["cells"]] for row in table.block["rows"])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, *(f"not finished: {name} (exit code {code})" for name, code in failed)])


def _cells(fact: JsonRecord) -> list[str]:
    numbers = [MISSING if fact[key] is None else f"{fact[key]:.4g}" for key in ("mean", "spread")]
    values = ", ".join(f"{value:.4g}" for value in fact["values"])
    return [*numbers, f"{len(fact['values'])} of {fact['runs']}", values or MISSING]
