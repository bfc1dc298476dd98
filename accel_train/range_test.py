"""What a learning-rate range test found: where the loss falls fastest, as a value, a table and a picture."""

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

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Suggestion:
    """What the losses of a range test say."""

    index: int | None
    """The step of the steepest descent; None where it cannot be told."""
    reason: str
    smoothed: Array
    """The loss without its scatter, at each step whose loss is finite."""


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


def suggest(losses: Array, diverged: bool) -> Suggestion:
    """Where the smoothed loss falls fastest, before its lowest point.

    Smoothed by straight lines fitted locally (Gaussian weights over about a tenth of the steps). A fall is only believed
    where it is several times what the scatter of single losses would give.
    """
    finite = losses[np.isfinite(losses)]
    if len(finite) < MIN_STEPS:
        what = f"the loss diverged after {len(finite)} steps" if diverged else f"there are {len(finite)} steps"
        return Suggestion(None, f"too few steps: {what}; lower --min, or raise --steps", finite)
    level, slope, weight = local_lines(finite)
    lowest = int(level.argmin())
    before = slice(0, max(lowest, FIRST_STEPS) + 1)
    scatter = float(np.std(np.diff(finite[before]))) / math.sqrt(2)  # differences: the fall itself is no scatter
    highest = float(level[before].max())
    fall = highest - float(level[lowest])
    if lowest < FIRST_STEPS or fall <= _CLEAR_FALL * scatter / math.sqrt(weight):
        return Suggestion(
            None,
            f"too few steps to tell: the smoothed loss falls by {max(fall, 0.0):.3g}, and single steps scatter by {scatter:.3g}; "
            "raise --steps, or the batch size, or --max",
            level,
        )
    steepest = int(slope[before].argmin())
    reason = "the smoothed loss falls fastest here"
    if lowest == len(level) - 1 and not diverged:
        reason += "; it still falls at --max, so a higher --max may find a higher rate"
    return Suggestion(steepest, reason, level)


def local_lines(values: Array) -> tuple[Array, Array, float]:
    """Level and slope (per step) at each point of a line fitted around it, and how many points a fit is worth."""
    width = max(2.0, len(values) / 25)
    offsets = np.arange(len(values))[None, :] - np.arange(len(values))[:, None]
    weights = np.exp(-0.5 * (offsets / width) ** 2)
    s0, s1, s2 = (np.sum(weights * offsets**power, axis=1) for power in range(3))
    m0, m1 = weights @ values, (weights * offsets) @ values
    determinant = s0 * s2 - s1**2
    return (s2 * m0 - s1 * m1) / determinant, (s0 * m1 - s1 * m0) / determinant, 2 * math.sqrt(math.pi) * width


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
        mark = "   <- steepest descent" if row == test.suggestion.index else ""
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
