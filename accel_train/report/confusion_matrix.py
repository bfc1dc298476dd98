"""The picture of a confusion matrix."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from accel_train.report.charts import Chart
from accel_train.report.curves import short_number
from accel_train.report.style import INK, MUTED, PAPER, SERIES, render

WIDTH = 480
"""CSS pixels: half the page; many classes take the whole of it."""

MAX_NAME = 22
DEEPEST = 0.55
"""Opacity of a cell that has its whole row: text on it stays readable in light and dark."""


def draw_confusion_matrix(matrix: NDArray[np.int64], label_names: Sequence[str]) -> Chart:
    """Draw a (C, C) matrix, rows are the truth: counts as text, colour by the share of the row."""
    names = [name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…" for name in label_names]
    count, longest = len(names), max(len(name) for name in names)
    beside = 6.3 * longest + 34  # CSS pixels, as all here
    cell = min(84.0, max(31.0, (WIDTH - beside) / count))
    slanted = 6.5 * longest > cell - 8
    below = (4.6 * longest + 40) if slanted else 44
    size = (max(cell * count + beside, 190.0), cell * count + below + 34)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        _fill_cells(axes, matrix, cell)
        ticks = np.arange(count) + 0.5
        look: dict[str, Any] = {"fontsize": 10 if cell > 34 else 8.5, "color": INK}
        axes.set_yticks(ticks, names, parse_math=False, **look)
        turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
        axes.set_xticks(ticks, names, parse_math=False, **look, **turned)
        axes.set(xlim=(0, count), ylim=(count, 0), aspect="equal")
        axes.set_xlabel("prediction", color=MUTED)
        axes.set_ylabel("truth", color=MUTED)
        axes.tick_params(pad=6)
        axes.spines[:].set_visible(False)

    about = "of the evaluation: rows are the truth, columns the prediction"
    svg, png = render(draw, "confusion_matrix", "Confusion matrix", size, about=about)
    return Chart("confusion_matrix", svg, None, png, "details", round(size[0]))


def _fill_cells(axes: Axes, matrix: NDArray[np.int64], cell: float) -> None:
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    depths = DEEPEST * shares**0.7  # a tenth of a row is a fifth as deep, not a tenth: mistakes are what one looks for
    texts = [[f"{value:,}" if value < 10_000 else short_number(value) for value in row] for row in matrix.tolist()]
    widest = max(len(text) for row in texts for text in row)
    fontsize = min(11.0, (cell - 5) / (0.58 * widest))
    for row, values in enumerate(texts):
        for column, text in enumerate(values):
            fill = (SERIES[0], depths[row, column])
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=fill, edgecolor=PAPER, lw=1.5))
            look: dict[str, Any] = {"color": MUTED if text == "0" else INK, "fontsize": fontsize}
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center_baseline", **look)
