"""Train a recipe with each combination of some settings' values, one run after the other, and compare the runs.

The folder of a run lies in the recipe's `output_dir`. Its values are its name: `lr=1e-4,seed=0`.
"""

import glob
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from accel_train.core.errors import Preempted, check_packages
from accel_train.core.files import digests_of, make_folders
from accel_train.core.format import format_count, format_seconds
from accel_train.core.json_io import json_digest, json_text
from accel_train.core.metric_names import MISSING, label, show_metric
from accel_train.core.ownership import check_file, write_file
from accel_train.core.state import JsonRecord
from accel_train.data.digest import digest_of_code
from accel_train.experiments.subprocess_run import TrainingProcess
from accel_train.experiments.sweep.values import (
    SEED,
    Combination,
    Outcome,
    Space,
    Values,
    check_number,
    draws,
    extremes,
    flags_of,
    grid,
    propose,
    read_space,
    with_recipes,
)
from accel_train.metrics.baselines import is_number
from accel_train.observe.run_folder import METRICS_FILE, SUMMARY_FILE, read_record
from accel_train.plan.place import count_processes
from accel_train.recipe.schema import Recipe
from accel_train.report.report import write_report
from accel_train.report.run import load_run
from accel_train.runtime.signals import StopRequest
from accel_train.task import load_task

SWEEP_FILE = "sweep.json"
LOG_FOLDER = ".logs"
REPORT_FILE = "comparison.html"
MOST_COMPARED = 24
"""Maximum runs with curves in the report. The report's table has all runs."""
ATTEMPTS = 3
"""Maximum launches of a run with exit code 75 (it ran out of memory and remembers a smaller micro-batch)."""
STOP_SECONDS = 600.0
POLL_SECONDS = 0.1
FINISHED, FAILED, STOPPED, WAITING = "finished", "failed", "stopped", "waiting"


class Swept(NamedTuple):
    """The outcome of a sweep: its table, its report (None if no run has trained), its exit code, and its folder."""

    table: str
    report: Path | None
    exit_code: int
    root: Path


class Selection(NamedTuple):
    """The selection of combinations: all (both numbers None), `num_random` draws, or `num_optuna` choices."""

    num_random: int | None = None
    num_optuna: int | None = None
    draw_seed: int = 0


class Row(NamedTuple):
    """A run in the table: its combination without the seed, and its metric. A missing value is None."""

    name: str
    metric: str
    value: float | None
    loss: float | None = None
    """Held-out loss, for the order of equal values. None without an evaluation."""


def sweep(
    path: str,
    settings: Sequence[str],
    selection: Selection,
    *,
    processes: int | None = None,
    say: Callable[[str], None],
) -> Swept:
    """Train each combination in a separate process. Finished runs are skipped, and other runs resume.

    A failed run does not end the sweep. The exit code is 0 if every run has finished or was stopped by its guard, and
    at least one has finished. Otherwise it is the exit code of the first other failure.

    Raises:
        ValueError: values, flags, or a recipe are wrong, or a file of the user or another sweep is in the way. Raised
            before any run starts.
        Preempted: a signal arrived, and the current run was asked to save.
    """
    space = read_space(settings)
    first = combine(path, space, selection)
    root = Path(first[0].recipe.output_dir)
    try:
        make_folders(root)
    except OSError as error:
        raise ValueError(f"output_dir={root} cannot be written: {error.strerror}. Name another folder") from error
    for name in (SWEEP_FILE, REPORT_FILE):
        check_file(root / name, root, str(root / name))
    with _alone(root), StopRequest() as stop:
        return _Sweep(path, space, selection, root, count_processes(processes, None), stop, say).run(first)


def combine(path: str, space: Space, selection: Selection) -> list[Combination]:
    """Return the runs of a grid or of random draws. With Optuna, return runs that cover the ends of all ranges.

    Raises:
        ValueError: a flag or a recipe is wrong, or Optuna is missing. The message has a line per problem.
    """
    random, optuna, draw_seed = selection
    if random is not None and optuna is not None:
        raise ValueError(f"--random={random} and --optuna={optuna} exclude each other. Give one")
    if optuna is not None:
        check_packages(("optuna",), "optuna", "--optuna")
        check_number(space, optuna, "--optuna")
        chosen = extremes(space)
    elif random is not None:
        check_number(space, random, "--random")
        chosen = list(islice(draws(space, draw_seed), random))
    else:
        chosen = grid(space)
    return with_recipes(path, space, chosen)


@dataclass
class _Sweep:
    """A running sweep: its runs so far, each with its line in sweep.json."""

    path: str
    space: Space
    selection: Selection
    root: Path
    world_size: int
    stop: StopRequest
    say: Callable[[str], None]
    runs: list[Combination] = field(default_factory=list)
    records: list[JsonRecord] = field(default_factory=list)
    chosen_by: JsonRecord = field(default_factory=dict)
    earlier: JsonRecord = field(default_factory=dict)
    """Content of sweep.json before this start."""
    chosen_before: list[JsonRecord] = field(default_factory=list)
    """Runs in sweep.json that Optuna has chosen in the same way. They are kept."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of inputs by their names. Data is read once, not once per run."""

    def run(self, first: Sequence[Combination]) -> Swept:
        """Train all runs. `first` are the runs of a grid or of random draws."""
        number = self.selection.num_optuna
        self.chosen_by = {
            "optuna": number is not None,
            "seed": self.selection.draw_seed,
            "values": {name: str(values) for name, values in self.space.swept.items()},
            "inputs": self._inputs_digest(first[0].recipe),
        }
        self.earlier = read_record(self.root / SWEEP_FILE)
        if number is not None and self.earlier.get("chosen_by") == self.chosen_by:
            self.chosen_before = self.earlier.get("runs", [])
        num_runs = len(first) if number is None else number * len(self.space.seeds or [SEED])
        on = format_count(self.world_size, "process", "processes")
        self.say(f"{format_count(num_runs, 'run')} on {on}, one after the other, in {self.root}")
        for batch in (first,) if number is None else self._chosen(number):
            begin = len(self.runs)
            self.runs += batch
            self.records += map(self._begun, batch)
            for place in range(begin, len(self.runs)):
                self._train(place, num_runs)
                if self.stop.requested and (place + 1 < num_runs or self.records[place]["status"] != FINISHED):
                    raise Preempted(
                        f"{self.runs[place].name} was asked to stop. Run the same command again to resume the sweep"
                    )
        return self._conclude()

    def _chosen(self, number: int) -> Iterator[list[Combination]]:
        """Yield the runs of each combination that Optuna chooses. Earlier choices in sweep.json are kept."""
        before = [_without_seed(run["settings"]) for run in self.chosen_before]
        before = [values for place, values in enumerate(before) if values not in before[:place]]
        for done in range(number):
            chosen = before[done] if done < len(before) else self._propose()
            yield with_recipes(self.path, self.space, [chosen])

    def _propose(self) -> Values:
        outcomes, size = [], len(self.space.seeds or [SEED])
        for at in range(0, len(self.runs), size):
            seeds = self.records[at : at + size]
            found = [run["value"] for run in seeds if run["status"] == FINISHED and run["value"] is not None]
            mean = sum(found) / size if len(found) == size else None
            has_diverged = any(run["exit_code"] == 3 for run in seeds)
            outcomes.append(Outcome(_without_seed(self.runs[at].values), mean, has_diverged))
        metric = next((record["metric"] for record in self.records if record.get("value") is not None), "loss")
        greater = bool(self.runs) and not self.runs[0].recipe.evaluate.is_lower_better(metric)
        return propose(self.space, outcomes, greater_is_better=greater, draw_seed=self.selection.draw_seed)

    def _train(self, place: int, num_runs: int) -> None:
        """Train one run, unless it has finished before, and write its result to sweep.json."""
        each, record = self.runs[place], self.records[place]
        where = f"[{place + 1}/{num_runs}] {each.name}"
        if record["status"] == FINISHED:
            self.say(f"{where}: finished before")
            return
        self.say(f"{where}: training; its output is in {self.root / LOG_FOLDER / each.name}.txt")
        self._write()
        code, reason = self._launch(each, record)
        record["exit_code"] = code
        record["status"] = FINISHED if code == 0 else STOPPED if self.stop.requested else FAILED
        row = row_of(self.root / each.name, each, FINISHED)
        record.update(metric=row.metric, value=row.value)
        self._write()
        if code == 0 and row.value is not None:
            reason = f"{label(row.metric)} {show_metric(row.metric, row.value)}"
        elif self.stop.requested:
            reason = ""
        self.say(f"{where}: {record['status']} in {format_seconds(record['seconds'])}{f': {reason}' if reason else ''}")

    def _launch(self, each: Combination, record: JsonRecord) -> tuple[int, str]:
        """Run one combination until its end or a stop request, and return its exit code and its error in one line."""
        begin, before = time.monotonic(), record["seconds"]
        words = [*self.space.fixed, *flags_of(each.values)]
        # A run on other data is kept in previous-N and trained again.
        if each.recipe.checkpoint.resume == "auto":
            words += ["--checkpoint.resume", "unchanged"]
        folder, logs = self.root / each.name, self.root / LOG_FOLDER
        for _ in range(ATTEMPTS):
            with TrainingProcess(each.name, self.path, words, folder, self.world_size, log_folder=logs) as training:
                while (code := training.exit_code()) is None:
                    if self.stop.requested:
                        training.stop(STOP_SECONDS)
                        code = training.exit_code()
                        break
                    time.sleep(POLL_SECONDS)
                reason = training.error().partition("\n")[0] or f"exit code {code}"
            record["seconds"] = round(before + time.monotonic() - begin, 3)
            if code != 75 or self.stop.requested:
                break
        return (1 if code is None else code), "" if code == 0 else reason

    def _conclude(self) -> Swept:
        """Write the table of means and the comparison of the trained runs."""
        rows = [
            row_of(self.root / each.name, each, str(record["status"])) for each, record in zip(self.runs, self.records)
        ]
        facts = describe_rows(rows, self.runs[0].recipe)
        self._write(facts)
        order = [fact["combination"] for fact in facts]
        best_first = sorted(zip(rows, self.runs), key=lambda pair: order.index(pair[0].name))
        trained = [folder for _, each in best_first if ((folder := self.root / each.name) / METRICS_FILE).is_file()]
        head = ["combination", f"{label(facts[0]['metric'])}, mean", "spread", "finished", "values"]
        lines = []
        for fact in facts:
            numbers = [MISSING if fact[key] is None else f"{fact[key]:.4g}" for key in ("mean", "spread")]
            values = ", ".join(f"{value:.4g}" for value in fact["values"])
            finished = f"{len(fact['values'])} of {fact['runs']}"
            lines.append([fact["combination"], *numbers, finished, values or MISSING])
        report = None
        if trained:
            title = "Combinations, best first"
            if len(trained) > MOST_COMPARED:
                title += f"; below: the best {MOST_COMPARED} of {len(trained)} runs"
            block = {"title": title, "head": head, "rows": [{"name": name, "cells": cells} for name, *cells in lines]}
            report = write_report(trained[:MOST_COMPARED], self.root / REPORT_FILE, home=self.root, tables=[block])
        widths = [max(map(len, column)) for column in zip(head, *lines)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in (head, *lines)]
        failed = [record for record in self.records if record["status"] != FINISHED]
        text += [f"not finished: {record['name']} (exit code {record['exit_code']})" for record in failed]
        others = [int(record["exit_code"]) for record in failed if record["exit_code"] != 3]
        exit_code = others[0] if others else 3 if len(failed) == len(self.records) else 0
        return Swept("\n".join(text), report, exit_code, self.root)

    def _begun(self, each: Combination) -> JsonRecord:
        """Return the line of a run in sweep.json, or its old line if it finished with equal recipe and inputs."""
        earlier: JsonRecord = next((run for run in self.earlier.get("runs", []) if run["name"] == each.name), {})
        # Defaults are left out, because a newer version with more settings must recognize its runs.
        digest = json_digest(each.recipe.model_dump(mode="json", exclude={"output_dir"}, exclude_defaults=True))
        inputs = self._inputs_digest(each.recipe)
        is_same = earlier.get("recipe_digest") == digest and earlier.get("inputs") == inputs
        if earlier.get("inputs", inputs) != inputs:
            self.say(f"{each.name}: data or code has changed since it was trained; training it again")
        if is_same and earlier.get("status") == FINISHED and (self.root / each.name / SUMMARY_FILE).is_file():
            return dict(earlier)
        return {
            "name": each.name, "settings": each.values, "status": WAITING, "exit_code": None,
            "seconds": earlier.get("seconds", 0.0) if is_same else 0.0, "recipe_digest": digest, "inputs": inputs,
        }  # fmt: skip

    def _inputs_digest(self, recipe: Recipe) -> str:
        names = json_digest([recipe.task, *(name for _, name in recipe.inputs())])
        if names not in self.digests:
            self.digests[names] = inputs_digest(recipe)
        return self.digests[names]

    def _write(self, combinations: Sequence[JsonRecord] = ()) -> None:
        names = {record["name"] for record in self.records}
        # Optuna has chosen these runs before, so they are kept for later.
        later = [run for run in self.chosen_before if run["name"] not in names]
        content = {"runs": [*self.records, *later], "combinations": combinations, "chosen_by": self.chosen_by}
        write_file(self.root / SWEEP_FILE, json_text(content).encode(), self.root)


def row_of(folder: Path, each: Combination, status: str) -> Row:
    """Return the row of a run: the last evaluation's `evaluate.metric_for_best_model`, or the last training loss.

    The training loss is used only for a run without evaluations.
    """
    name = ", ".join(f"{name} {value}" for name, value in _without_seed(each.values).items()) or "all seeds"
    metric = each.recipe.evaluate.best_metric
    if status != FINISHED or not (folder / METRICS_FILE).is_file():
        return Row(name, metric, None)
    run = load_run(folder)
    if found := run.final_metrics():
        return Row(name, metric, _number(found.get(metric)), _number(found.get("loss")))
    return Row(name, "training loss", _number(run.train[-1].get("loss") if run.train else None))


def describe_rows(rows: Sequence[Row], recipe: Recipe) -> list[JsonRecord]:
    """Return mean, sample standard deviation, and number of runs per combination, best first.

    Of equal means, the lower loss comes first.
    """
    metric = next((row.metric for row in rows if row.value is not None), rows[0].metric)
    sign = 1 if recipe.evaluate.is_lower_better(metric) else -1
    facts = []
    for name in dict.fromkeys(row.name for row in rows):
        runs = [row for row in rows if row.name == name]
        values = [row.value for row in runs if row.value is not None]
        losses = [row.loss for row in runs if row.value is not None and row.loss is not None]
        mean, spread = fmean(values) if values else None, stdev(values) if len(values) > 1 else None
        place = (mean is None, sign * (mean or 0.0), fmean(losses) if losses else math.inf)
        fact = {
            "combination": name, "metric": metric, "mean": mean, "spread": spread, "values": values, "runs": len(runs)
        }  # fmt: skip
        facts.append((place, fact))
    return [fact for _, fact in sorted(facts, key=lambda pair: pair[0])]


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def inputs_digest(recipe: Recipe) -> str:
    """Return a digest of a run's inputs: data, model, tokenizer, and code of a custom task.

    Files count by content. Folders count by the names, sizes, and times of their files.
    """
    contents = [_content(Path(each)) for _, path in recipe.inputs() for each in sorted(glob.glob(path)) or [path]]
    return json_digest(contents + ([digest_of_code(type(load_task(recipe.task)))] if ":" in recipe.task else []))


def _content(path: Path) -> Any:
    try:
        if path.is_file():
            return str(digests_of(path.parent, [path.name])[path.name])
        files = sorted(each for each in path.rglob("*") if each.is_file())
        facts = [(each, each.stat()) for each in files]
        return [[str(each.relative_to(path)), stat.st_size, stat.st_mtime_ns] for each, stat in facts]
    # The run itself reports the error.
    except OSError as error:
        return type(error).__name__


def _without_seed(values: Values) -> Values:
    return {name: value for name, value in values.items() if name != SEED}


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder, if its file system has locks. Raise ValueError if another sweep is running."""
    lock = FileLock(root / ".sweep.lock", thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"output_dir={root} is in use by another sweep. Wait for it, stop it, or set another --output_dir"
        ) from None
    except OSError:
        pass  # The folder cannot be written, which the first run reports, or the file system has no locks.
    try:
        yield
    finally:
        lock.release()
