"""What a rehearsal found, as facts and as text: what was done, what it took, and whether a kill changes anything."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from accel_train.observe.progress import format_seconds
from accel_train.plan import Plan
from accel_train.plan_text import format_plan
from accel_train.same_bits import Compared


@dataclass
class Rehearsal:
    """What was done, what it took, and what came of it."""

    name: str
    plan: Plan
    steps: tuple[int, int]
    """The step that is saved before the kill, and the one that the runs are compared at."""
    start: int
    """The step of the checkpoint that both runs began with; 0: none."""
    deterministic: bool = False
    """Was `precision.deterministic` set for it, because without it the runs did not repeat."""
    compared: list[Compared] = field(default_factory=list)
    did: list[tuple[str, str]] = field(default_factory=list)
    """What each sitting did, in a line."""
    startup_seconds: list[float] = field(default_factory=list)
    step_seconds: float | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    """The settings that were not the recipe's."""
    evaluation: dict[str, Any] | None = None
    """The last line of metrics.jsonl that an evaluation wrote."""
    save_seconds: float | None = None
    stop_seconds: float | None = None
    exit_saved_step: int | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)
    resident_bytes: int = 0
    checkpoint_bytes: int = 0
    free_bytes: int = 0

    @property
    def same(self) -> bool:
        """Whether the run that was killed equals the one that was not."""
        return all(each.difference is None for each in self.compared)

    @property
    def differs_before_the_kill(self) -> bool:
        """Whether the two runs differ while neither had been killed: then this recipe does not repeat itself."""
        return any(each.first_step is not None and each.first_step <= self.steps[0] for each in self.compared)


def format_rehearsal(rehearsal: Rehearsal, *, colour: bool = False, with_plan: bool = True) -> str:
    """Everything that was found, as aligned text; the last line says whether a resume can be trusted."""
    blocks = [format_plan(rehearsal.plan, colour=colour), ""] if with_plan else []
    for title, rows in (
        ("What was not as in the recipe", list(_changes(rehearsal))),
        (f"What was done, on {processes_of(rehearsal.plan.world_size)}", rehearsal.did),
        ("What it took, beside the plan" if with_plan else "What it took", list(_measured(rehearsal))),
        ("Killed and run again, held against the run without a break", list(_comparison(rehearsal))),
    ):
        width = max(len(name) for name, _ in rows)
        blocks += [f"\x1b[1m{title}\x1b[0m" if colour else title]
        blocks += [f"  {name.ljust(width)}  {text}" for name, text in rows] + [""]
    return "\n".join([*blocks, _verdict(rehearsal)])


def _changes(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    reasons = {
        "checkpoint.every_steps": "to save soon",
        "evaluate.every_steps": "to evaluate soon",
        "evaluate.max_samples": "and on few samples",
        "schedule.max_steps": "it ends by a signal, not because it is over, so the learning rates are others",
        "precision.deterministic": "without it the runs differed, killed or not",
    }
    for name, reason in reasons.items():
        if name in rehearsal.changed:
            yield name, f"{rehearsal.changed[name]} ({reason})"
    yield "log", "every step, and to no tracker"


def _measured(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    plan = rehearsal.plan
    starts = [f"{seconds:.1f} s" for seconds in rehearsal.startup_seconds]
    yield "start-up", f"{', '.join(starts)}: until the first step could begin"
    seconds = rehearsal.step_seconds
    if seconds is not None:
        targets = plan.num_targets / plan.steps.max_steps / seconds if seconds else 0.0
        yield "a step", f"{_duration(seconds)}, {targets:,.0f} {plan.targets} a second"
        left = plan.steps.max_steps * seconds
        yield (
            "the whole run",
            f"{plan.steps.max_steps:,} steps: {format_seconds(left)} at this speed, evaluations and saves left out",
        )
    else:
        yield "a step", "not measured: there were too few"
    if rehearsal.evaluation is not None:
        scores = [f"{name} {value:.4g}" for name, value in rehearsal.evaluation.items() if _is_score(name, value)]
        asked = rehearsal.changed["evaluate.max_samples"]
        yield (
            "an evaluation",
            f"{_duration(rehearsal.evaluation['seconds'])} for up to {asked} samples: {', '.join(scores)}",
        )
    else:
        yield "an evaluation", "none: there is nothing held out (data.eval, data.eval_fraction)"
    beside = "beside the training" if plan.recipe.checkpoint.in_background else "while training waits"
    took = "not seen" if rehearsal.save_seconds is None else _duration(rehearsal.save_seconds)
    yield "a save", f"{took}, {beside}; {_mib(rehearsal.checkpoint_bytes)} each, {_mib(plan.checkpoint_bytes)} planned"
    if rehearsal.stop_seconds is not None and rehearsal.exit_saved_step is not None:
        yield (
            "asked to stop",
            f"SIGTERM: saved step {rehearsal.exit_saved_step}, and gone {rehearsal.stop_seconds:.1f} s later",
        )
    else:
        yield "asked to stop", "SIGTERM: it was not gone in time"
    planned = "not planned" if plan.memory_bytes is None else f"{_mib(plan.memory_bytes)} planned"
    peaks = ", ".join(f"{phase} {_mib(peak)}" for phase, peak in rehearsal.peak_bytes.items())
    kind = "resident in process 0, Python and torch included" if plan.device == "cpu" else "allocated on GPU 0"
    yield "peak memory", f"{peaks} ({kind}); {planned}" if peaks else planned
    yield "host memory", f"{_mib(rehearsal.resident_bytes)} resident in all its processes together"
    needed = plan.num_checkpoints * rehearsal.checkpoint_bytes + 4 * plan.num_parameters
    room = "" if needed <= rehearsal.free_bytes else ": NOT ENOUGH"
    yield (
        "disk",
        f"{_mib(needed)} for {plan.num_checkpoints} checkpoints and the final weights; {gib(rehearsal.free_bytes)} are free{room}",
    )


def _comparison(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    for each in rehearsal.compared:
        said = "the same to the bit" if each.difference is None else f"DIFFERENT {each.difference}"
        yield each.what, f"{said} ({each.extent})"


def _verdict(rehearsal: Rehearsal) -> str:
    first = rehearsal.steps[0]
    why = ""
    if rehearsal.deterministic:
        why = (
            " This holds with precision.deterministic true; as the recipe is, two runs of it differ, killed or not, because "
            "some of the GPU's kernels add in no fixed order."
        )
    if rehearsal.same:
        return f"PASS: killed after step {first} and run again, it is the run that was never killed, to the bit.{why}"
    if rehearsal.differs_before_the_kill:
        return (
            "DIFFERENT: the two runs differ before either was killed, so this recipe does not repeat itself, and nothing can "
            "be said of its resume. Look for a source of chance that does not follow from the seed (own code, the clock)."
        )
    return (
        f"DIFFERENT: until step {first} the two runs were one; the one that was killed there and run again is another. Its "
        "checkpoint does not hold all that the run depends on (own code that keeps a state?)."
    )


def _is_score(name: str, value: object) -> bool:
    return isinstance(value, float) and name not in ("seconds", "num_targets")


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def processes_of(count: int) -> str:
    """`1 process`, `2 processes`."""
    return f"{count} process{'es' * (count != 1)}"


def gib(num_bytes: float) -> str:
    """`1.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"


def _mib(num_bytes: float) -> str:
    return gib(num_bytes) if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
