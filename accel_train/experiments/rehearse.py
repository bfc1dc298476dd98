"""A rehearsal: a short run of a recipe is killed and resumed, and compared with the same run uninterrupted.

All runs are separate processes, started as a user starts them, in a temporary folder next to `output_dir`. A rehearsal
of a recipe also compares its layout with one process, at toy size.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accel_train.checkpoint.health import TAGS
from accel_train.checkpoint.rollback_log import ROLLBACKS, read_rollbacks
from accel_train.checkpoint.run_recipe import check_settings, named_recipe, read_recipe, reader_settings
from accel_train.checkpoint.store import checkpoint_folders, folder_of, read_trainer, remove, step_of
from accel_train.checkpoint.verify import verify
from accel_train.core.errors import CheckpointError
from accel_train.core.format import format_blocks, format_bytes, format_count, format_seconds
from accel_train.core.state import JsonRecord
from accel_train.core.terminal import busy, paint
from accel_train.experiments.compare_runs import Comparison, compare_runs
from accel_train.experiments.equality import Equality, compare_layout
from accel_train.experiments.subprocess_run import TrainingProcess
from accel_train.guard.guard import is_skipped_by_rollback
from accel_train.observe.run_folder import RECIPE_FILE, read_metrics
from accel_train.plan.format import duration, format_plan
from accel_train.plan.plan import Plan, resolve_plan

Say = Callable[[str], None]
Records = Sequence[JsonRecord]

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
    killed_after_step: int
    """Step of the last checkpoint before the kill."""
    changed_settings: Mapping[str, Any]
    """Settings that differ from the recipe."""
    launches: Sequence[tuple[str, str]]
    """Name and outcome of each launch."""
    startup_seconds: Sequence[float]
    """Start-up time of each launch, in seconds."""
    metrics: Records
    """Metrics of the uninterrupted run. `events` and `checkpoint_bytes` come from the same run."""
    events: Records
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


def format_rehearsal(rehearsal: Rehearsal, *, colour: bool, with_plan: bool, show_all: bool) -> str:
    """Return the result as aligned text: first the verdict about resumes, then the measurements.

    `show_all` adds the launches, each comparison, and (`with_plan`) the plan.
    """
    plan, changed, same = rehearsal.plan, rehearsal.changed_settings, rehearsal.same
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
    yield "an evaluation", _evaluation(rehearsal.metrics, rehearsal.changed_settings["evaluate.max_samples"])
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
    what = f"{format_count(plan.num_checkpoints, 'checkpoint')} and the final weights"
    yield "disk", f"{format_bytes(needed)} for {what}; {format_bytes(rehearsal.free_bytes)} free{room}"


def _evaluation(metrics: Records, max_samples: int) -> str:
    """Return the duration and the scores of the last evaluation."""
    row = next((row for row in reversed(metrics) if row["split"] == "eval"), None)
    if row is None:
        return "none: no held-out data (data.eval, data.eval_fraction)"
    numbers = [(name, value) for name, value in row.items() if isinstance(value, float)]
    scores = ", ".join(f"{name} {value:.4g}" for name, value in numbers if name not in ("seconds", "num_targets"))
    return f"{duration(row['seconds'])} for up to {format_count(max_samples, 'sample')}: {scores}"


def _conclusion(rehearsal: Rehearsal) -> str:
    step = rehearsal.killed_after_step
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


STEPS = 8
EVALUATED_SAMPLES = 64
STEPS_TO_SPARE = 1000
"""Steps by which a shorter run is extended past its last save. A signal then ends it before its schedule does."""
STOP_SECONDS = 600.0
CHECKPOINTS_AT_ONCE = 5
"""Maximum checkpoints of a rehearsal on the disk, if a save takes longer than `subprocess_run.POLL_SECONDS`."""
DETERMINISTIC = "precision.deterministic"
LENGTH = ("schedule.max_steps", "schedule.warmup_steps")
"""Settings of the length of a run, which a rehearsal changes itself."""


def rehearse_recipe(
    path: str, settings: Sequence[str], *, processes: int | None = None, steps: int = STEPS, say: Say
) -> Rehearsal:
    """Rehearse a recipe and return the result. The recipe's output folder is not touched.

    Raises:
        ValueError: the recipe or the arguments are wrong, or a launcher started this process.
        ProcessFailed: a run ended early.
        CheckpointError: the disk does not have enough room.
    """
    _refuse_launch()
    recipe = named_recipe(path, settings)
    plan = resolve_plan(recipe, processes, progress=sys.stderr.isatty())
    return _rehearse(path, settings, plan, Path(recipe.output_dir), None, steps // 2, say)


def prove_resume(
    run: Path,
    settings: Sequence[str] = (),
    *,
    processes: int | None = None,
    steps: int = STEPS,
    say: Say,
) -> Rehearsal:
    """Rehearse the resume of a run from copies of its newest checkpoint. The run's folder is only read.

    `settings` are flags `--section.field VALUE` that override the run's recipe.

    Raises:
        ValueError: the folder holds no run, or its run was stopped early.
        ProcessFailed, CheckpointError: as in `rehearse_recipe`, or no checkpoint is valid.
    """
    _refuse_launch()
    path = run / RECIPE_FILE
    if not path.is_file():
        raise ValueError(f"{run}: {RECIPE_FILE} not found. Name the output_dir of a run")
    check_settings(settings)
    recipe, settings = read_recipe(run, settings), reader_settings(settings)
    newest = verify(run).newest
    if newest is None:
        raise CheckpointError(f"{run} has no checkpoint to resume from")
    trainer = read_trainer(newest)
    if trainer["state"]["stopped_early"]:
        raise ValueError(f"{newest} is from a run that was stopped early. A resume would not train further")
    plan = resolve_plan(recipe, processes or trainer["world_size"], progress=sys.stderr.isatty())
    return _rehearse(str(path), settings, plan, run, newest, steps // 2, say)


def _refuse_launch() -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: rehearse starts its own processes. Run it without a launcher, "
            "with --processes N"
        )


def _rehearse(
    path: str,
    settings: Sequence[str],
    plan: Plan,
    output_dir: Path,
    newest: Path | None,
    every_steps: int,
    say: Say,
) -> Rehearsal:
    """Run once uninterrupted, and once killed after the first save and resumed. Compare the two runs."""
    start = 0 if newest is None else step_of(newest) or 0
    first, last = _saved_steps(output_dir, start, every_steps)
    changed = _changed_settings(plan, settings, last, every_steps)
    flags = [*settings, *(word for name, value in changed.items() for word in (f"--{name}", str(value)))]
    name = str(output_dir if newest else path)
    launches: list[tuple[str, str]] = []
    startup_seconds: list[float] = []

    @contextmanager
    def launch(what: str, run_folder: Path) -> Iterator[TrainingProcess]:
        with busy(f"  {what}"), TrainingProcess(what, path, flags, run_folder, plan.world_size) as training:
            startup_seconds.append(training.wait_for_first_step())
            yield training

    def note(what: str, did: str) -> None:
        launches.append((what, did))
        say(f"  {what}: {did}")

    with _temporary_folder_next_to(output_dir) as temporary:
        folder = Path(temporary)
        free_bytes, needed = shutil.disk_usage(folder).free, CHECKPOINTS_AT_ONCE * plan.checkpoint_bytes
        if free_bytes < needed:
            raise CheckpointError(
                f"{folder.parent} has {format_bytes(free_bytes)} free, but a rehearsal needs {format_bytes(needed)}. "
                "Free space, or set output_dir on another disk"
            )
        on = format_count(plan.world_size, "process", "processes")
        say(f"rehearsing {name} on {on}, in {folder} (removed afterwards)")
        whole, killed = folder / "whole", folder / "killed"
        _begin_with(newest, whole)
        with launch("uninterrupted", whole) as training:
            _refuse_changes(training.events(), name)
            training.wait_for_checkpoint(last)
            stop_seconds = training.stop(STOP_SECONDS)
            num_bytes = sum(file.stat().st_size for file in folder_of(whole / "checkpoints", last).iterdir())
            records = read_metrics(whole), training.events()
        note("uninterrupted", f"steps {start + 1} to {last}, evaluated and saved at {first} and {last}")
        _keep_only(whole, last)
        _begin_with(newest, killed)
        with launch("to be killed", killed) as training:
            training.wait_for_checkpoint(first)
            training.wait_until(lambda: training.last_step() > first)
            training.kill()
            died_at = training.last_step()
        note("killed", f"SIGKILL to all processes after step {died_at} was done and step {first} was saved")
        _keep_only(killed, first)
        with launch("resumed", killed) as training:
            training.wait_for_checkpoint(last)
            resumed = next(event["step"] for event in training.events() if event["event"] == "resume")
        assert resumed == first, f"resumed from step {resumed}, not from step {first}"
        note("resumed", f"from step {resumed} to step {last}")
        compared = compare_runs(whole, killed, start + 1, last)
        equality = None
        if newest is None:
            with busy("  the layout at toy size, and one process"):
                equality = compare_layout(plan.recipe, plan.world_size, folder / "toy")
            note("one process", f"the layout at toy size on a CPU: {equality}")
    return Rehearsal(
        plan,
        first,
        changed,
        launches,
        startup_seconds,
        *records,
        stop_seconds,
        num_bytes,
        free_bytes,
        compared,
        equality,
    )


def _saved_steps(run: Path, start: int, every_steps: int) -> tuple[int, int]:
    """Return the next two steps after `start` that are saved, without steps that a rollback of this run skips."""
    rollbacks = read_rollbacks(run) if start else []
    due = count((start // every_steps + 1) * every_steps, every_steps)
    steps = (step for step in due if not is_skipped_by_rollback(step, rollbacks))
    return next(steps), next(steps)


def _changed_settings(plan: Plan, settings: Sequence[str], last: int, every_steps: int) -> dict[str, object]:
    """Return the settings that a rehearsal changes: evaluation and save steps, evaluated samples, and logging."""
    samples = max(EVALUATED_SAMPLES, 2 * plan.sizes.per_device_eval_batch_size * plan.world_size)
    changed: dict[str, object] = {
        "checkpoint.every_steps": every_steps,
        "checkpoint.keep": 1_000_000,
        "checkpoint.resume": "auto",
        "evaluate.every_epochs": "null",
        "evaluate.every_steps": every_steps,
        "evaluate.max_samples": min(samples, plan.recipe.evaluate.max_samples or samples),
        "evaluate.early_stopping_patience": "null",
        "log.every_steps": 1,
        "log.trackers": "[]",
        "log.notify": "[]",
        "log.callbacks": "[]",
        "log.progress": "false",
        "log.profile_steps": "null",
    }
    is_chosen = any(word.partition("=")[0] == f"--{DETERMINISTIC}" for word in settings)
    if plan.device != "cpu" and not plan.recipe.precision.deterministic and not is_chosen:
        changed[DETERMINISTIC] = "true"
    if plan.steps.max_steps < last + STEPS_TO_SPARE:
        changed["schedule.max_steps"] = last + STEPS_TO_SPARE
        changed["schedule.warmup_steps"] = plan.steps.warmup_steps
        changed["checkpoint.accept_changes"] = "true"
    return changed


def _begin_with(newest: Path | None, run_folder: Path) -> None:
    """Make a run folder with a copy of this checkpoint and its records.

    Files of a checkpoint never change, so hard links are used where possible.
    """
    root = run_folder / "checkpoints"
    root.mkdir(parents=True)
    if newest is None:
        return
    shutil.copytree(newest, root / newest.name, copy_function=_link_or_copy)
    for path in (newest.parent.parent / ROLLBACKS, newest.parent / TAGS):
        if path.exists():
            shutil.copy2(path, run_folder / path.relative_to(newest.parent.parent))


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    # The file system does not support hard links.
    except OSError:
        shutil.copy2(source, target)
    return target


def _keep_only(run_folder: Path, step: int) -> None:
    for folder in checkpoint_folders(run_folder / "checkpoints"):
        if step_of(folder) != step:
            remove(folder)


def _refuse_changes(events: Records, name: str) -> None:
    """Raise ValueError for changes since the checkpoint, other than the rehearsal's own change of length."""
    accepted = [event for event in events if event["event"] == "changes_accepted"]
    changes = (change for event in accepted for change in zip(event["settings"], event["changes"], strict=True))
    if refused := [text for setting, text in changes if setting not in LENGTH]:
        message = f"{name} has changed since its checkpoint, and a resume would be refused:"
        raise ValueError("\n".join((message, *refused)))


def _temporary_folder_next_to(output_dir: Path) -> TemporaryDirectory[str]:
    """Make a temporary folder on the disk that the run would write to."""
    above = next(path for path in output_dir.absolute().parents if path.is_dir())
    try:
        return TemporaryDirectory(prefix=f".rehearsal-{output_dir.name}-", dir=above, ignore_cleanup_errors=True)
    except OSError as error:
        raise ValueError(f"{above} cannot be written: {error.strerror}. Set another output_dir") from error
