"""The picture of a learning-rate range test: the loss over the rate, and up to which rate it falls steeply."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from accel_train.report.curves import Array, short_number
from accel_train.report.style import INK, MUTED, SERIES, Size, draw_legend, render

SIZE: Size = (720.0, 370.0)


def draw_range_test(rates: Array, losses: Array, smoothed: Array, suggested: int | None) -> bytes:
    """Return a PNG of the losses over the learning rates; `smoothed` may be shorter, where the last losses are not finite.

    Losses far above the first ones, where the test has diverged, are cut off.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        finite = np.isfinite(losses)
        axes.plot(rates[finite], losses[finite], color=SERIES[0], alpha=0.45, lw=1)
        axes.plot(rates[: len(smoothed)], smoothed, color=SERIES[0], lw=2)
        legend = [
            (Line2D([], [], color=SERIES[0], alpha=0.45, lw=1), "each step"),
            (Line2D([], [], color=SERIES[0], lw=2), "smoothed"),
        ]
        if suggested is not None:
            rate = float(rates[suggested])
            axes.axvline(rate, color=SERIES[1], lw=1.2, ls="--")
            axes.plot([rate], [smoothed[suggested]], color=SERIES[1], marker="o", markersize=7)
            look = {"color": SERIES[1], "marker": "o", "ls": "--", "lw": 1.2}
            legend.append((Line2D([], [], **look), f"last steep fall: {rate:.2g}"))  # type: ignore[arg-type]
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
        draw_legend(figure, legend)

    return render(draw, "find-lr", "Learning-rate range test", SIZE)[1]
