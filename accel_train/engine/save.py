"""Save a run, refuse to save broken weights, and report failed saves on all processes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from accel_train.checkpoint.base import base_record
from accel_train.checkpoint.contents import trainer_writers
from accel_train.checkpoint.fingerprint import identity_origins
from accel_train.checkpoint.health import protected_steps
from accel_train.checkpoint.resume import read_state
from accel_train.checkpoint.store import checkpoint_folders, read_trainer, rotate
from accel_train.core.errors import CheckpointError, Preempted, TrainingStopped
from accel_train.core.state import JsonRecord, TrainState
from accel_train.core.work import working
from accel_train.engine.run import RunContext
from accel_train.model.tensors import names_not_finite
from accel_train.parallel.strategy import Strategy
from accel_train.recipe.schema import Recipe
from accel_train.runtime.process_group import on_main

SLOW_SECONDS = 1.0
"""Wait for the previous checkpoint, in seconds, above which an event is reported."""
ALIKE = {"adam", "adamw"}
"""Optimizers that keep the same state."""
LAST_WAIT_SECONDS = 5.0
"""Time a failing run waits for the checkpoint being written, in seconds."""


def save_run(run: RunContext, *, wait: bool = False) -> None:
    """Save a checkpoint of this step and remove older checkpoints; with `wait`, return once it is published.

    Without `wait`, a thread writes a copy while training continues. One failed save is an event. A second failure in a
    row ends the run.

    Raises:
        CheckpointError: on all processes, if a save with `wait` failed, or if two saves in a row failed. Older
            checkpoints are untouched.
    """
    run.state.train_seconds = run.observer.train_seconds
    with run.observer.pause("saving"), run.memory.phase("save"):
        refused = _start_save(run, wait) if run.accelerator.is_main_process or not run.strategy.is_replicated else None
        report_saves(run)
        if wait:
            raise_save_error(run, refused or run.saver.last_error)
        elif not run.plan.recipe.checkpoint.in_background:
            raise_save_error(run)


def _start_save(run: RunContext, wait: bool) -> CheckpointError | None:
    """Start a save on each process that writes; return the error if nothing is saved, otherwise None."""
    state, saver = run.state, run.saver
    if problem := weights_problem(run):
        message = f"step {state.step} is not saved: {problem}"
        run.observer.on_event("checkpoint_refused", state.step, message)
        return CheckpointError(f"{message}; the earlier checkpoints are good")
    with working("waiting for the disk"):
        seconds = saver.wait()  # before the snapshot, so that memory never holds two copies
    report_saves(run)
    if seconds > SLOW_SECONDS:
        message = f"training waited {seconds:.1f} s for the previous checkpoint to be written"
        run.observer.on_event("checkpoint_slow", state.step, message, seconds=round(seconds, 3))
    snapshot = run.strategy.snapshot()
    run.health.begun(state.step)
    with working("writing a checkpoint"):
        if run.accelerator.is_main_process:
            writers = {**trainer_writers(_trainer(run), run.facts.description), **snapshot.files}
            then = partial(rotate_run, saver.root, run.plan.recipe, state.best_step)
            saver.save(state.step, writers, then, snapshot.shards)
        elif snapshot.shards is not None:
            saver.save(state.step, {}, tuple, snapshot.shards)
        if wait:
            saver.wait()
    return None


def _trainer(run: RunContext) -> JsonRecord:
    """Return the contents of `trainer.json`: counters, loss scale, and the run fingerprint with its settings."""
    scaler, plan, settings = run.accelerator.scaler, run.plan, run.facts.settings
    return {
        "state": asdict(run.state),
        "scaler": None if scaler is None else scaler.state_dict(),
        "identity": dict(plan.identity),
        "settings": dict(settings.values),
        "origins": {**settings.origins, **identity_origins(plan.recipe, plan.identity)},
        "world_size": run.accelerator.num_processes,
        "torch": torch.__version__,
        **base_record(plan.recipe.model.pretrained, run.facts.base),
    }


def restore(strategy: Strategy, folder: Path, optimizer_name: str) -> TrainState:
    """Read a verified checkpoint into the model, the optimizer, and the loss scale; return the counters.

    If the user has accepted a change of optimizer, the stored optimizer state is ignored.

    Raises:
        ValueError: the checkpoint belongs to another model.
        CheckpointError: the checkpoint's contents are not what this version writes.
    """
    state, trainer = read_state(folder), read_trainer(folder)
    scaler, stored_name = trainer["scaler"], trainer["identity"].get("optimizer.name")
    strategy.check_stored(folder)
    strategy.restore_weights(folder)
    if stored_name == optimizer_name or {stored_name, optimizer_name} <= ALIKE:
        strategy.restore_optimizer(folder)
    if strategy.accelerator.scaler is not None and scaler is not None:
        strategy.accelerator.scaler.load_state_dict(scaler)
    return state


def rotate_run(root: Path, recipe: Recipe, best_step: int | None) -> list[Path]:
    """Remove checkpoints that are neither among the newest, nor the best, nor protected for a rollback.

    Returns:
        Folders in which `store.remove` keeps files that do not belong to a checkpoint.
    """
    kept: list[Path] = []
    protected = {best_step} if recipe.checkpoint.keep_best else set()
    if recipe.guard.max_rollbacks:
        protected |= protected_steps(root)
    rotate(root, recipe.checkpoint.keep, protected, kept.append)
    return kept


def weights_problem(run: RunContext) -> str | None:
    """Return why the current weights must not be saved (a weight is not finite), or None; equal on all processes."""
    tensors = run.strategy.local_tensors()
    if run.strategy.average is not None:
        tensors |= {f"the average of {name}": tensor for name, tensor in run.strategy.average.tensors().items()}
    broken = names_not_finite(tensors, across_ranks=not run.strategy.is_replicated)
    more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    return f"{broken[0]} is not finite{more}" if broken else None


def refuse_nonfinite_model(run: RunContext) -> None:
    """Refuse to write `model/` if a weight or the last evaluation loss is not finite.

    Raises:
        TrainingStopped: on all processes. The text names the tensor and the checkpoints that are kept.
    """
    found = weights_problem(run)
    problem = on_main(lambda: found)
    loss = run.evaluation.scores.get("loss", 0.0)
    if problem is None and run.plan.extensions.evaluate is None and not math.isfinite(loss):
        problem = f"the weights are finite, but the loss of the last evaluation is {loss}"
    if problem is not None:
        message = f"{problem}: model/ is not written. {kept_checkpoints(run)}"
        run.observer.on_event("stop", run.state.step, message)
        raise TrainingStopped(message)


def kept_checkpoints(run: RunContext) -> str:
    """Wait for the current save, and return a sentence about the checkpoints of a stopped run."""
    run.saver.wait()
    kept = checkpoint_folders(run.saver.root)
    if not kept:
        return f"{run.plan.output_dir} has no checkpoint yet"
    return f"The earlier checkpoints in {run.plan.output_dir} are good; {kept[-1].name} is the newest"


def report_saves(run: RunContext) -> None:
    """Report to the observer the results of saves that ended since the last call."""
    for step, error, left_undone, kept, seconds in run.saver.take_ended():
        if error is not None:
            again = "" if run.saver.failed else "; training continues until the next save"
            run.observer.on_event("checkpoint_failed", step, f"{error}{again}")
            continue
        run.observer.on_event("checkpoint", step, f"saved step-{step:08d}", seconds=round(seconds, 6))
        for folder in kept:
            message = f"{folder} is kept: it has files that do not belong to the checkpoint; move or remove them"
            run.observer.on_event("kept_files", step, message)
        if left_undone is not None:
            message = f"step-{step:08d} is saved, but older checkpoints could not be removed ({left_undone})"
            run.observer.on_event("rotation_failed", step, message)


def raise_save_error(run: RunContext, error: CheckpointError | None = None) -> None:
    """Raise on all processes the main process's save error: `error`, or two failed saves in a row.

    Raises:
        CheckpointError: the main process cannot save.
    """
    error = on_main(lambda: error or (run.saver.last_error if run.saver.failed else None))
    if error is not None:
        raise error


@contextmanager
def saves_finished(run: RunContext) -> Iterator[None]:
    """Finish the current save on exit.

    An interrupted run abandons the save at once. A run that fails unexpectedly waits `LAST_WAIT_SECONDS` for it. The
    checkpoints on disk stay valid, and a launcher that waits for this process would soon kill it.
    """
    try:
        yield
        with working("writing a checkpoint"):
            run.saver.wait()
    except KeyboardInterrupt:
        run.saver.abandon()
        raise
    except (TrainingStopped, Preempted, CheckpointError):
        run.saver.wait()
        raise
    except BaseException:
        run.saver.wait(LAST_WAIT_SECONDS)
        run.saver.abandon()
        raise
    finally:
        report_saves(run)
        run.health.tag()
