"""The learning-rate range test (Smith 2017, arXiv 1506.01186): the rate rises step by step until the loss diverges.

The steps are those of a run, through the same loop, in a temporary folder: nothing of a run is read or changed. Suggested is
the rate up to which the loss falls steeply, as a value, a table and a picture.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.core.json_io import json_text
from accel_train.core.ownership import check_file, write_file
from accel_train.core.state import StepResult
from accel_train.engine.run import RunContext
from accel_train.engine.run_plan import Extensions
from accel_train.observe.observer import Observer
from accel_train.optim.schedule import scale_learning_rate
from accel_train.recipe.schema import Recipe
from accel_train.report.charts import local_lines
from accel_train.report.lr_chart import draw_range_test
from accel_train.runtime.memory import garbage_collected_at_steps
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run

MIN_STEPS = 20
"""Fewer steps than this before the loss diverges say nothing about its slope."""
_FILES = ("find-lr.json", "find-lr.png")
FIRST_STEPS = 5
"""Steps whose mean loss later losses are compared with."""
_CLEAR_FALL = 2.0
"""Least fall of the smoothed loss, as a multiple of the scatter of single losses: of losses that only scatter, none of 400
simulated tests of 100 steps falls as far, and one in twenty of 20 steps."""
_WIDTH = 0.08
"""Width of the smoothing, as a share of all steps: wider moves the suggestion, narrower lets seeds disagree."""
_STEEP = 0.5
"""Slope of a steep fall, as a share of the steepest."""
_AT_THE_LOWEST = 0.1
"""Share of the fall that is left where the lowest loss counts as reached: scatter decides which step of a plateau is lowest."""
Array = NDArray[np.float64]
_EMA_DECAY = 0.8


@dataclass(frozen=True)
class Suggestion:
    """The learning rate that the losses of a range test suggest, and why."""

    index: int | None
    """The last step at which the loss falls steeply before it is lowest; None where it cannot be found."""
    reason: str
    smoothed: Array
    """The smoothed loss at each step whose loss is finite; a diverging loss is cut off little above the first losses."""


@dataclass(frozen=True)
class RangeTest:
    """A finished range test."""

    rates: Array
    """Learning rates as the optimizer had them, after `lr_scaling`."""
    losses: Array
    diverged: bool
    suggestion: Suggestion
    scale: float
    """Factor of `optimizer.lr_scaling`: a recipe's learning_rate times this is what the optimizer gets."""
    scale_reason: str

    @property
    def learning_rate(self) -> float | None:
        """The suggestion as a recipe writes it, before `lr_scaling`."""
        index = self.suggestion.index
        return None if index is None else float(f"{self.rates[index] / self.scale:.2g}")


def rates_of_test(low: float, high: float, num_steps: int) -> Array:
    """Return learning rates that rise by the same factor at each step.

    Raises:
        ValueError: they do not rise, or are too few.
    """
    if not (0 < low < high < math.inf):
        raise ValueError(f"--min {low:g} --max {high:g}: the rates must be positive, and --min below --max")
    if num_steps < MIN_STEPS:
        raise ValueError(f"--steps {num_steps}: a slope needs at least {MIN_STEPS} steps; 100 is a good number")
    return np.geomspace(low, high, num_steps)


def suggest(rates: Array, losses: Array, diverged: bool) -> Suggestion:
    """Return the last rate at which the smoothed loss falls at least half as fast as at its steepest, before it is about lowest.

    The range test of Smith 2017 (arXiv 1506.01186, section 3.3), on a smoothed curve. The single steepest step is not used:
    where a loss falls evenly over a decade or two, scatter decides which one it is. The first steps, where a fit has points
    on one side only, do not count. There is no suggestion where the fall is not clear against the scatter of single losses.
    """
    finite = losses[np.isfinite(losses)]
    if len(finite) < MIN_STEPS:
        what = f"the loss diverged after {len(finite)} steps" if diverged else f"there are {len(finite)} steps"
        return Suggestion(None, f"too few steps: {what}; lower --min, or raise --steps", finite)
    width = max(2.0, _WIDTH * len(finite))
    first = max(FIRST_STEPS, round(2 * width))
    start = float(np.median(finite[:first]))
    finite = np.minimum(finite, 2 * start - finite.min())  # else a diverged loss would lift the fit before it
    level, slope = local_lines(finite, width)
    lowest = first + int(level[first:].argmin())
    # Differences leave out the fall, and the median leaves out single outliers.
    scatter = 1.4826 * float(np.median(np.abs(np.diff(finite[: lowest + 1])))) / math.sqrt(2)
    fall = float(level[first : lowest + 1].max() - level[lowest])
    if fall <= _CLEAR_FALL * scatter:
        reason = f"cannot tell: the smoothed loss falls by {fall:.3g}, and single steps scatter by {scatter:.3g}"
        return Suggestion(None, f"{reason}; raise --steps, or the batch size, or --max", level)
    is_low = level[first:] <= level[lowest] + _AT_THE_LOWEST * fall
    before = slope[first : first + int(is_low.argmax()) + 1]
    steepest = float(before.min())
    index = first + int(np.flatnonzero(before <= max(_STEEP * steepest, steepest))[-1])
    reason = "the smoothed loss falls steeply up to here"
    if lowest == len(level) - 1 and not diverged:
        reason += "; it still falls at --max, so a higher --max may find a higher rate"
    return Suggestion(index, reason, level)


def check_place(folder: Path) -> None:
    """Check that `write_test` can write into a folder, and replaces no file of others.

    Raises:
        ValueError: it cannot, or would.
    """
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ValueError(f"--out {folder}: {above} is a file; give a folder")
    if not os.access(above, os.W_OK):
        raise ValueError(f"--out {folder}: {above} cannot be written; give another place")
    for name in _FILES if folder.is_dir() else ():
        check_file(folder / name, folder, str(folder / name))


def record_of(test: RangeTest) -> dict[str, Any]:
    """Return the suggestion, the reason for it, and every step, as plain values."""
    index = test.suggestion.index
    return {
        "learning_rate": test.learning_rate,
        "learning_rate_after_scaling": None if index is None else float(test.rates[index]),
        "lr_scaling": test.scale_reason,
        "reason": test.suggestion.reason,
        "diverged": test.diverged,
        "steps": [
            {"learning_rate": rate, "loss": loss, "smoothed_loss": smoothed}
            for rate, loss, smoothed in zip(test.rates, test.losses, _padded(test))
        ],
    }


def write_test(test: RangeTest, folder: Path) -> tuple[Path, Path]:
    """Write `find-lr.json` and `find-lr.png` into a folder; return their paths."""
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
        mark = "   <- the last steep fall" if row == index else ""
        value = "-" if smoothed[row] is None else f"{smoothed[row]:.4f}"
        lines.append(f"{test.rates[row]:>14.3g}{test.losses[row]:>12.4f}{value:>12}{mark}")
    how = "the loss diverged there" if test.diverged else "all steps were made"
    lines.append(f"\n{len(test.losses)} steps; {how}")
    lines.append(test.suggestion.reason)
    if (rate := test.learning_rate) is not None:
        lines.append(f"\noptimizer.learning_rate: {rate:g}")
        if test.scale != 1:
            lines.append(f"(before lr_scaling, which makes {rate * test.scale:.3g} of it: {rate:g} x {test.scale:g})")
    return "\n".join(lines)


class _Enough(Exception):
    """Raised to leave the loop at the end of the test: a requested stop would write a checkpoint."""


@dataclass
class Recorder(Observer):
    """Records the loss of each step, and ends the run when the loss has diverged or all steps are done.

    All processes see the same numbers, so all end at the same step. A loss has diverged when it is not finite, or when its
    smoothed value is twice the first or four times the lowest.
    """

    num_steps: int
    losses: list[float] = field(default_factory=list)
    diverged: bool = False
    _average: float = 0.0
    _first: float = math.nan
    _best: float = math.inf

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Record a step; raise `_Enough` at the last one that is needed."""
        # A step without targets has no loss; rates and losses stay aligned.
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
    """Prepare a run of the recipe that only tests learning rates, in a folder of its own; raises as `prepare_run`."""
    recorder, last = Recorder(len(rates)), len(rates) - 1  # the recipe has a step more than the test
    extensions = Extensions(observers=(recorder,))
    run = prepare_run(_recipe_of_test(recipe, len(rates), folder), extensions=extensions)
    run.schedule = lambda step: float(rates[min(step, last)])
    return run, recorder


def _recipe_of_test(recipe: Recipe, num_steps: int, folder: Path) -> Recipe:
    """Return the recipe without evaluation, checkpoints, trackers, averaged weights, or a guard that would intervene."""
    changes: dict[str, dict[str, object]] = {
        # A step more than the test makes: after the last step of a run comes a checkpoint.
        "schedule": {
            "type": "constant", "max_steps": num_steps + 1, "num_epochs": None, "warmup_steps": 0, "warmup_ratio": None,
        },
        "guard": {
            "on_nonfinite": "skip", "max_consecutive_skips": num_steps, "max_skips_per_1000_steps": 1000,
            "on_spike": "off", "max_incidents": 0,
        },
        "checkpoint": {"every_steps": 0, "resume": "auto"},
        "evaluate": {"every_steps": 0, "every_epochs": None},
        "log": {"trackers": (), "notify": (), "progress": False, "every_steps": num_steps, "profile_steps": None},
        "optimizer": {"ema_decay": None},
    }  # fmt: skip
    sections = {name: getattr(recipe, name).model_copy(update=update) for name, update in changes.items()}
    return recipe.model_copy(update={**sections, "output_dir": str(folder / "run")})


def run_test(run: RunContext, recorder: Recorder, rates: Array) -> RangeTest:
    """Train through the rates until the loss diverges, and return the losses with a suggestion."""
    with run.resources, garbage_collected_at_steps(), suppress(_Enough):
        run_steps(run)  # `run.stop` is not opened: Ctrl-C interrupts at once, for there is nothing to save
    losses = np.array(recorder.losses)
    section = run.plan.recipe.optimizer
    scaled = scale_learning_rate(section.learning_rate, section.lr_scaling, run.sizes)
    return RangeTest(
        rates=rates[: len(losses)],
        losses=losses,
        diverged=recorder.diverged,
        suggestion=suggest(rates[: len(losses)], losses, recorder.diverged),
        scale=scaled.value / section.learning_rate,
        scale_reason=scaled.reason,
    )
