"""The arithmetic of drawing a run's curves: columns, trends, axis labels."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_train.core.state import JsonRecord

MAX_POINTS = 1200
"""A trend has at most this many points."""
MIN_TO_SMOOTH = 20
"""A curve with fewer points has no trend of its own."""
Array = np.ndarray[Any, np.dtype[np.float64]]


def local_lines(values: Array, width: float) -> tuple[Array, Array]:
    """Return the level and the slope (per value) of a straight line fitted around each value, weighted by a Gaussian of `width`.

    Such a fit neither lags behind a fall nor bends at the ends, as a moving average does (Cleveland 1979).
    """
    reach = min(len(values), math.ceil(4 * width))
    offsets = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = np.exp(-0.5 * (offsets / width) ** 2)

    def moment(signal: Array, power: int) -> Array:
        return np.convolve(signal, weights * (-offsets) ** power)[reach : reach + len(values)]

    s0, s1, s2 = (moment(np.ones_like(values), power) for power in range(3))
    m0, m1 = moment(values, 0), moment(values, 1)
    determinant = s0 * s2 - s1 * s1
    return (s2 * m0 - s1 * m1) / determinant, (s0 * m1 - s1 * m0) / determinant


def trend(steps: Array, values: Array, *, in_log: bool = False) -> tuple[Array, Array]:
    """Return the values without their scatter: at each point a line fitted to about a twentieth of the curve."""
    source = np.log(values) if in_log else values
    if len(steps) > 2 * MAX_POINTS:
        edges = np.linspace(0, len(steps), MAX_POINTS + 1, dtype=np.int64)
        steps, source = (np.add.reduceat(each, edges[:-1]) / np.diff(edges) for each in (steps, source))
    level, _ = local_lines(source, max(1.0, len(source) / 90))
    return steps, np.exp(level) if in_log else level


def column(lines: Sequence[JsonRecord], column: str) -> tuple[Array, Array]:
    present = [(line["step"], line[column]) for line in lines if isinstance(line.get(column), int | float)]
    pairs = np.array(present, dtype=np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def short_number(value: float) -> str:
    """Return an axis label: `250`, `12.5k`, `0.0003`, `3e-05`."""
    size = abs(value)
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}" if size == 0 or size >= 1e-3 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
