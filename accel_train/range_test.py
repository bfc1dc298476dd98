"""What a learning-rate range test found: up to which rate the loss falls steeply, as a value, a table and a picture."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accel_train.observe.ledger import json_text
from accel_train.observe.range_chart import draw_range_test
from accel_train.ownership import check_file, write_file

MIN_STEPS = 20
"""Fewer steps than this before the loss diverges say nothing about its slope."""
_FILES = ("find-lr.json", "find-lr.png")
FIRST_STEPS = 5
"""Their mean loss is what later losses are compared with."""
_CLEAR_FALL = 9.0
"""A fall of the smoothed loss is believed when it is this many of its standard errors: of losses that only scatter, the
greatest fall along a test is more in one of a hundred tests (simulated, 20 to 300 steps)."""
_WIDTH = 0.08
"""How wide the smoothing is, as a share of all steps: wider moves the suggestion, narrower lets seeds disagree."""
_STEEP = 0.5
"""A fall is steep that is at least this share of the steepest."""
_AT_THE_LOWEST = 0.1
"""The lowest loss is reached where this share of the fall is left: which step of a plateau is lowest, scatter decides."""
_LARGEST_FACTOR = 3.0
"""The same test with other scatter must give rates within this factor (80 of 100 times), or none is suggested."""
_NUM_REPEATS = 200

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Suggestion:
    """What the losses of a range test say."""

    index: int | None
    """The last step at which the loss falls steeply before it is lowest; None where it cannot be told."""
    reason: str
    smoothed: Array
    """The loss without its scatter, at each step whose loss is finite; where it diverges, it counts as little higher than at first."""


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
    is_main_process: bool

    @property
    def learning_rate(self) -> float | None:
        """The suggestion as a recipe writes it, before `lr_scaling`."""
        index = self.suggestion.index
        return None if index is None else float(f"{self.rates[index] / self.scale:.2g}")


def rates_of_test(low: float, high: float, num_steps: int) -> Array:
    """Learning rates that rise by the same factor at each step.

    Raises:
        ValueError: they do not rise, or are too few.
    """
    if not (0 < low < high < math.inf):
        raise ValueError(f"--min {low:g} --max {high:g}: the rates must be positive, and --min below --max")
    if num_steps < MIN_STEPS:
        raise ValueError(f"--steps {num_steps}: a slope needs at least {MIN_STEPS} steps; 100 is a good number")
    return np.geomspace(low, high, num_steps)


def suggest(rates: Array, losses: Array, diverged: bool) -> Suggestion:
    """The last rate at which the smoothed loss falls at least half as fast as at its steepest, before it is about lowest.

    The range test of Smith 2017 (arXiv 1506.01186, section 3.3), read off a curve that is smoothed by straight lines fitted
    locally. The single steepest step is not taken: where a loss falls evenly over a decade or two, scatter decides which it
    is. The first steps, where a fit has points on one side alone, do not count. A rate is suggested where the fall is several
    times what the scatter of single losses would give, and where repeats agree: the test is done again on the smoothed losses
    with their residuals in random signs (the wild bootstrap of Wu 1986, Annals of Statistics 14 (4), which keeps the scatter
    of each place).
    """
    is_finite = np.isfinite(losses)
    finite, rates = losses[is_finite], rates[is_finite]
    if len(finite) < MIN_STEPS:
        what = f"the loss diverged after {len(finite)} steps" if diverged else f"there are {len(finite)} steps"
        return Suggestion(None, f"too few steps: {what}; lower --min, or raise --steps", finite)
    width = max(2.0, _WIDTH * len(finite))
    fit_level, fit_slope = local_lines(len(finite), width)
    first = max(FIRST_STEPS, round(2 * width))
    start = float(np.median(finite[:first]))
    finite = np.minimum(finite, 2 * start - finite.min())  # a fit reaches over to a loss that has diverged
    level, slope = fit_level @ finite, fit_slope @ finite
    lowest = first + int(level[first:].argmin())
    # Of differences, so that the fall is no scatter; the median, so that neither is a step that went astray.
    scatter = 1.4826 * float(np.median(np.abs(np.diff(finite[: lowest + 1])))) / math.sqrt(2)
    fall = float(level[first : lowest + 1].max() - level[lowest])
    if lowest == first or fall <= _CLEAR_FALL * scatter / math.sqrt(2 * math.sqrt(math.pi) * width):
        return Suggestion(
            None,
            f"too few steps to tell: the smoothed loss falls by {max(fall, 0.0):.3g}, and single steps scatter by {scatter:.3g}; "
            "raise --steps, or the batch size, or --max",
            level,
        )
    residuals = finite - local_lines(len(finite), width / 2)[0] @ finite  # a narrow fit leaves no fall in them
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (_NUM_REPEATS, len(finite)))
    repeats = level + residuals * signs
    found = [_last_steep_fall(*each, first) for each in zip(repeats @ fit_level.T, repeats @ fit_slope.T)]
    low, high = np.quantile(rates[found], [0.1, 0.9])
    if high > _LARGEST_FACTOR * low:
        return Suggestion(
            None,
            f"cannot tell: single steps scatter by {scatter:.3g}, so that it may be any rate from {low:.2g} to {high:.2g}; "
            "raise --steps, or the batch size",
            level,
        )
    reason = "the smoothed loss falls steeply up to here"
    if lowest == len(level) - 1 and not diverged:
        reason += "; it still falls at --max, so a higher --max may find a higher rate"
    return Suggestion(_last_steep_fall(level, slope, first), reason, level)


def _last_steep_fall(level: Array, slope: Array, first: int) -> int:
    """Return the last step from `first` on whose slope is steep, before the level is about lowest."""
    level, slope = level[first:], slope[first:]
    lowest = level.min()
    fall = level[: level.argmin() + 1].max() - lowest
    before = slope[: int(np.flatnonzero(level <= lowest + _AT_THE_LOWEST * fall)[0]) + 1]
    steepest = before.min()
    return first + int(np.flatnonzero(before <= max(_STEEP * steepest, steepest))[-1])


def local_lines(num_values: int, width: float) -> tuple[Array, Array]:
    """Matrices that make of values the level and the slope (per step) of a line fitted around each.

    Points weigh exp(-(distance / width)^2 / 2).
    """
    offsets = np.arange(num_values)[None, :] - np.arange(num_values)[:, None]
    weights = np.exp(-0.5 * (offsets / width) ** 2)
    s0, s1, s2 = (np.sum(weights * offsets**power, axis=1, keepdims=True) for power in range(3))
    determinant = s0 * s2 - s1**2
    return weights * (s2 - s1 * offsets) / determinant, weights * (s0 * offsets - s1) / determinant


def check_place(folder: Path) -> None:
    """Refuse a folder in which `write_test` would replace what it did not write.

    Raises:
        ValueError: that, or the folder is a file.
    """
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ValueError(f"--out {folder}: {above} is a file; give a folder")
    if not os.access(above, os.W_OK):
        raise ValueError(f"--out {folder}: {above} cannot be written; give another place")
    for name in _FILES if folder.is_dir() else ():
        check_file(folder / name, folder, str(folder / name))


def write_test(test: RangeTest, folder: Path) -> tuple[Path, Path]:
    """`find-lr.json` and `find-lr.png` into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    index = test.suggestion.index
    record = {
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
    picture = draw_range_test(test.rates, test.losses, test.suggestion.smoothed, index)
    as_json, as_png = (folder / name for name in _FILES)
    return write_file(as_json, json_text(record).encode(), folder), write_file(as_png, picture, folder)


def _padded(test: RangeTest) -> list[float | None]:
    smoothed: list[float | None] = [float(value) for value in test.suggestion.smoothed]
    return smoothed + [None] * (len(test.losses) - len(smoothed))


def format_test(test: RangeTest) -> str:
    """A dozen rates with their losses, and the line for the recipe."""
    smoothed = _padded(test)
    shown = {*np.linspace(0, len(test.losses) - 1, min(12, len(test.losses))).round().astype(int).tolist()}
    if test.suggestion.index is not None:
        shown.add(test.suggestion.index)
    lines = [f"{'learning rate':>14}{'loss':>12}{'smoothed':>12}"]
    for row in sorted(shown):
        mark = "   <- the last steep fall" if row == test.suggestion.index else ""
        value = smoothed[row]
        shown_value = "-" if value is None else f"{value:.4f}"
        lines.append(f"{test.rates[row]:>14.3g}{test.losses[row]:>12.4f}{shown_value:>12}{mark}")
    how = "the loss diverged there" if test.diverged else "all steps were made"
    lines.append(f"\n{len(test.losses)} steps; {how}")
    if test.learning_rate is None:
        return "\n".join([*lines, test.suggestion.reason])
    lines += [test.suggestion.reason, f"\noptimizer.learning_rate: {test.learning_rate:g}"]
    if test.scale != 1:
        found = f"{test.learning_rate * test.scale:.3g}"
        lines.append(f"(before lr_scaling, which makes {found} of it: {test.learning_rate:g} x {test.scale:g})")
    return "\n".join(lines)
