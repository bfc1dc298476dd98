"""What a run saves, when it refuses to, and how its processes hear of a save that failed."""

import math
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from accel_train.checkpoint import rotate
from accel_train.health import healthy_steps
from accel_train.prepare import Run
from accel_train.snapshot import model_tensors, optimizer_tensors, snapshot_writers
from accel_train.state import CheckpointError


def save_run(run: Run, *, wait: bool = False) -> None:
    """Save a checkpoint of this step, and remove the ones no longer kept; with `wait` it is published when this returns.

    Else the main process copies what is saved, and a thread of its own writes it while training goes on; `raise_save_error`
    tells of what went wrong.

    Raises:
        CheckpointError: with `wait`, it could not be written; every process hears of it, and older checkpoints are untouched.
    """
    state, saver = run.state, run.saver
    state.train_seconds = run.observer.train_seconds
    problem = weights_problem(run)
    if problem is not None:
        run.observer.on_event("checkpoint_refused", state.step, f"step {state.step} is not saved: {problem}")
        if wait:
            raise CheckpointError(f"step {state.step} is not saved: {problem}; the checkpoints before it are good")
        return
    with run.observer.pause(), run.memory.phase("save"):
        if run.accelerator.is_main_process:
            keep, spared = run.recipe.checkpoint.keep, state.best_step if run.recipe.checkpoint.keep_best else None
            writers = snapshot_writers(
                run.inner.model,
                run.optimizer,
                run.accelerator,
                state,
                run.identity,
                average=run.average,
                description=run.description,
            )
            saver.save(
                state.step,
                writers,
                lambda: rotate(saver.root, keep, {spared, max(healthy_steps(saver.root), default=None)}),
            )
        if wait:
            saver.wait()
        tell_of_saves(run)
        if wait or not run.recipe.checkpoint.in_background:
            raise_save_error(run)


def weights_problem(run: Run) -> str | None:
    """Why the present weights must not become a checkpoint: one of them is not finite; None where all is well.

    All processes have the same weights, so all find the same.
    """
    tensors = {**model_tensors(run.inner.model), **optimizer_tensors(run.optimizer)}
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not floats:
        return None
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(list(floats.values()), math.inf)])
    if bool(torch.isfinite(largest).all()):
        return None
    broken = [name for name, is_finite in zip(floats, torch.isfinite(largest).tolist(), strict=True) if not is_finite]
    return (
        f"{broken[0]} is not finite (and {len(broken) - 1} more)" if len(broken) > 1 else f"{broken[0]} is not finite"
    )


def tell_of_saves(run: Run) -> None:
    """Tell the observer how saves have ended since it was last told."""
    for step, error in run.saver.take_ended():
        if error is None:
            run.health.saved(step)
            run.observer.on_event("checkpoint", step, f"saved step-{step:08d}")
        else:
            again = "" if run.saver.failed else "; the next one is tried all the same"
            run.observer.on_event("checkpoint_failed", step, f"{error}{again}")


def raise_save_error(run: Run) -> None:
    """On all processes, what kept the main process from saving, if anything did.

    Raises:
        CheckpointError: the last save failed.
    """
    problem: list[Any] = [run.saver.last_error]
    if run.accelerator.num_processes > 1:
        broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]
