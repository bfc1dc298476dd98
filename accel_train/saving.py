"""What a run saves, when it refuses to, and how its processes hear of a save that failed."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list

from accel_train.checkpoint import checkpoint_folders, rotate
from accel_train.health import steps_to_spare
from accel_train.identity import identity_origins
from accel_train.recipe import Recipe
from accel_train.run import Run
from accel_train.snapshot import model_tensors, optimizer_tensors, snapshot_parts, snapshot_writers
from accel_train.state import CheckpointError, Preempted, TrainingStopped
from accel_train.tensor_parts import local_part

SLOW_SECONDS = 1.0
"""A wait for the checkpoint before that is longer than this is worth an event."""
LAST_WAIT_SECONDS = 5.0
"""How long a run that fails waits for the checkpoint that is being written."""


def save_run(run: Run, *, wait: bool = False) -> None:
    """Save a checkpoint of this step, and remove the ones no longer kept; with `wait` it is published when this returns.

    Else the main process copies what is saved, and a thread of its own writes it while training goes on; one save that fails
    is an event, and `raise_save_error` tells of the second one in a row.

    Raises:
        CheckpointError: with `wait`, it could not be written; or not for the second time in a row. Every process hears of it,
            and older checkpoints are untouched.
    """
    run.state.train_seconds = run.observer.train_seconds
    with run.observer.pause(), run.memory.phase("save"):
        refused = _start_save(run, wait) if run.accelerator.is_main_process or run.is_sharded else None
        tell_of_saves(run)
        if wait:
            raise_save_error(run, refused or run.saver.last_error)
        elif not run.recipe.checkpoint.in_background:
            raise_save_error(run)


def _start_save(run: Run, wait: bool) -> CheckpointError | None:
    """On the main process; returns why nothing is saved, if so."""
    state, saver = run.state, run.saver
    problem = weights_problem(run)
    if problem is not None:
        said = f"step {state.step} is not saved: {problem}"
        run.observer.on_event("checkpoint_refused", state.step, said)
        return CheckpointError(f"{said}; the checkpoints before it are good")
    seconds = saver.wait()  # before anything is copied: there are never two copies
    tell_of_saves(run)
    if seconds > SLOW_SECONDS:
        said = f"training waited {seconds:.1f} s for the checkpoint before, which was still being written"
        run.observer.on_event("checkpoint_slow", state.step, said, seconds=round(seconds, 3))
    writers = snapshot_writers(
        run.inner.model,
        run.optimizer,
        run.accelerator,
        state,
        run.identity,
        settings=run.settings.values,
        origins={**run.settings.origins, **identity_origins(run.recipe, run.identity)},
        average=run.average,
        description=run.description,
        zero=run.zero_parts,
    )
    parts = None
    if run.is_sharded and run.zero is None:
        assert run.saving_group is not None
        parts = snapshot_parts(run.inner.model, run.optimizer, run.average, run.saving_group)
    run.health.begun(state.step)
    if run.zero is not None and not run.accelerator.is_main_process:
        return None
    then = partial(rotate_run, saver.root, run.recipe, state.best_step)
    saver.save(state.step, writers, then if run.accelerator.is_main_process else lambda: None, parts)
    if wait:
        saver.wait()
    return None


def rotate_run(root: Path, recipe: Recipe, best_step: int | None) -> None:
    """Remove what is no longer kept: neither among the newest, nor the best, nor wanted for a rollback."""
    spared = {best_step} if recipe.checkpoint.keep_best else set()
    if recipe.guard.max_rollbacks:
        spared |= steps_to_spare(root)
    rotate(root, recipe.checkpoint.keep, spared)


def weights_problem(run: Run) -> str | None:
    """Why the present weights must not become a checkpoint: one of them is not finite; None where all is well.

    All processes find the same: they have the same weights, or, where each has a part of them, ask each other.
    """
    tensors = (
        {**model_tensors(run.inner.model), **optimizer_tensors(run.optimizer)}
        if run.zero is None
        else run.zero.parts.local_tensors()
    )
    if run.average is not None:
        tensors |= {f"the average of {name}": tensor for name, tensor in run.average.tensors().items()}
    floats = {
        name: local_part(tensor) for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()
    }
    if not floats:
        return None
    # max() of nothing is an error, and a process may hold nothing of a tensor.
    parts = [part if part.numel() else part.new_zeros(1) for part in floats.values()]
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(parts, math.inf)])
    if run.is_sharded:
        broken_here = (~torch.isfinite(largest)).float()  # MAX does not carry NaN everywhere
        dist.all_reduce(broken_here, op=dist.ReduceOp.MAX)
        largest = torch.where(broken_here > 0, math.nan, largest)
    if bool(torch.isfinite(largest).all()):
        return None
    broken = [name for name, is_finite in zip(floats, torch.isfinite(largest).tolist(), strict=True) if not is_finite]
    return (
        f"{broken[0]} is not finite (and {len(broken) - 1} more)" if len(broken) > 1 else f"{broken[0]} is not finite"
    )


def refuse_nonfinite_model(run: Run) -> None:
    """Before `model/` is written, with the weights in place that it is to hold: all must be numbers, and their loss as well.

    Raises:
        TrainingStopped: on all processes; the text names the tensor and what is kept.
    """
    problem = [weights_problem(run)]
    if run.accelerator.num_processes > 1:
        broadcast_object_list(problem)
    loss = run.last_scores.get("loss", 0.0)
    if problem[0] is None and run.evaluate is None and not math.isfinite(loss):
        problem[0] = f"the loss of the last evaluation is {loss}, of finite weights"
    if problem[0] is not None:
        said = f"{problem[0]}: model/ is not written. {kept_checkpoints(run)}"
        run.observer.on_event("stop", run.state.step, said)
        raise TrainingStopped(said)


def kept_checkpoints(run: Run) -> str:
    """A sentence on what a run that is stopped leaves behind, once the save under way has ended."""
    run.saver.wait()
    kept = checkpoint_folders(run.saver.root)
    if not kept:
        return f"There is no checkpoint in {run.output_dir} yet"
    return f"The checkpoints in {run.output_dir} are from before, {kept[-1].name} is the newest"


def tell_of_saves(run: Run) -> None:
    """Tell the observer how saves have ended since it was last told."""
    for step, error, left_undone in run.saver.take_ended():
        if error is not None:
            again = "" if run.saver.failed else "; the next one is tried all the same"
            run.observer.on_event("checkpoint_failed", step, f"{error}{again}")
            continue
        run.observer.on_event("checkpoint", step, f"saved step-{step:08d}")
        if left_undone is not None:
            said = f"step-{step:08d} is saved, but older checkpoints could not be removed ({left_undone})"
            run.observer.on_event("rotation_failed", step, said)


def raise_save_error(run: Run, error: CheckpointError | None = None) -> None:
    """On all processes, what keeps the main process from saving: the error it gives, or else two failures in a row.

    Raises:
        CheckpointError: there is one.
    """
    problem: list[Any] = [error or (run.saver.last_error if run.saver.failed else None)]
    if run.accelerator.num_processes > 1:
        broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]


@contextmanager
def saves_finished(run: Run) -> Iterator[None]:
    """Inside, a checkpoint may be on its way; on leaving, it has arrived.

    A run that is interrupted gives it up at once, and one that fails in a way nobody foresaw, after some seconds: what is on
    the disk is good, and a launcher that waits for this process kills it before long.
    """
    try:
        yield
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
    else:
        run.saver.wait()
    finally:
        tell_of_saves(run)
        run.health.tag()
