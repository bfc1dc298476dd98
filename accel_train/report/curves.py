"""What is drawn of a run, and the arithmetic of drawing it: columns, trends, thinning, axis labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from accel_train.state import JsonRecord

MAX_POINTS = 1200
"""A curve is drawn with at most this many points: the least and the greatest of each stretch, so no spike is lost."""

MIN_TO_SMOOTH = 20
"""A curve with fewer points has no trend of its own."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Curves:
    """What is drawn of one run: its metrics lines by split, and its events."""

    name: str
    train: Sequence[JsonRecord]
    evals: Sequence[JsonRecord]
    events: Sequence[JsonRecord]


def trend(steps: Array, values: Array, *, in_log: bool = False) -> tuple[Array, Array]:
    """The values without their scatter: at each point a straight line, fitted to about a twentieth of the curve.

    A local linear fit (Gaussian weights) neither lags behind a fall nor bends at the ends, as a moving average does.
    """
    source = np.log(values) if in_log else values
    steps, source = _bin_means(steps, source)
    width = max(1.0, len(source) / 90)
    reach = min(len(source), round(4 * width))
    offsets = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = np.exp(-0.5 * (offsets / width) ** 2)

    def moment(signal: Array, power: int) -> Array:
        return np.convolve(signal, weights * (-offsets) ** power)[reach : reach + len(source)]

    ones = np.ones_like(source)
    s0, s1, s2 = (moment(ones, power) for power in range(3))
    fitted = (s2 * moment(source, 0) - s1 * moment(source, 1)) / (s0 * s2 - s1 * s1)
    return steps, np.exp(fitted) if in_log else fitted


def _bin_means(steps: Array, values: Array) -> tuple[Array, Array]:
    if len(steps) <= 2 * MAX_POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), MAX_POINTS + 1, dtype=np.int64)
    counts = np.diff(edges)
    return np.add.reduceat(steps, edges[:-1]) / counts, np.add.reduceat(values, edges[:-1]) / counts


def thin(steps: Array, values: Array) -> tuple[Array, Array]:
    """At most MAX_POINTS points with the same outline."""
    if len(steps) <= MAX_POINTS:
        return steps, values
    kept: set[int] = {0, len(steps) - 1}
    edges = np.linspace(0, len(steps), MAX_POINTS // 2, dtype=np.int64)
    for begin, end in pairwise(edges):
        kept |= {int(begin + values[begin:end].argmin()), int(begin + values[begin:end].argmax())}
    index = np.array(sorted(kept))
    return steps[index], values[index]


def column(lines: Sequence[JsonRecord], column: str) -> tuple[Array, Array]:
    present = [(line["step"], line[column]) for line in lines if isinstance(line.get(column), int | float)]
    pairs = np.array(present, dtype=np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def short_number(value: float) -> str:
    """An axis label: `250`, `12.5k`, `0.0003`, `3e-05`."""
    size = abs(value)
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}" if size == 0 or size >= 1e-3 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
