"""The arithmetic of a run's curves: columns, local fits, thinning, and axis labels."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_train.core.state import JsonRecord

Array = np.ndarray[Any, np.dtype[np.float64]]


def local_lines(values: Array, width: float) -> tuple[Array, Array]:
    """Return the level and slope (per value) of a line fitted around each value.

    Neighbors are weighted by a Gaussian of `width`. Unlike a moving average, such a fit does not lag behind a fall or
    bend at the ends (Cleveland 1979).
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


def thin(steps: Array, values: Array, most: int) -> tuple[Array, Array]:
    """Return at most `most` points in order: both ends, and the minimum and maximum of each of many equal parts."""
    if len(steps) <= most:
        return steps, values
    size = math.ceil(len(values) / (most // 2 - 1))
    parts = np.pad(values, (0, -len(values) % size), mode="edge").reshape(-1, size)
    starts = size * np.arange(len(parts))
    kept = np.unique([0, *(starts + parts.argmin(1)), *(starts + parts.argmax(1)), len(values) - 1])
    return steps[kept], values[kept]


def part_means(steps: Array, values: Array, num_parts: int) -> tuple[Array, Array]:
    """Return the mean step and mean value of `num_parts` equal parts, at most as many as there are points."""
    edges = np.linspace(0, len(steps), num_parts + 1, dtype=np.int64)
    means = [np.add.reduceat(each, edges[:-1]) / np.diff(edges) for each in (steps, values)]
    return means[0], means[1]


def column(lines: Sequence[JsonRecord], column: str) -> tuple[Array, Array]:
    present = [(line["step"], line[column]) for line in lines if isinstance(line.get(column), int | float)]
    pairs = np.array(present, dtype=np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def short_number(value: float) -> str:
    """Return a value as an axis label: `250`, `12.5k`, `0.0003`, `3e-05`."""
    size = abs(value)
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}" if size == 0 or size >= 1e-3 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
