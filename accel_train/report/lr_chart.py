"""The picture of a learning-rate range test: the loss over the rate, and up to which rate it falls steeply."""

import io
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from accel_train.report.curves import Array, short_number

PAPER, INK, MUTED, GRID, SERIES = "#fdfdfb", "#33373b", "#7c8187", "#e3e2dc", ("#2b6cb0", "#c9662b")
SIZE = (10.0, 5.14)
"""Width and height in inches, of 72 pixels."""
DPI = 160
LOOK: dict[str, Any] = {
    "font.size": 11.0,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "grid.color": GRID,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    **dict.fromkeys(("xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("xtick.major.pad", "ytick.major.pad"), 7),
}


def draw_range_test(rates: Array, losses: Array, smoothed: Array, suggested: int | None) -> bytes:
    """Return a PNG of the losses over the learning rates; `smoothed` may be shorter, where the last losses are not finite.

    Losses far above the first ones, where the test has diverged, are cut off.
    """
    finite = np.isfinite(losses)
    look: dict[str, Any] = {"color": SERIES[1], "lw": 1.2, "ls": "--", "marker": "o", "markersize": 7}
    with rc_context(LOOK):  # type: ignore[arg-type]
        figure = Figure(figsize=SIZE, dpi=72, layout="constrained", facecolor=PAPER)
        figure.suptitle("Learning-rate range test", x=0.002, ha="left", fontsize=12, fontweight="bold")
        axes = figure.add_subplot()
        axes.plot(rates[finite], losses[finite], color=SERIES[0], alpha=0.45, lw=1, label="each step")
        axes.plot(rates[: len(smoothed)], smoothed, color=SERIES[0], lw=2, label="smoothed")
        if suggested is not None:
            rate = float(rates[suggested])
            axes.axvline(rate, color=SERIES[1], lw=1.2, ls="--")
            axes.plot([rate], [smoothed[suggested]], label=f"last steep fall: {rate:.2g}", **look)
        axes.set_xscale("log")
        if finite.any():
            low, high = float(losses[finite].min()), float(losses[finite].max())
            top = min(high, float(np.median(losses[finite][: max(5, len(rates) // 10)])) * 1.5)
            margin = 0.06 * max(top - low, 1e-9)
            axes.set_ylim(low - margin, max(top, low) + margin)
        axes.grid(lw=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(LogLocator(base=10, numticks=12))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MaxNLocator(6))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes.set_xlabel("learning rate, as the optimizer has it", color=MUTED)
        axes.set_ylabel("training loss", color=INK)
        figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=10)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=DPI)
    return picture.getvalue()
