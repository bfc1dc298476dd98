"""The learning-rate range test (Smith 2017, arXiv 1506.01186): raise the rate step by step until the loss diverges.

The test trains in a temporary folder, through the loop of a run. It does not read or change any run. The suggested rate
is the highest one at which the loss still falls steeply. The result is a value, a table, and a picture.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accel_train.core.files import existing_part
from accel_train.core.format import format_count
from accel_train.core.json_io import json_text
from accel_train.core.ownership import check_file, write_file
from accel_train.core.state import JsonRecord, StepResult
from accel_train.engine.run import Extensions, RunContext
from accel_train.observe.observer import Observer
from accel_train.optim.schedule import Rate
from accel_train.recipe.schema import Recipe
from accel_train.report.charts import local_lines
from accel_train.report.lr_chart import draw_range_test
from accel_train.runtime.memory import garbage_collected_at_steps
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run

MIN_STEPS = 20
"""Minimum steps before divergence. Fewer steps do not determine a slope."""
_FILES = ("find-lr.json", "find-lr.png")
FIRST_STEPS = 5
"""Steps whose mean loss is the reference for later losses."""
_CLEAR_FALL = 2.0
"""Minimum fall of the smoothed loss, as a multiple of the scatter of single losses.

Simulated tests with scatter alone reach it in none of 400 cases with 100 steps, and in one of twenty with 20 steps.
"""
_WIDTH = 0.08
"""Width of the smoothing, as a share of all steps.

A larger width shifts the suggestion. With a smaller one, seeds disagree.
"""
_STEEP = 0.5
"""Minimum slope of a steep fall, as a share of the steepest slope."""
_AT_THE_LOWEST = 0.1
"""Share of the fall above the lowest loss that still counts as lowest.

On a plateau, scatter decides which step is lowest.
"""
Array = NDArray[np.float64]
_EMA_DECAY = 0.8


@dataclass(frozen=True)
class Suggestion:
    """The learning rate that the losses of a range test suggest, and the reason."""

    index: int | None
    """Last step with a steep fall before the loss is lowest. None without a suggestion."""
    reason: str
    smoothed: Array
    """Smoothed loss of the steps with finite loss. A diverging loss is cut off slightly above the first losses."""


@dataclass(frozen=True)
class RangeTest:
    """The result of a finished range test."""

    rates: Array
    """Learning rates of the optimizer, after `lr_scaling`."""
    losses: Array
    diverged: bool
    suggestion: Suggestion
    rate: Rate

    @property
    def learning_rate(self) -> float | None:
        """Return the suggested learning rate for a recipe, before `lr_scaling`, or None without a suggestion."""
        index = self.suggestion.index
        return None if index is None else float(f"{self.rates[index] / self.rate.factor:.2g}")


def rates_of_test(low: float, high: float, num_steps: int) -> Array:
    """Return learning rates that rise by the same factor at each step.

    Raises:
        ValueError: the rates do not rise.
    """
    if low >= high:
        raise ValueError(f"--min {low:g} --max {high:g}: rates must be positive, with --min below --max")
    return np.geomspace(low, high, num_steps)


def suggest(rates: Array, losses: Array, diverged: bool) -> Suggestion:
    """Return the last rate with a steep fall of the smoothed loss, before the loss is about lowest.

    A fall is steep if its slope is at least half of the steepest slope. This is the range test of Smith 2017 (arXiv
    1506.01186, section 3.3) on a smoothed curve. The single steepest step is not used: if a loss falls evenly over a
    decade or two, scatter decides which step is steepest. The first steps do not count, because the fit has points on
    one side only there. A fall that is not clear against the scatter of single losses gives no suggestion.
    """
    finite = losses[np.isfinite(losses)]
    if len(finite) < MIN_STEPS:
        what = (
            f"the loss diverged after {format_count(len(finite), 'step')}"
            if diverged
            else f"only {format_count(len(finite), 'step')}"
        )
        return Suggestion(None, f"too few steps: {what}. Lower --min, or raise --steps", finite)
    width = max(2.0, _WIDTH * len(finite))
    first = max(FIRST_STEPS, round(2 * width))
    start = float(np.median(finite[:first]))
    # Without this limit, a diverged loss would lift the fit before it.
    finite = np.minimum(finite, 2 * start - finite.min())
    level, slope = local_lines(finite, width)
    lowest = first + int(level[first:].argmin())
    # Differences remove the fall, and the median removes single outliers.
    scatter = 1.4826 * float(np.median(np.abs(np.diff(finite[: lowest + 1])))) / math.sqrt(2)
    fall = float(level[first : lowest + 1].max() - level[lowest])
    if fall <= _CLEAR_FALL * scatter:
        reason = f"unclear: the smoothed loss falls by {fall:.3g}, but single steps scatter by {scatter:.3g}"
        return Suggestion(None, f"{reason}. Raise --steps, the batch size, or --max", level)
    is_low = level[first:] <= level[lowest] + _AT_THE_LOWEST * fall
    before = slope[first : first + int(is_low.argmax()) + 1]
    steepest = float(before.min())
    index = first + int(np.flatnonzero(before <= max(_STEEP * steepest, steepest))[-1])
    reason = "the smoothed loss falls steeply up to this rate"
    if lowest == len(level) - 1 and not diverged:
        reason += ". It still falls at --max, so a higher --max may find a higher rate"
    return Suggestion(index, reason, level)


def check_place(folder: Path) -> None:
    """Check that `write_test` can write to a folder without replacing files of others.

    Raises:
        ValueError: the folder cannot be written, or a file of others is in the way.
    """
    above = existing_part(folder)
    if not above.is_dir():
        raise ValueError(f"--out {folder}: {above} is a file. Name a folder")
    if not os.access(above, os.W_OK):
        raise ValueError(f"--out {folder}: {above} cannot be written. Name another folder")
    for name in _FILES if folder.is_dir() else ():
        check_file(folder / name, folder, str(folder / name))


def record_of(test: RangeTest) -> JsonRecord:
    """Return the suggestion, its reason, and every step as plain values."""
    index = test.suggestion.index
    return {
        "learning_rate": test.learning_rate,
        "learning_rate_after_scaling": None if index is None else float(test.rates[index]),
        "lr_scaling": test.rate.reason,
        "reason": test.suggestion.reason,
        "diverged": test.diverged,
        "steps": [
            {"learning_rate": rate, "loss": loss, "smoothed_loss": smoothed}
            for rate, loss, smoothed in zip(test.rates, test.losses, _padded(test))
        ],
    }


def write_test(test: RangeTest, folder: Path) -> tuple[Path, Path]:
    """Write `find-lr.json` and `find-lr.png` to a folder, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record, index = record_of(test), test.suggestion.index
    picture = draw_range_test(test.rates, test.losses, test.suggestion.smoothed, index)
    json_path, png_path = (folder / name for name in _FILES)
    return write_file(json_path, json_text(record).encode(), folder), write_file(png_path, picture, folder)


def _padded(test: RangeTest) -> list[float | None]:
    smoothed: list[float | None] = [float(value) for value in test.suggestion.smoothed]
    return smoothed + [None] * (len(test.losses) - len(smoothed))


def format_test(test: RangeTest) -> str:
    """Return a table of a dozen rates with their losses, and the line for the recipe."""
    index, smoothed = test.suggestion.index, _padded(test)
    rows = {*np.linspace(0, len(test.losses) - 1, min(12, len(test.losses))).round().astype(int).tolist()}
    lines = [f"{'learning rate':>14}{'loss':>12}{'smoothed':>12}"]
    for row in sorted(rows if index is None else rows | {index}):
        mark = "   <- last steep fall" if row == index else ""
        value = "-" if smoothed[row] is None else f"{smoothed[row]:.4f}"
        lines.append(f"{test.rates[row]:>14.3g}{test.losses[row]:>12.4f}{value:>12}{mark}")
    how = "the loss diverged" if test.diverged else "all steps done"
    lines.append(f"\n{format_count(len(test.losses), 'step')}; {how}")
    lines.append(test.suggestion.reason)
    if (rate := test.learning_rate) is not None:
        lines.append(f"\noptimizer.learning_rate: {rate:g}")
        if test.rate.factor != 1:
            lines.append(f"(lr_scaling turns this into {rate * test.rate.factor:.3g}: {rate:g} x {test.rate.factor:g})")
    return "\n".join(lines)


class _Enough(Exception):
    """Raised to leave the loop at the end of the test. A requested stop would write a checkpoint instead."""


@dataclass
class Recorder(Observer):
    """An observer that records losses, and ends the run when the loss has diverged or all steps are done.

    All processes see the same numbers, so all of them end at the same step. A loss has diverged if it is not finite, or
    if its smoothed value exceeds twice the first or four times the lowest value.
    """

    num_steps: int
    losses: list[float] = field(default_factory=list)
    diverged: bool = False
    _average: float = 0.0
    _first: float = math.nan
    _best: float = math.inf

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Record a step. Raise `_Enough` after the last needed step."""
        # A step without targets has no loss, so the last loss is repeated to keep losses aligned with rates.
        loss = result.loss if result.num_targets or not self.losses else self.losses[-1]
        self.losses.append(loss)
        step = len(self.losses)
        self._average = _EMA_DECAY * self._average + (1 - _EMA_DECAY) * loss
        smoothed = self._average / (1 - _EMA_DECAY**step)
        if step <= FIRST_STEPS:
            self._first = float(np.mean(self.losses))
        self._best = min(self._best, smoothed)
        too_high = step > FIRST_STEPS and smoothed > min(2 * abs(self._first), 4 * abs(self._best))
        self.diverged = too_high or not math.isfinite(loss)
        if self.diverged or step >= self.num_steps:
            raise _Enough


def prepare_test(recipe: Recipe, rates: Array, folder: Path) -> tuple[RunContext, Recorder]:
    """Prepare a run of the recipe in `folder` that only tests learning rates. Raises as `prepare_run` does."""
    # The recipe has one step more than the test.
    recorder, last = Recorder(len(rates)), len(rates) - 1
    extensions = Extensions(observers=(recorder,))
    run = prepare_run(_recipe_of_test(recipe, len(rates), folder), extensions=extensions)
    run.schedule = lambda step: float(rates[min(step, last)])
    return run, recorder


def _recipe_of_test(recipe: Recipe, num_steps: int, folder: Path) -> Recipe:
    """Return the recipe without evaluation, checkpoints, trackers, averaged weights, and interventions of the guard."""
    changes: dict[str, dict[str, object]] = {
        # One step more than the test makes, because a checkpoint follows the last step of a run.
        "schedule": {
            "type": "constant", "max_steps": num_steps + 1, "num_epochs": None, "warmup_steps": 0, "warmup_ratio": None,
        },
        "guard": {
            "on_nonfinite": "skip", "max_consecutive_skips": num_steps, "max_skips_per_1000_steps": 1000,
            "on_spike": "off", "max_incidents": 0,
        },
        "checkpoint": {"every_steps": 0, "resume": "auto"},
        "evaluate": {"every_steps": 0, "every_epochs": None},
        "log": {
            "trackers": (), "notify": (), "callbacks": (), "progress": False, "every_steps": num_steps,
            "profile_steps": None,
        },
        "optimizer": {"ema_decay": None},
    }  # fmt: skip
    sections = {name: getattr(recipe, name).model_copy(update=update) for name, update in changes.items()}
    return recipe.model_copy(update={**sections, "output_dir": str(folder / "run")})


def run_test(run: RunContext, recorder: Recorder, rates: Array) -> RangeTest:
    """Train through the rates until the loss diverges, and return the losses with a suggestion."""
    with run.resources, garbage_collected_at_steps(), suppress(_Enough):
        # `run.stop` is not opened, so Ctrl-C interrupts at once. There is nothing to save.
        run_steps(run)
    losses = np.array(recorder.losses)
    return RangeTest(
        rates=rates[: len(losses)],
        losses=losses,
        diverged=recorder.diverged,
        suggestion=suggest(rates[: len(losses)], losses, recorder.diverged),
        rate=run.plan.rate,
    )
