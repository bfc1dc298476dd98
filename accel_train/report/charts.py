"""The curves of one or more runs, drawn once, as SVG for the page (its colours follow the page) and as PNG."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from accel_train.core.state import JsonRecord
from accel_train.report import style
from accel_train.report.curves import MIN_TO_SMOOTH, Array, column, short_number, trend
from accel_train.report.metric_names import label as metric_label
from accel_train.report.metric_names import metrics_with_curves
from accel_train.report.run import Run

LINE_STYLES = ("-", "--", "-.", ":")  # a seventh run takes the first colour again, dashed
RAW_ALPHA = 0.4  # of single values behind their trend

Scale = Literal["linear", "log", "log2", "log if wide"]


@dataclass(frozen=True)
class Chart:
    """One chart in every form: `svg` for the page, `narrow` for phones if that needs another, `png` for elsewhere."""

    name: str
    svg: str
    narrow: str | None
    png: bytes
    group: Literal["run", "evaluation", "details"] = "run"
    """Its section of the page."""
    width: int | None = None
    """The most CSS pixels it takes; None: as wide as its place."""


@dataclass(frozen=True)
class Mark:
    """The look of a kind of event: a marker on the curve, or a line across the chart."""

    label: str
    color: str
    marker: str = ""
    line: str = ""


EVENT_MARKS = {
    "checkpoint": Mark("checkpoint", style.INK, marker="o"),
    "checkpoint_invalid": Mark("damaged checkpoint", style.ALERT, marker="s"),
    "overflow": Mark("fp16 overflow", style.SERIES[4], marker="v"),
    "skip": Mark("skipped step", style.ALERT, marker="X"),
    "preempted": Mark("preempted", style.MUTED, line="--"),
    "resume": Mark("resumed", style.SERIES[3], marker=">"),
    "stop": Mark("stopped", style.ALERT, line="-"),
    "early_stop": Mark("stopped early", style.INK, line=":"),
}


@dataclass(frozen=True)
class Kind:
    """One chart to draw: its column, its axis, and whether single values scatter around a trend."""

    name: str
    title: str
    column: str
    scale: Scale = "linear"
    noisy: bool = True
    from_zero: bool = False
    across: bool = False  # the whole width of the page
    evaluated: bool = False  # a column of the evaluations, not of the steps

    def lines(self, run: Run) -> Sequence[JsonRecord]:
        return run.evals if self.evaluated else run.train


KINDS = (
    Kind("loss", "Loss", "loss", scale="log if wide", across=True),
    Kind("learning_rate", "Learning rate", "learning_rate", noisy=False, from_zero=True),
    Kind("grad_norm", "Gradient norm before clipping", "grad_norm", scale="log"),
    Kind("throughput", "{targets} per second", "throughput", from_zero=True),
    Kind("loss_scale", "Loss scale (fp16)", "loss_scale", scale="log2", noisy=False),
)


def draw_charts(runs: Sequence[Run], targets: str = "tokens") -> list[Chart]:
    """Draw every chart for which some run has numbers, and each evaluation metric but the loss; several runs share the axes.

    `targets` is what the runs count: tokens, images, ...
    """
    kinds = [
        _with_scale(replace(kind, title=kind.title.format(targets=targets.capitalize())), runs)
        for kind in KINDS
        if any(line.get(kind.column) is not None for run in runs for line in run.train)
    ]
    num_beside = sum(not kind.across for kind in kinds)
    beside = style.THIRD if num_beside == 3 else style.HALF  # three in a row, or two: no hole on the page
    charts = [_draw_chart(kind, runs, style.WIDE if kind.across else beside) for kind in kinds]
    metrics = metrics_with_curves(runs)
    size = style.THIRD if len(metrics) % 3 == 0 else style.HALF
    for metric in metrics:
        file_name = "eval_" + re.sub(r"[^\w.-]+", "_", metric)
        kind = Kind(file_name, metric_label(metric), metric, noisy=False, evaluated=True)
        charts.append(_draw_chart(kind, runs, size))
    return charts


def _draw_chart(kind: Kind, runs: Sequence[Run], size: style.Size) -> Chart:
    svg, png = _draw(kind, runs, size)
    narrow = _draw(kind, runs, style.PHONE, png=False)[0] if kind.across else None
    return Chart(kind.name, svg, narrow, png, "evaluation" if kind.evaluated else "run")


def _with_scale(kind: Kind, runs: Sequence[Run]) -> Kind:
    # The loss falls from 11 to 3 in the first percent of a run: on a log axis the rest stays readable.
    if kind.scale != "log if wide":
        return kind
    values = column([line for run in runs for line in (*run.train, *run.evals)], kind.column)[1]
    finite = values[np.isfinite(values)]
    wide = len(finite) > 0 and finite.min() > 0 and finite.max() > 2 * finite.min()
    return replace(kind, scale="log" if wide else "linear", title=f"{kind.title} (log scale)" if wide else kind.title)


def _draw(kind: Kind, runs: Sequence[Run], size: style.Size, *, png: bool = True) -> tuple[str, bytes]:
    alone = len(runs) == 1

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        legend: list[tuple[Line2D, str]] = []
        for number, run in enumerate(runs):
            steps, values = column(kind.lines(run), kind.column)
            if not len(steps):
                continue
            color = style.SERIES[number % len(style.SERIES)]
            line_style = LINE_STYLES[number // len(style.SERIES) % len(LINE_STYLES)]
            curve = _draw_curve(axes, kind, steps, values, color, line_style)
            has_trend = kind.noisy and len(steps) >= MIN_TO_SMOOTH
            if alone and has_trend:
                legend += [(Line2D([], [], color=color, alpha=RAW_ALPHA, lw=1), "each log line")]
            single = "each evaluation" if kind.evaluated else "each log line"
            what = run.name if not alone else "trend" if has_trend else single
            legend.append((Line2D([], [], color=color, lw=2, ls=line_style), what))
            if kind.name == "loss":
                legend += _draw_evaluations(axes, run, color, alone=alone)
            if kind.name == "loss" and alone:
                legend += _draw_events(axes, run, curve)
        _style_axes(axes, kind)
        legend += _mark_off_axis(axes, kind, runs)
        if not alone or len(legend) > 1:
            style.draw_legend(figure, legend)

    return style.render(draw, kind.name, kind.title, size, png=png)


def _draw_curve(
    axes: Axes, kind: Kind, steps: Array, values: Array, color: str, line_style: str
) -> tuple[Array, Array]:
    """Draw the thin line of raw values and the trend over it; return the trend's steps and values."""
    finite = np.isfinite(values)
    if kind.scale != "linear":
        finite &= values > 0
    steps, values = steps[finite], values[finite]
    if kind.noisy and len(steps) >= MIN_TO_SMOOTH:
        axes.plot(steps, values, color=color, alpha=RAW_ALPHA, lw=0.8)
        steps, values = trend(steps, values, in_log=kind.scale != "linear")
    draw = "steps-post" if kind.name == "loss_scale" else "default"
    marker = "o" if len(steps) == 1 or (kind.evaluated and len(steps) <= MIN_TO_SMOOTH) else ""
    axes.plot(steps, values, color=color, lw=1.8, ls=line_style, drawstyle=draw, marker=marker, markersize=4)
    return steps, values


def _draw_evaluations(axes: Axes, run: Run, color: str, *, alone: bool) -> list[tuple[Line2D, str]]:
    steps, values = column(run.evals, "loss")
    color = style.SERIES[1] if alone else color
    look: dict[str, Any] = {"marker": "D", "markersize": 5, "mfc": style.PAPER, "mew": 1.5, "color": color}
    if len(steps):
        axes.plot(steps, values, ls="-" if alone else "", lw=1, zorder=4, **look)
    return [(Line2D([], [], lw=1, **look), "evaluation")] if alone and len(steps) else []


def _draw_events(axes: Axes, run: Run, curve: tuple[Array, Array]) -> list[tuple[Line2D, str]]:
    """Draw marks on the curve, and lines across where the run was interrupted."""
    legend = []
    for name, mark in EVENT_MARKS.items():
        at = np.array(sorted({event["step"] for event in run.events if event["event"] == name}), dtype=np.float64)
        if not len(at):
            continue
        if mark.line:
            look: dict[str, Any] = {"color": mark.color, "ls": mark.line, "lw": 1.2}
            for step in at:
                axes.axvline(step, zorder=1, **look)
        else:
            few = len(at) <= 60
            look = {"marker": mark.marker, "ls": "", "mec": mark.color, "mfc": mark.color, "zorder": 5}
            look |= {"mfc": style.PAPER, "markersize": 4 if few else 2} if mark.marker == "o" else {}
            if len(curve[0]):
                axes.plot(at, np.interp(at, *curve), **look)
        legend.append((Line2D([], [], **look), _counted(mark.label, len(at))))
    return legend


def _counted(label: str, count: int) -> str:
    return f"{label} ×{count}" if count > 1 else label


def _style_axes(axes: Axes, kind: Kind) -> None:
    axes.grid(axis="y", lw=0.8)
    axes.set_axisbelow(True)
    below: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate("step", (0, 0), (-7, -9), color=style.MUTED, **below)  # in the corner that both axes leave free
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    if kind.scale == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if kind.from_zero:
            axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log", base=2 if kind.scale == "log2" else 10)
        low, high = axes.get_ylim()
        fine, coarse = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0), (1.0, 3.0)
        locator: Locator = LogLocator(base=2, subs=(1.0,), numticks=8)
        if kind.scale == "log":
            subs = fine if high < 12 * low else coarse if high < 300 * low else (1.0,)
            locator = MaxNLocator(5) if high < 4 * low else LogLocator(subs=subs, numticks=8)
        axes.yaxis.set_major_locator(locator)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
    exact = kind.scale == "log2"  # 16,384 says more than 16.38k
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if exact else short_number(value)))


def _mark_off_axis(axes: Axes, kind: Kind, runs: Sequence[Run]) -> list[tuple[Line2D, str]]:
    """Draw marks at the upper or lower edge for NaN, Inf, zero on a log axis, and spikes far above the rest."""
    found: dict[str, tuple[Line2D, int]] = {}
    ceiling = _lower_the_ceiling(axes, kind, runs)
    for number, run in enumerate(runs):
        lines = (*map(_of_its_step, run.train), *run.evals) if kind.name == "loss" else kind.lines(run)
        steps, values = column(lines, kind.column)
        finite = np.isfinite(values)
        groups = [
            ("NaN or Inf", "^", 1.0, np.isnan(values) | (values == np.inf)),
            ("−Inf", "v", 0.0, values == -np.inf),
            ("above the axis", "2", 1.0, finite & (values > ceiling)),
            ("zero or less", "v", 0.0, finite & (values <= 0) & (kind.scale != "linear")),
        ]
        color = style.ALERT if len(runs) == 1 else style.SERIES[number % len(style.SERIES)]
        for label, marker, edge, here in groups:
            at = steps[here]
            if len(at):
                look: dict[str, Any] = {"marker": marker, "ls": "", "markersize": 7, "clip_on": False}
                place = axes.get_xaxis_transform()  # x: steps; y: 0 to 1, from the lower edge to the upper
                axes.plot(at, np.full(len(at), edge), transform=place, zorder=6, color=color, **look)
                handle = Line2D([], [], color=style.ALERT if len(runs) == 1 else style.INK, **look)
                found[label] = (handle, len(at) + (found[label][1] if label in found else 0))
    return [(handle, _counted(label, count)) for label, (handle, count) in found.items()]


def _of_its_step(line: JsonRecord) -> JsonRecord:
    """Return a line whose mean loss leaves out its own step, which was not finite, with the loss of that step."""
    own = line.get("step_loss")
    return {**line, "loss": own} if isinstance(own, float) and not math.isfinite(own) else line


def _lower_the_ceiling(axes: Axes, kind: Kind, runs: Sequence[Run]) -> float:
    """End a linear axis where single spikes would otherwise press the curve flat; return its end, else infinity."""
    values = column([line for run in runs for line in kind.lines(run)], kind.column)[1]
    values = values[np.isfinite(values)]
    if kind.scale != "linear" or len(values) < MIN_TO_SMOOTH:
        return math.inf
    low, high = np.quantile(values, [0.02, 0.98])
    ceiling = float(high + 1.5 * (high - low))
    if high == low or values.max() <= ceiling:
        return math.inf
    axes.set_ylim(top=ceiling)
    return ceiling
