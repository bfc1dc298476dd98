"""A text view of a run in a dozen lines, from its files. The run may belong to another process or machine."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.format import format_blocks, format_count, format_seconds
from accel_train.core.state import JsonRecord
from accel_train.metrics.baselines import is_number
from accel_train.observe.metrics_reader import MetricsReader
from accel_train.observe.progress import describe_metrics
from accel_train.observe.run_folder import EVENTS_FILE, METRICS_FILE
from accel_train.report.metric_names import NOT_A_SCORE
from accel_train.report.run import Run, how_to_use, load_run

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 60
LAST_EVENTS = 5
SILENT_SECONDS = 60.0
"""Seconds without writes after which a run may be dead. A running launch writes its time every second."""
_CLEAR = "\x1b[H\x1b[J"


class State(NamedTuple):
    """The state of a run. `has_ended` is true if nothing follows unless the run is started again."""

    text: str
    has_ended: bool


def watch_run(
    run: Path,
    *,
    once: bool = False,
    every_seconds: float = 2.0,
    show: Callable[[str], None],
    refresh: Callable[[], object] = lambda: None,
) -> None:
    """Show the view of a run until it has ended, at each change. With `once`, show it one time.

    `show` receives the whole view as lines of text. `refresh` is called before the files are read again.

    Raises:
        ValueError: the folder does not hold a run.
    """
    before, reader = "", MetricsReader(run / METRICS_FILE)
    while True:
        loaded = load_run(run, reader=reader)
        state = state_of(loaded, silent_seconds(run))
        view = format_view(loaded, state, width=shutil.get_terminal_size().columns)
        if view != before:
            show(view)
        if once or state.has_ended:
            return
        before = view
        time.sleep(every_seconds)
        refresh()


def show_in_terminal(view: str) -> None:
    """Clear the terminal and print a view."""
    print(_CLEAR, end="")
    print(view, flush=True)


def silent_seconds(run: Path) -> float:
    """Return the seconds since a run last wrote a file."""
    paths = (run / name for name in (METRICS_FILE, EVENTS_FILE, "launches.jsonl"))
    return max(0.0, time.time() - max(path.stat().st_mtime for path in paths if path.exists()))


def state_of(run: Run, silent: float = 0.0) -> State:
    """Return the state of a run, from its last launch, its latest events, and its summary.

    `silent` is the number of seconds since the run last wrote a file.
    """
    starts = [at for at, event in enumerate(run.events) if event["event"] in ("start", "resume")]
    since = run.events[starts[-1] :] if starts else run.events
    status = run.summary.get("status")
    is_running = not run.launches[-1].get("ended") if run.launches else status is None
    if is_running:
        if silent > SILENT_SECONDS:
            return State(f"no news for {format_seconds(silent)}: killed, or stuck", False)
        return State("running" if run.train else "starting", False)
    for kind, text in (
        ("preempted", "asked to stop; run the same command to resume"),
        ("stop", "stopped by the guard"),
    ):
        if any(event["event"] == kind for event in since):
            return State(text, True)
    return State(str(status or "ended early; run the same command to resume"), True)


def total_steps(run: Run) -> int | None:
    """Return the total number of steps of a run, or None if it is not known yet."""
    schedule = (run.recipe or {}).get("schedule") or {}
    # Runs of earlier versions noted no total.
    steps = [schedule.get("max_steps"), *(event.get("total_steps") for event in run.events)]
    if known := [number for number in steps if isinstance(number, int)]:
        return known[-1]
    epochs, last = schedule.get("num_epochs"), run.train[-1] if run.train else {}
    if is_number(epochs) and is_number(last.get("epoch")) and last["epoch"] > 0:
        return max(last["step"], round(epochs * last["step"] / last["epoch"]))
    return None


def seconds_left(run: Run, total: int | None) -> float | None:
    """Return the seconds to the last step at the pace of the latest logged steps, or None if unknown."""
    lines = [line for line in run.train[-SPARK_COLUMNS:] if is_number(line.get("train_seconds"))]
    if total is None or len(lines) < 2:
        return None
    steps = lines[-1]["step"] - lines[0]["step"]
    seconds = lines[-1]["train_seconds"] - lines[0]["train_seconds"]
    return seconds / steps * (total - lines[-1]["step"]) if steps > 0 and seconds >= 0 else None


def sparkline(values: Sequence[float]) -> str:
    """Return a bar for each value, scaled between the minimum and maximum. `x` marks a value that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] if math.isfinite(value) else "x" for value in values)


def format_view(run: Run, state: State, *, width: int = 80) -> str:
    """Return the view of a run: state, numbers, last events, and how to use its model.

    Lines have at most `width` characters, except those that are to be copied.
    """
    lines = [f"{run.name}: {state.text}", *format_blocks([("Now", list(_numbers(run, state)))], colour=False)[2:]]
    events = run.events[-LAST_EVENTS:]
    if events:
        rows = [(f"step {event['step']:,}", _event_text(event)) for event in events]
        lines += format_blocks([("Last events", rows)], colour=False)
    lines = [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
    # What is to be copied is not cut.
    return "\n".join([*lines, *(["", *how_to_use(run.folder, run.recipe)] if run.summary and run.example else [])])


def _numbers(run: Run, state: State) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if not run.train:
        return [("step", "not logged yet")]
    last, total = run.train[-1], total_steps(run)
    done = f" of {total:,} ({100 * last['step'] / total:.1f} %)" if total else ""
    rows.append(("step", f"{last['step']:,}{done}"))
    losses = [float(line["loss"]) for line in run.train if isinstance(line.get("loss"), int | float)]
    if losses:
        rows.append(("loss", f"{losses[-1]:.4f}  {sparkline(losses[-SPARK_COLUMNS:])}"))
    if run.evals:
        scores = {name: value for name, value in run.evals[-1].items() if name not in NOT_A_SCORE}
        rows.append(("evaluation", f"{describe_metrics(scores)} (step {run.evals[-1]['step']:,})"))
    if is_number(rate := last.get("learning_rate")):
        rows.append(("learning rate", f"{rate:.3e}"))
    if is_number(last.get("throughput")):
        rows.append(("rate", f"{format_count(last['throughput'])} {run.targets}/s"))
    left = None if state.has_ended else seconds_left(run, total)
    if left is not None:
        rows.append(("time left", format_seconds(left)))
    skipped = sum(1 for event in run.events if event["event"] == "skip")
    return [*rows, ("skipped", format_count(skipped, "step"))] if skipped else rows


def _event_text(event: JsonRecord) -> str:
    message: Any = event.get("message") or ""
    return f"{event['event'].replace('_', ' ')}: {' '.join(str(message).split())}"
