"""The curves of one or more runs as plain values for the page's script."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from accel_train.core.metric_names import has_common_axis
from accel_train.core.metric_names import label as metric_label
from accel_train.core.state import JsonRecord
from accel_train.report.metric_names import metrics_with_curves
from accel_train.report.run import Run

Array = np.ndarray[Any, np.dtype[np.float64]]
POINTS_ON_PAGE = 60_000
"""Maximum number of points on a page, about 16 bytes each."""
POINTS_OF_CURVE = (400, 8_000)
"""Smallest and largest number of points to which a curve is thinned."""
PARTS_OF_TREND = 1_200
"""Number of part means from which a thinned curve is smoothed."""
MIN_TO_SMOOTH = 20
"""Minimum number of points for a smoothed curve."""
_SOURCE = "Loss of source "
_OF_SOURCE = re.compile(r"\w+/loss")
MOST_MARKS = 1_000
"""Maximum number of marks of each kind. More would overlap on any screen."""


@dataclass(frozen=True)
class Mark:
    """The appearance of a kind of event: its color, and a shape on the curve or a line across the chart."""

    label: str
    color: str
    shape: str


EVENT_MARKS = {
    "checkpoint": Mark("checkpoint", "--ink-soft", "circle"),
    "checkpoint_invalid": Mark("damaged checkpoint", "--alert", "square"),
    "overflow": Mark("fp16 overflow", "--series-5", "down"),
    "skip": Mark("skipped step", "--alert", "cross"),
    "spike": Mark("spike", "--alert", "peak"),
    "rollback": Mark("rolled back", "--series-4", "left"),
    "out_of_memory": Mark("out of memory", "--series-6", "square"),
    "preempted": Mark("preempted", "--muted", "dashed line"),
    "resume": Mark("resumed", "--series-4", "right"),
    "stop": Mark("stopped", "--alert", "line"),
    "early_stop": Mark("stopped early", "--ink-soft", "dotted line"),
}


@dataclass(frozen=True)
class Kind:
    """One kind of chart: its column, its axis, and whether values scatter around a trend."""

    name: str
    title: str
    column: str
    scale: Literal["linear", "log", "log2", "log if wide"] = "linear"
    noisy: bool = True
    from_zero: bool = False
    # Whether the chart takes the whole width of the page.
    across: bool = False
    # Source of the column: training steps, evaluations, or machine metrics.
    group: Literal["run", "evaluation", "machine"] = "run"

    def lines(self, run: Run) -> Sequence[JsonRecord]:
        return {"run": run.train, "evaluation": run.evals, "machine": run.system}[self.group]


KINDS = (
    Kind("loss", "Loss", "loss", scale="log if wide", across=True),
    Kind("learning_rate", "Learning rate", "learning_rate", noisy=False, from_zero=True),
    Kind("grad_norm", "Gradient norm before clipping", "grad_norm", scale="log"),
    Kind("router_aux_loss", "Router loss of the experts, without its coefficient", "router_aux_loss"),
    Kind("throughput", "{targets} per second", "throughput", from_zero=True),
    Kind("loss_scale", "Loss scale (fp16)", "loss_scale", scale="log2", noisy=False),
    *(
        Kind(column, title, column, from_zero=True, group="machine")
        for column, title in (
            ("cpu_percent", "CPU, % of all cores"),
            ("memory_gib", "Memory of the machine in use, GiB"),
            ("process_memory_gib", "Memory of the main process, GiB"),
            ("gpu_percent", "GPU, % of the time in use"),
            ("gpu_memory_gib", "GPU memory in use, GiB"),
            ("gpu_watts", "GPU power, W"),
            ("gpu_celsius", "GPU temperature, °C"),
        )
    ),
)


def describe_charts(runs: Sequence[Run], targets: str = "tokens") -> list[JsonRecord]:
    """Return all charts with data, and a chart for each evaluation metric except the loss, as JSON values.

    A chart of the machine needs two points, which short runs do not have.

    `targets` is the unit of labels: tokens, images, ... Numbers have five digits. Long curves are thinned but keep
    their extremes.
    """
    kinds = [
        kind
        for kind in KINDS
        if any(
            sum(line.get(kind.column) is not None for line in kind.lines(run)) > (kind.group == "machine")
            for run in runs
        )
    ]
    names = dict.fromkeys(key for run in runs for line in run.train for key in line if _OF_SOURCE.fullmatch(key))
    kinds[1:1] = [Kind(name, f"{_SOURCE}{name[:-5]}", name, scale="log if wide") for name in names]
    kinds += [
        Kind(f"eval_{metric}", metric_label(metric), metric, noisy=False, group="evaluation")
        for metric in metrics_with_curves(runs)
    ]
    least, most = POINTS_OF_CURVE
    most = max(least, min(most, POINTS_ON_PAGE // max(1, len(runs) * len(kinds))))
    charts = [_describe(kind, runs, kind.title.format(targets=targets.capitalize()), most) for kind in kinds]
    if len(runs) > 1:
        return charts
    charts = _in_one(charts, lambda name: name in names, {"name": "source_losses", "title": "Loss of each source"})
    return _in_one(
        charts,
        lambda name: has_common_axis(name.removeprefix("eval_")),
        {"name": "eval_scores", "title": "Scores", "ceiling": None},
    )


def _in_one(charts: list[JsonRecord], belongs: Callable[[str], bool], named: JsonRecord) -> list[JsonRecord]:
    """Return the charts of one run with those that belong together in one, beside the loss. Their curves look alike."""
    some = [chart for chart in charts if belongs(chart["name"])]
    others = [chart for chart in charts if chart not in some]
    if not some:
        return charts
    curves = [
        curve | ({"name": chart["title"].removeprefix(_SOURCE), "color": number} if len(some) > 1 else {})
        for number, chart in enumerate(some)
        for curve in chart["curves"]
    ]
    joined = some[0] | (named if len(some) > 1 else {}) | {"curves": curves, "is_first": True}
    return [chart | {"across": False} for chart in others[:1]] + [joined, *others[1:]]


def _describe(kind: Kind, runs: Sequence[Run], title: str, most: int) -> JsonRecord:
    columns = [column(kind.lines(run), kind.column) for run in runs]
    evaluations = [column(run.evals, "loss") if kind.name == "loss" else column((), "") for run in runs]
    finite = np.concatenate([values[np.isfinite(values)] for _, values in columns])
    scale: str = kind.scale
    if scale == "log if wide":
        # The loss falls from 11 to 3 in the first percent of a run. A log axis keeps the rest readable.
        shown = np.concatenate([finite, *(_finite(*found)[1] for found in evaluations)])
        scale = "log" if len(shown) and shown.min() > 0 and shown.max() > 2 * shown.min() else "linear"
    curves = [
        {"run": number, **_curve(kind, _finite(*points), scale, most), **_off_axis(kind, run, points)}
        for number, (run, points) in enumerate(zip(runs, columns))
    ]
    evaluated = [(number, *_points(*_finite(*found), most)) for number, found in enumerate(evaluations)]
    return {
        "name": kind.name,
        "title": title,
        "group": kind.group,
        "scale": scale,
        "from_zero": kind.from_zero,
        "across": kind.across,
        "is_first": kind.name == "loss",
        "stairs": kind.name == "loss_scale",
        "each": "each evaluation" if kind.group == "evaluation" else "each log line",
        "ceiling": _ceiling(finite) if scale == "linear" else None,
        "curves": [curve for curve in curves if curve["x"] or curve["up"] or curve["down"]],
        "evaluations": [{"run": number, "x": x, "y": y} for number, x, y in evaluated if x],
        "marks": _event_marks(runs[0]) if kind.name == "loss" and len(runs) == 1 else [],
    }


def _curve(kind: Kind, points: tuple[Array, Array], scale: str, most: int) -> JsonRecord:
    """Return the finite points, thinned, and the means for a trend if thinning leaves points out."""
    steps, values = points
    x, y = _points(steps, values, most)
    curve: JsonRecord = {"x": x, "y": y, "thinned": len(steps) > most}
    curve["smooth"] = kind.noisy and len(steps) >= MIN_TO_SMOOTH
    if curve["smooth"] and curve["thinned"]:
        in_log = scale != "linear" and values.min() > 0
        at, means = part_means(steps, np.log(values) if in_log else values, min(PARTS_OF_TREND, len(steps)))
        curve |= {"mean_x": at.round(1).tolist(), "mean_y": _rounded(np.exp(means) if in_log else means)}
    return curve


def _off_axis(kind: Kind, run: Run, points: tuple[Array, Array]) -> JsonRecord:
    """Return the steps of values that an axis cannot show: `up` (NaN, Inf) and `down` (-Inf)."""
    steps, values = column((*map(_of_its_step, run.train), *run.evals), "loss") if kind.name == "loss" else points
    return _marks("up", steps[np.isnan(values) | (values == np.inf)]) | _marks("down", steps[values == -np.inf])


def _of_its_step(line: JsonRecord) -> JsonRecord:
    """Return a log line, with `step_loss` as its loss if that is not finite.

    Otherwise the loss of a line is a mean that leaves out such steps.
    """
    own = line.get("step_loss")
    return {**line, "loss": own} if isinstance(own, float) and not math.isfinite(own) else line


def _ceiling(values: Array) -> float | None:
    """Return an upper end for a linear axis if spikes would otherwise flatten the curve, or None."""
    if len(values) < MIN_TO_SMOOTH:
        return None
    low, high = np.quantile(values, [0.02, 0.98])
    ceiling = float(high + 1.5 * (high - low))
    return None if high == low or values.max() <= ceiling else ceiling


def _event_marks(run: Run) -> list[JsonRecord]:
    found = []
    for name, mark in EVENT_MARKS.items():
        steps = np.array(sorted({event["step"] for event in run.events if event["event"] == name}), dtype=np.float64)
        if len(steps):
            found.append(asdict(mark) | _marks("x", steps))
    step = run.summary.get("best_step")
    if type(step) is int and any(event["event"] == "best_model" for event in run.events):
        kept = Mark("weights in model/", "--good", "dashed line")
        found.append(asdict(kept) | _marks("x", np.array([step], dtype=np.float64)))
    return found


def _marks(name: str, steps: Array) -> JsonRecord:
    """Return the steps, evenly thinned, and their number before thinning."""
    steps = np.unique(steps)
    kept = steps[np.linspace(0, len(steps) - 1, MOST_MARKS).astype(int)] if len(steps) > MOST_MARKS else steps
    return {name: kept.astype(int).tolist(), f"num_{name}": len(steps)}


def _finite(steps: Array, values: Array) -> tuple[Array, Array]:
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def _points(steps: Array, values: Array, most: int) -> tuple[list[int], list[float]]:
    steps, values = thin(steps, values, most)
    return steps.astype(int).tolist(), _rounded(values)


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def local_lines(values: Array, width: float) -> tuple[Array, Array]:
    """Return the level and the slope (per value) of a straight line fitted around each value, weighted by a Gaussian of
    `width`.

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


def thin(steps: Array, values: Array, most: int) -> tuple[Array, Array]:
    """Return at most `most` of the points, in their order: both ends, and the least and the greatest of each of many
    equal parts.
    """
    if len(steps) <= most:
        return steps, values
    size = math.ceil(len(values) / (most // 2 - 1))
    parts = np.pad(values, (0, -len(values) % size), mode="edge").reshape(-1, size)
    starts = size * np.arange(len(parts))
    kept = np.unique([0, *(starts + parts.argmin(1)), *(starts + parts.argmax(1)), len(values) - 1])
    return steps[kept], values[kept]


def part_means(steps: Array, values: Array, num_parts: int) -> tuple[Array, Array]:
    """Return the mean step and the mean value of each of equal parts, fewer than there are points."""
    edges = np.linspace(0, len(steps), num_parts + 1, dtype=np.int64)
    means = [np.add.reduceat(each, edges[:-1]) / np.diff(edges) for each in (steps, values)]
    return means[0], means[1]


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
