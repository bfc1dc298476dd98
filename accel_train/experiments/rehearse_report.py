"""The result of a rehearsal, as facts and as text: the launches, the measurements, and the comparison."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_train.core.format import format_blocks, format_bytes, format_count, format_seconds
from accel_train.core.state import JsonRecord
from accel_train.core.terminal import paint
from accel_train.experiments.compare_runs import Comparison
from accel_train.experiments.equality import Equality
from accel_train.plan.format import duration, format_plan
from accel_train.plan.plan import Plan

REASONS = {
    "checkpoint.every_steps": "to save soon",
    "evaluate.every_steps": "to evaluate soon",
    "evaluate.max_samples": "to evaluate few samples",
    "schedule.max_steps": "a signal ends the run before its schedule does, so learning rates differ",
    "precision.deterministic": "otherwise a GPU adds in varying order; set it to false to measure the speed without it",
}
"""Reasons, by setting, of the changed settings that a report shows."""


@dataclass(frozen=True)
class Rehearsal:
    """The result of a finished rehearsal."""

    plan: Plan
    killed_after: int
    """Step of the last checkpoint before the kill."""
    changed: Mapping[str, Any]
    """Settings that differ from the recipe."""
    launches: Sequence[tuple[str, str]]
    """Name and outcome of each launch."""
    startup_seconds: Sequence[float]
    """Start-up time of each launch, in seconds."""
    metrics: Sequence[JsonRecord]
    """Metrics of the uninterrupted run. `events` and `checkpoint_bytes` come from the same run."""
    events: Sequence[JsonRecord]
    stop_seconds: float | None
    """Seconds from SIGTERM to the end. None if the run exceeded the time limit."""
    checkpoint_bytes: int
    free_bytes: int
    """Free bytes on the disk before the rehearsal."""
    compared: Sequence[Comparison]
    equality: Equality | None = None
    """Comparison of the layout with one process. None for the resume proof of a run."""

    @property
    def same(self) -> bool:
        """Return whether the killed run equals the uninterrupted run."""
        return all(each.difference is None for each in self.compared)


def format_rehearsal(
    rehearsal: Rehearsal, *, colour: bool = False, with_plan: bool = True, show_all: bool = False
) -> str:
    """Return the result as aligned text: first the verdict about resumes, then the measurements.

    `show_all` adds the launches, each comparison, and (`with_plan`) the plan.
    """
    plan, changed, same = rehearsal.plan, rehearsal.changed, rehearsal.same
    settings = [(name, f"{changed[name]} ({reason})") for name, reason in REASONS.items() if name in changed]
    compared = [
        (each.name, (f"DIFFERENT {each.difference}" if each.difference else "bitwise identical") + f" ({each.extent})")
        for each in rehearsal.compared
    ]
    blocks = [
        ("Measured, next to the plan" if with_plan else "Measured", list(_measurements(rehearsal))),
        ("Changed for the rehearsal", [*settings, ("log", "every step, without trackers")]),
    ]
    if show_all or not same:
        blocks.insert(0, ("The killed and resumed run, compared with the uninterrupted run", compared))
    if show_all:
        processes = format_count(plan.world_size, "process", "processes")
        blocks.append((f"Launches, on {processes}", list(rehearsal.launches)))
    lines = [paint(_conclusion(rehearsal), "bold", "green" if same else "red", on=colour)]
    if (equality := rehearsal.equality) is not None:
        wrong = equality.is_different
        lines.append(paint(_layout_conclusion(equality), "bold", "red" if wrong else "green", on=colour))
    lines += [*format_blocks(blocks, colour=colour), ""]
    if not show_all:
        more = f"--all shows {'the plan, ' * with_plan}the launches{', and each comparison' * same}"
        return "\n".join([*lines, paint(more, "dim", on=colour)])
    return "\n".join([*lines, *([format_plan(plan, colour=colour)] if with_plan else [])]).rstrip()


def _measurements(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    plan, num_bytes = rehearsal.plan, rehearsal.checkpoint_bytes
    starts = ", ".join(f"{seconds:.1f} s" for seconds in rehearsal.startup_seconds)
    yield "start-up", f"{starts}, until the first step could begin"
    clock = [row["train_seconds"] for row in rehearsal.metrics if row["split"] == "train"]
    if len(clock) > 2:
        # The first step is left out because it is slower.
        seconds, max_steps = (clock[-1] - clock[1]) / (len(clock) - 2), plan.steps.max_steps
        rate = plan.num_targets / max_steps / seconds if seconds else 0.0
        yield "a step", f"{duration(seconds)}, {rate:,.0f} {plan.targets} per second"
        whole = format_seconds(max_steps * seconds)
        yield "the whole run", f"{max_steps:,} steps: {whole} at this speed, without evaluations and saves"
    else:
        yield "a step", "not measured: too few steps"
    yield "an evaluation", _evaluation(rehearsal.metrics, rehearsal.changed["evaluate.max_samples"])
    when = "during training" if plan.recipe.checkpoint.in_background else "while training waits"
    saves = [event["seconds"] for event in rehearsal.events if event["event"] == "checkpoint"]
    took = duration(max(saves)) if saves else "not logged"
    sizes = f"{format_bytes(num_bytes)} each, {format_bytes(plan.checkpoint_bytes)} planned"
    yield "a save", f"{took}, {when}; {sizes}"
    stopped: JsonRecord = next((event for event in rehearsal.events if event["event"] == "preempted"), {})
    ended = "did not save and end in time"
    if rehearsal.stop_seconds is not None and stopped:
        ended = f"saved step {stopped['step']} and ended {rehearsal.stop_seconds:.1f} s later"
    yield "asked to stop", f"SIGTERM: {ended}"
    planned = "not planned" if plan.memory_bytes is None else f"{format_bytes(plan.memory_bytes)} planned"
    by_phase = stopped.get("peak_memory_bytes", {})
    peaks = ", ".join(f"{phase} {format_bytes(peak)}" for phase, peak in by_phase.items())
    kind = "resident in process 0, including Python and torch" if plan.device == "cpu" else "allocated on GPU 0"
    yield "peak memory", f"{peaks} ({kind}); {planned}" if peaks else planned
    needed = plan.num_checkpoints * num_bytes + plan.model_bytes
    room = "" if needed <= rehearsal.free_bytes else ": NOT ENOUGH"
    what = f"{plan.num_checkpoints} checkpoints and the final weights"
    yield "disk", f"{format_bytes(needed)} for {what}; {format_bytes(rehearsal.free_bytes)} free{room}"


def _evaluation(metrics: Sequence[JsonRecord], max_samples: int) -> str:
    """Return the duration and the scores of the last evaluation."""
    row = next((row for row in reversed(metrics) if row["split"] == "eval"), None)
    if row is None:
        return "none: no held-out data (data.eval, data.eval_fraction)"
    numbers = [(name, value) for name, value in row.items() if isinstance(value, float)]
    scores = ", ".join(f"{name} {value:.4g}" for name, value in numbers if name not in ("seconds", "num_targets"))
    return f"{duration(row['seconds'])} for up to {max_samples} samples: {scores}"


def _conclusion(rehearsal: Rehearsal) -> str:
    step = rehearsal.killed_after
    if rehearsal.same:
        names = ", ".join(each.name for each in rehearsal.compared)
        return (
            f"PASS: killed after step {step} and resumed, the run is bitwise identical to one without a kill: {names}."
        )
    if any(each.first_step is not None and each.first_step <= step for each in rehearsal.compared):
        return (
            "DIFFERENT: the two runs differ before the kill, so this recipe does not repeat itself, and its resume "
            "cannot be checked. Look for randomness that does not follow from the seed "
            "(custom code, the clock, on a GPU precision.deterministic false)."
        )
    return (
        f"DIFFERENT: the two runs are identical until step {step}, and differ after the kill and resume. "
        "The checkpoint does not hold everything that the run depends on (custom code that keeps a state?), "
        "or the GPU adds in varying order (precision.deterministic false)."
    )


def _layout_conclusion(equality: Equality) -> str:
    """Return the verdict about the layout."""
    if equality.reason is not None:
        return f"NOT COMPARED: the layout with one process: {equality.reason}"
    on = format_count(equality.processes, "process", "processes")
    what = f"the recipe's layout on {on}, at toy size in fp32"
    if equality.first is None:
        steps = f"losses, gradient norms, and weights of {equality.steps} steps"
        return f"EQUAL: {what}, is equal to one plain process to {equality.difference:.1e}: {steps}."
    return f"DIFFERENT: {what}, does not compute what one plain process computes: {equality.first}."
