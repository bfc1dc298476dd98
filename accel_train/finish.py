"""Between steps and after the last one: evaluate, save, and leave behind what a person wants to have."""

import math
import os
import platform
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from accel_train import __version__
from accel_train.checkpoint import publish, rotate
from accel_train.evaluation import evaluate
from accel_train.observe import write_report
from accel_train.prepare import Run
from accel_train.snapshot import snapshot_writers
from accel_train.state import CheckpointError


def evaluate_run(run: Run, *, whole: bool = False) -> bool:
    """Evaluate, and say so to the observer; returns whether this is the best loss so far and worth a checkpoint."""
    began = time.perf_counter()
    max_samples = None if whole else run.recipe.evaluate.max_samples
    with run.observer.pause(), run.memory.phase("evaluate"):
        result = evaluate(
            run.accelerator,
            run.inner,
            run.data,
            run.sizes.per_device_eval_batch_size,
            max_samples=max_samples,
            num_workers=run.num_workers,
            pin_memory=run.pin_memory,
        )
    scores = {"loss": result.loss, **run.task.score(result.loss, run.data)}
    seconds = time.perf_counter() - began
    run.observer.on_evaluation(run.state.step, {**scores, "num_targets": result.num_targets, "seconds": seconds})
    run.last_scores = {**scores, "num_targets": result.num_targets}
    best = run.state.best_eval_loss
    comparable = math.isfinite(result.loss) and not (whole and run.recipe.evaluate.max_samples)
    if comparable and (best is None or result.loss < best):
        run.state.best_eval_loss, run.state.best_step = result.loss, run.state.step
        return run.recipe.checkpoint.keep_best
    return False


def save_run(run: Run) -> None:
    """Publish a checkpoint of this step, then remove the ones no longer kept.

    Raises:
        CheckpointError: it could not be written; every process hears of it, and older checkpoints are untouched.
    """
    state, root = run.state, run.output_dir / "checkpoints"
    state.train_seconds = run.observer.train_seconds
    problem: list[Any] = [None]
    with run.observer.pause(), run.memory.phase("save"):
        if run.accelerator.is_main_process:
            try:
                writers = snapshot_writers(run.inner.model, run.optimizer, run.accelerator, state, run.identity)
                path = publish(root, state.step, writers)
                run.observer.on_event("checkpoint", state.step, f"saved {path.name}")
                rotate(root, run.recipe.checkpoint.keep, state.best_step if run.recipe.checkpoint.keep_best else None)
            except CheckpointError as error:
                problem[0] = error
        if run.accelerator.num_processes > 1:
            broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]


def finish_run(run: Run) -> dict[str, Any]:
    """After the last step: the whole evaluation, the weights, a sample, summary.json and report.html."""
    if run.data.eval is not None:
        evaluate_run(run, whole=True)
    if not run.accelerator.is_main_process:
        run.accelerator.wait_for_everyone()
        return {}
    save_model(run)
    summary = summarise(run)
    run.observer.finish(summary)
    try:
        report: Path | str = write_report([run.output_dir])
    except OSError as error:  # the weights are saved; a full disk should not make a finished run fail
        report = f"could not be written ({error}); accel-train report {run.output_dir} tries again"
    _say(run, summary, report)
    run.accelerator.wait_for_everyone()
    return summary


def save_model(run: Run) -> Path:
    """The trained weights as `model/`, whole or not at all, ready for `from_pretrained`."""
    final = run.output_dir / "model"
    aside, old = final.with_name(".tmp-model"), final.with_name(".trash-model")
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(mode=0o700)
    run.task.save(run.inner.model, run.data, aside)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    return final


def summarise(run: Run) -> dict[str, Any]:
    """What summary.json holds; plain JSON values."""
    return {
        "status": "finished",
        "steps": run.state.step,
        "num_targets": run.state.num_targets_seen,
        "skipped_steps": run.state.num_skipped_steps,
        "eval": run.last_scores,
        "best_eval_loss": run.state.best_eval_loss,
        "best_step": run.state.best_step,
        "baselines": run.task.baselines(run.data),
        "sample": run.task.sample(run.recipe, run.inner.model, run.data),
        "data": run.data.facts,
        "parameters": sum(parameter.numel() for parameter in run.inner.model.parameters()),
        "world_size": run.sizes.world_size,
        "train_seconds": round(run.observer.train_seconds, 3),
        "tokens_per_second": run.state.num_targets_seen / max(run.observer.train_seconds, 1e-9),
        "peak_memory_bytes": run.memory.peaks,
        "choices": {name: str(choice) for name, choice in run.choices.items()},
        "environment": environment(run.accelerator.device),
    }


def environment(device: torch.device) -> dict[str, str]:
    """What the run ran on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    packages = {name: version(name) for name in ("torch", "accelerate", "transformers")}
    return {
        "gpu": gpu,
        "cpu_cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "accel_train": __version__,
        **packages,
    }


def _say(run: Run, summary: dict[str, Any], report: Path | str) -> None:
    """The end of a run for whoever watched it: a sample, the numbers, and where everything lies."""
    if summary["sample"]:
        run.observer.note(f"\nA sample (prompt {summary['sample']['prompt']!r}):\n\n{summary['sample']['text']}\n")
    run.observer.note("Evaluation on all held-out data, and what it takes without a model:")
    for name, value in {**summary["eval"], **summary["baselines"]}.items():
        run.observer.note(
            f"  {name.replace('_', ' '):24}{value:>14,.4f}"
            if isinstance(value, float)
            else f"  {name.replace('_', ' '):24}{value:>14,}"
        )
    run.observer.note(f"weights: {run.output_dir / 'model'}\nreport:  {report}")
