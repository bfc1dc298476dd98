"""A run in small, before it costs anything: step, evaluate, save, kill, run again, and hold the result against a run without a break.

All in processes of their own, as a user starts them, in a folder beside the run's that is removed afterwards.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from accel_train.checkpoint import checkpoint_folders, remove, step_of
from accel_train.guard import is_passed_over
from accel_train.health import TAGS
from accel_train.observe.ledger import METRICS_FILE, RECIPE_FILE, read_events, read_metrics
from accel_train.ownership import recipe_of_run
from accel_train.plan import Plan, resolve_plan
from accel_train.recipe_file import load_recipe
from accel_train.rehearsal import Rehearsal, gib, processes_of
from accel_train.rollback_record import ROLLBACKS, read_rollbacks
from accel_train.same_bits import compare_runs
from accel_train.sitting import Sitting
from accel_train.snapshot import read_trainer
from accel_train.state import CheckpointError
from accel_train.trained import check_settings, read_recipe, reader_settings
from accel_train.verify import verify

STEPS = 8
LEAST_STEPS = 4
EVALUATED_SAMPLES = 64
STEPS_TO_SPARE = 1000
"""A rehearsal ends by a signal, not because its run is over: a run that is shorter than this is made longer."""
STOP_SECONDS = 600.0
CHECKPOINTS_AT_ONCE = 5
"""On the disk during a rehearsal, at most, while saves take longer than a look at the folder."""


def rehearse_recipe(
    path: str,
    settings: Sequence[str],
    *,
    processes: int | None = None,
    steps: int = STEPS,
    say: Callable[[str], None],
) -> Rehearsal:
    """Rehearse a recipe; nothing of its output folder is touched.

    Raises:
        ValueError: the recipe or the arguments are wrong; a launcher started this.
        SittingFailed: a run ended by itself.
        CheckpointError: there is not enough room on the disk.
    """
    _check(steps, processes)
    recipe = load_recipe(path, arguments=settings)
    plan = resolve_plan(recipe, processes or _num_devices(), progress=sys.stderr.isatty())
    beside = Path(recipe.output_dir)
    return _rehearse(path, settings, plan, beside, None, steps // 2, say)


def prove_resume(
    run: Path,
    settings: Sequence[str] = (),
    *,
    processes: int | None = None,
    steps: int = STEPS,
    say: Callable[[str], None],
) -> Rehearsal:
    """Rehearse the resume of a run from copies of its newest checkpoint; the run's folder is only read.

    `settings` are `--section.field VALUE`, on top of the run's recipe.

    Raises:
        ValueError: the folder holds no run, or one that trains no further.
        SittingFailed, CheckpointError: as `rehearse_recipe`; no checkpoint is valid.
    """
    _check(steps, processes)
    path = recipe_of_run(run)
    if path is None:
        raise ValueError(f"{run} holds no {RECIPE_FILE}; give the output_dir of a run")
    check_settings(settings)
    recipe, settings = read_recipe(run, settings), reader_settings(settings)
    newest = verify(run).newest
    if newest is None:
        raise CheckpointError(f"{run} has no checkpoint to resume from")
    trainer = read_trainer(newest)
    if trainer["state"]["stopped_early"]:
        raise ValueError(f"{newest} is of a run that was stopped early: a resume trains no further")
    plan = resolve_plan(recipe, processes or trainer["world_size"], progress=sys.stderr.isatty())
    return _rehearse(str(path), settings, plan, run, newest, steps // 2, say)


def _check(steps: int, processes: int | None) -> None:
    if steps < LEAST_STEPS:
        raise ValueError(f"--steps={steps}: must be at least {LEAST_STEPS}, so that there are steps after the kill")
    if processes is not None and processes < 1:
        raise ValueError(f"--processes={processes}: must be at least 1")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: this starts its own processes; run it without a launcher, "
            "and say --processes N"
        )


def _num_devices() -> int:
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    return 1 if on_cpu else max(1, torch.cuda.device_count())


def _rehearse(
    path: str,
    settings: Sequence[str],
    plan: Plan,
    beside: Path,
    newest: Path | None,
    every: int,
    say: Callable[[str], None],
) -> Rehearsal:
    start = 0 if newest is None else step_of(newest) or 0
    rehearsal = Rehearsal(str(beside if newest else path), plan, _saved_steps(beside, start, every), start)
    can_repeat = plan.recipe.precision.deterministic or plan.device == "cpu"
    with _folder_beside(beside) as folder:
        rehearsal.free_bytes = shutil.disk_usage(folder).free
        needed = CHECKPOINTS_AT_ONCE * plan.checkpoint_bytes
        if rehearsal.free_bytes < needed:
            raise CheckpointError(
                f"{folder.parent} has {gib(rehearsal.free_bytes)} free, and a rehearsal needs {gib(needed)}; make room, or "
                "set output_dir on another disk"
            )
        where = f"on {processes_of(plan.world_size)}, in {folder}, which is removed afterwards"
        say(f"rehearsing {rehearsal.name} {where}")
        rehearsal.changed = _changed_settings(plan, rehearsal.steps, every)
        _two_runs(rehearsal, path, settings, folder, newest, say)
        if not rehearsal.same and not can_repeat:
            say(
                "the runs differ; once more with precision.deterministic true, to tell the resume from the GPU's kernels"
            )
            again = Rehearsal(rehearsal.name, plan, rehearsal.steps, start, deterministic=True)
            again.free_bytes = rehearsal.free_bytes
            again.changed = {**rehearsal.changed, "precision.deterministic": "true"}
            for old in folder.iterdir():
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            _two_runs(again, path, settings, folder, newest, say)
            return again
    return rehearsal


def _saved_steps(run: Path, start: int, every: int) -> tuple[int, int]:
    """The next two steps that are saved after `start`, less those that a rollback of this run passes over."""
    rollbacks = read_rollbacks(run) if start else []
    due = (step for step in count((start // every + 1) * every, every) if not is_passed_over(step, rollbacks))
    return next(due), next(due)


def _two_runs(
    rehearsal: Rehearsal,
    path: str,
    settings: Sequence[str],
    folder: Path,
    newest: Path | None,
    say: Callable[[str], None],
) -> None:
    """One run without a break, and one that is killed after its first save and run again; then compare them."""
    whole, killed = folder / "without-a-break", folder / "killed"
    flags = [*settings, *(word for name, value in rehearsal.changed.items() for word in (f"--{name}", str(value)))]
    processes, (first, last) = rehearsal.plan.world_size, rehearsal.steps
    _begin_with(newest, whole)
    with Sitting("without a break", path, flags, whole, processes) as sitting:
        say(f"  without a break: to step {last}, with an evaluation and a save at steps {first} and {last}")
        sitting.wait_until(sitting.begun)
        rehearsal.startup_seconds.append(sitting.seconds)
        _refuse_changes(whole, rehearsal.name)
        sitting.wait_for_save(last)
        asked = sitting.seconds
        in_time = sitting.stop(STOP_SECONDS)
        rehearsal.stop_seconds = sitting.seconds - asked if in_time else None
        _note_measured(rehearsal, sitting, whole)
    rehearsal.did.append(
        ("without a break", f"steps {rehearsal.start + 1} to {last}, evaluated and saved at {first} and {last}")
    )
    _keep_only(whole, last)
    _begin_with(newest, killed)
    with Sitting("to be killed", path, flags, killed, processes) as sitting:
        say(f"  to be killed: after the save of step {first} is on the disk")
        sitting.wait_until(sitting.begun)
        rehearsal.startup_seconds.append(sitting.seconds)
        sitting.wait_for_save(first)
        sitting.wait_until(lambda: sitting.at_step() > first)
        sitting.kill()
        died_at = sitting.at_step()
    rehearsal.did.append(
        ("killed", f"SIGKILL to all processes after step {died_at} was done and step {first} was saved")
    )
    _keep_only(killed, first)
    with Sitting("run again", path, flags, killed, processes) as sitting:
        say(f"  run again: from step {first} to step {last}")
        sitting.wait_until(sitting.begun)
        rehearsal.startup_seconds.append(sitting.seconds)
        sitting.wait_for_save(last)
    resumed = next(event for event in reversed(read_events(killed)) if event["event"] == "resume")
    rehearsal.did.append(("run again", f"went on from step {resumed['step']} to step {last}"))
    if resumed["step"] != first:
        raise AssertionError(f"it resumed from step {resumed['step']}, and step {first} was there")
    rehearsal.compared = compare_runs(whole, killed, rehearsal.start + 1, last)


def _evaluated_samples(plan: Plan) -> int:
    samples = max(EVALUATED_SAMPLES, 2 * plan.sizes.per_device_eval_batch_size * plan.world_size)
    return min(samples, plan.recipe.evaluate.max_samples or samples)


def _changed_settings(plan: Plan, steps: tuple[int, int], every: int) -> dict[str, object]:
    """What a rehearsal changes of a recipe: when it evaluates and saves, on how much, and what it tells to whom."""
    changed: dict[str, object] = {
        "checkpoint.every_steps": every,
        "checkpoint.keep": 1_000_000,
        "checkpoint.resume": "auto",
        "evaluate.every_epochs": "null",
        "evaluate.every_steps": every,
        "evaluate.max_samples": _evaluated_samples(plan),
        "evaluate.early_stopping_patience": "null",
        "log.every_steps": 1,
        "log.trackers": "[]",
        "log.progress": "false",
    }
    if plan.steps.max_steps < steps[1] + STEPS_TO_SPARE:
        changed["schedule.max_steps"] = steps[1] + STEPS_TO_SPARE
        changed["schedule.warmup_steps"] = plan.steps.warmup_steps
        changed["checkpoint.accept_changes"] = "true"
    return changed


def _begin_with(newest: Path | None, run_folder: Path) -> None:
    """A run folder with a copy of this checkpoint and what belongs to it: links where the disk has them, for files never change."""
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
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
    return target


def _keep_only(run_folder: Path, step: int) -> None:
    for folder in checkpoint_folders(run_folder / "checkpoints"):
        if step_of(folder) != step:
            remove(folder)


def _refuse_changes(run_folder: Path, name: str) -> None:
    """That the run was made longer is our doing; anything else that has changed since the checkpoint is not."""
    for event in read_events(run_folder):
        changes = event.get("changes", ()) if event["event"] == "changes_accepted" else ()
        foreign = [
            change for change in changes if not change.startswith(("schedule.max_steps ", "schedule.warmup_steps "))
        ]
        if foreign:
            raise ValueError(
                "\n".join((f"{name} has changed since its checkpoint, and a resume would be refused:", *foreign))
            )


def _note_measured(rehearsal: Rehearsal, sitting: Sitting, run_folder: Path) -> None:
    """What the run without a break took."""
    rows = read_metrics(run_folder) if (run_folder / METRICS_FILE).exists() else []
    clock = [row["train_seconds"] for row in rows if row["split"] == "train"]
    if len(clock) > 2:  # the first step is slower than the others
        rehearsal.step_seconds = (clock[-1] - clock[1]) / (len(clock) - 2)
    rehearsal.evaluation = next((row for row in reversed(rows) if row["split"] != "train"), None)
    rehearsal.save_seconds = max(sitting.save_seconds, default=None)
    rehearsal.resident_bytes = sitting.peak_resident_bytes
    stopped = sitting.preempted()
    if stopped is not None:
        rehearsal.exit_saved_step = stopped["step"]
        rehearsal.peak_bytes = stopped.get("peak_memory_bytes", {})
    saved = run_folder / "checkpoints" / f"step-{rehearsal.steps[1]:08d}"
    rehearsal.checkpoint_bytes = sum(path.stat().st_size for path in saved.iterdir())


@contextmanager
def _folder_beside(output_dir: Path) -> Iterator[Path]:
    """A folder for this rehearsal alone, on the disk that the run would write to."""
    above = next(path for path in output_dir.absolute().parents if path.is_dir())
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".rehearsal-{output_dir.name}-", dir=above))
    except OSError as error:
        raise ValueError(f"{above} cannot be written: {error.strerror}; set another output_dir") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
