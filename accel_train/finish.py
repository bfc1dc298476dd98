"""Between steps and after the last one: evaluate, save, and leave behind what a person wants to have."""

import math
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from accel_train import __version__
from accel_train.checkpoint import check, folder_of
from accel_train.evaluating import format_augmentation
from accel_train.evaluation import EvaluationLeft, evaluate
from accel_train.observe import write_report
from accel_train.observe.ledger import json_text
from accel_train.ownership import replacing, write_file
from accel_train.precision import COLLECTIVE_TIMEOUT_SECONDS, limit_collectives
from accel_train.preflight import metric_for_best
from accel_train.recipe import Evaluate
from accel_train.redaction import redact
from accel_train.resolve import change_model
from accel_train.run import Run
from accel_train.running_statistics import share_running_statistics
from accel_train.saving import refuse_nonfinite_model
from accel_train.snapshot import load_model_tensors, model_tensors, restore_weights
from accel_train.state import Preempted
from accel_train.task import TARGET_UNITS, rate_name
from accel_train.tensor_parts import gathered
from accel_train.zero_parts import whole_numel

LOWER_IS_BETTER = ("loss", "perplexity", "error", "mse", "mae", "bits_per_byte")
"""In the name of a metric; every other metric is better when it is greater."""


def evaluate_run(run: Run, *, at_end: bool = False, final: bool = False) -> bool:
    """Evaluate, and say so to the observer; returns whether this is the best so far and worth a checkpoint.

    All evaluations see the same samples (`evaluate.max_samples`), so they make one curve, and the best of them is the best.
    The `final` one sees all, of the weights that are kept: it is written down apart (split `eval_final`), and never the best.
    Early stopping is decided here, on numbers that all processes share; not `at_end`. An evaluation that a stop request cuts short finds
    nothing, and is owed: it is done when the run goes on.

    Raises:
        RecipeError: `evaluate.metric_for_best_model` is nothing that this evaluation reports.
    """
    began = time.perf_counter()
    state, section = run.state, run.recipe.evaluate
    try:
        with run.observer.pause(), run.memory.phase("evaluate"), run.averaged():
            metrics, details = _own_scores(run) if run.evaluate is not None else _task_scores(run, final)
    except EvaluationLeft:
        state.evaluation_owed = True
        return False
    state.evaluation_owed = False
    seconds = time.perf_counter() - began
    run.observer.on_evaluation(state.step, {**metrics, "seconds": seconds}, "eval_final" if final else "eval")
    run.last_scores = dict(metrics)
    measured = {name: value for name, value in metrics.items() if name != "num_targets"}
    run.last_details = {"step": state.step, "metrics": measured, "details": details}
    value = metric_for_best(metrics, section.metric_for_best_model)
    if final:
        return False
    if is_better(value, state.best_metric, section):
        state.best_metric, state.best_step, state.evaluations_without_improvement = value, state.step, 0
        return run.recipe.checkpoint.keep_best
    state.evaluations_without_improvement += 1
    if not at_end and is_patience_spent(run):
        state.stopped_early = True
        best = f"{section.metric_for_best_model} was best at step {state.best_step}: {state.best_metric}"
        patience = section.early_stopping_patience
        run.observer.on_event(
            "early_stop", state.step, f"stopped early: {best}, and {patience} evaluations since have not been better"
        )
    return False


def is_patience_spent(run: Run) -> bool:
    """Whether early stopping ends the run now, by the recipe of this session."""
    patience = run.recipe.evaluate.early_stopping_patience
    return patience is not None and run.state.evaluations_without_improvement >= patience


def continue_unless_stopped(run: Run) -> None:
    """Let a resumed run that had stopped early train on where nothing stops it now.

    Its patience was raised or removed, or a callback had stopped it: a callback decides anew, as in transformers.
    """
    state, patience = run.state, run.recipe.evaluate.early_stopping_patience
    if not state.stopped_early or is_patience_spent(run):
        return
    state.stopped_early = False
    now = f"evaluate.early_stopping_patience {'is not set' if patience is None else f'is {patience}'}"
    message = (
        f"the run had stopped early at step {state.step} of {run.max_steps}; nothing stops it now ({now}): it trains on"
    )
    run.observer.on_event("early_stop_lifted", state.step, message)


def _task_scores(run: Run, whole: bool) -> tuple[dict[str, float], dict[str, Any]]:
    if run.accelerator.num_processes > 1:
        share_running_statistics(run.inner)
    result = evaluate(
        run.accelerator,
        run.inner,
        run.data,
        run.sizes.per_device_eval_batch_size,
        max_samples=None if whole else run.recipe.evaluate.max_samples,
        num_workers=run.num_workers,
        pin_memory=run.pin_memory,
        piece_size=run.evaluation_piece_size,
        is_over=run.is_evaluation_over,
        timeout_seconds=run.data_timeout_seconds,
        in_lockstep=run.meets_in_forward,
    )
    if result.piece_size < (run.evaluation_piece_size or run.sizes.per_device_eval_batch_size):
        run.evaluation_piece_size = result.piece_size
        said = f"evaluation ran out of memory; this process forwards {result.piece_size} samples at once from now on"
        run.observer.on_event("out_of_memory", run.state.step, said)
    found = run.task.score(result.loss, result.totals, run.data)
    return {"loss": result.loss, **found.metrics, "num_targets": result.num_targets}, found.details


def _own_scores(run: Run) -> tuple[dict[str, float], dict[str, Any]]:
    assert run.evaluate is not None
    return dict(run.evaluate()), {}


def is_better(value: float, best: float | None, section: Evaluate) -> bool:
    """Whether a metric beats the best so far by more than the threshold; NaN never does."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    greater = section.greater_is_better
    if greater == "auto":
        greater = not any(word in section.metric_for_best_model for word in LOWER_IS_BETTER)
    gain = value - best if greater else best - value
    return gain > section.early_stopping_threshold


def finish_run(run: Run) -> dict[str, Any]:
    """After the last step: the whole evaluation, the best weights if asked for, `model/`, summary.json and report.html.

    Raises:
        Preempted: the run was asked to stop during an evaluation; all steps are saved.
        TrainingStopped: the weights, their average or their loss are not finite: nothing is published.
    """
    if run.accelerator.num_processes > 1:
        limit_collectives(COLLECTIVE_TIMEOUT_SECONDS)  # the others wait while the main process writes the model
    if run.can_evaluate:
        evaluate_at_end(run)
    if run.state.evaluation_owed:
        said = f"asked to stop: all {run.state.step} steps are done and saved, and the last evaluation is not"
        run.observer.on_event("preempted", run.state.step, said)
        raise Preempted(f"{said}; run the same command again for it")
    with run.averaged():
        refuse_nonfinite_model(run)
        model = whole_model(run)
        if not run.accelerator.is_main_process:
            summary: dict[str, Any] = {}
        else:
            save_model(run, model)
            summary = summarise(run, model)
    if not run.accelerator.is_main_process:
        run.accelerator.wait_for_everyone()
        run.observer.finish({})
        return {}
    if run.last_details:
        write_file(run.output_dir / "evaluation.json", json_text(run.last_details).encode(), run.output_dir)
    run.observer.finish(summary)
    try:
        report: Path | str = write_report([run.output_dir])
    except OSError as error:  # the weights are saved; a full disk should not make a finished run fail
        report = f"could not be written ({error}); accel-train report {run.output_dir} tries again"
    _say(run, summary, report)
    run.accelerator.wait_for_everyone()
    return summary


def evaluate_at_end(run: Run) -> None:
    """Let the last step compete for the best on the samples of all evaluations, and evaluate what is kept on all samples."""
    state = run.state
    is_evaluated = state.stopped_early or run.last_details.get("step") == state.step
    if not run.evaluates_part or (state.best_step is not None and not is_evaluated):
        evaluate_run(run, at_end=True)
    is_wanted = run.recipe.checkpoint.load_best_model_at_end and state.best_step not in (None, state.step)
    is_other = is_wanted and not state.evaluation_owed and load_best(run)
    if (is_other or run.evaluates_part) and not state.evaluation_owed:
        evaluate_run(run, at_end=True, final=True)


def load_best(run: Run) -> bool:
    """Go back to the weights that evaluated best, on every process; False where their checkpoint does not prove itself."""
    step = run.state.best_step
    assert step is not None
    path = folder_of(run.output_dir / "checkpoints", step)
    problem = [check(path).problem if run.accelerator.is_main_process else None]
    if run.accelerator.num_processes > 1:
        broadcast_object_list(problem)
    if problem[0] is not None:
        said = f"the weights of step {step} evaluated best, and cannot be used ({problem[0]}): those of the last step are kept"
        run.observer.on_event("best_model_lost", run.state.step, said)
        return False
    run.let_go_of_gathered_weights()
    restore_weights(path, run.inner.model, run.average, run.zero_parts)
    run.observer.on_event("best_model", run.state.step, f"the weights of step {step} evaluated best, and are kept")
    return True


def whole_model(run: Run) -> nn.Module:
    """The trained model with all its weights, on the main process; all processes call it.

    Where each of them holds a part, the whole is put together in the host memory of the main one, a tensor at a time.
    """
    if not run.is_sharded:
        return run.inner.model
    run.let_go_of_gathered_weights()
    tensors = {} if run.zero is None else run.zero.parts.weights()
    if run.zero is None:
        for name, tensor in model_tensors(run.inner.model).items():
            whole = gathered(tensor)
            if run.accelerator.is_main_process:
                tensors[name] = whole.cpu()
    if not run.accelerator.is_main_process:
        return run.inner.model
    model, _ = change_model(run.recipe, run.task.build_model(run.recipe, run.data))
    load_model_tensors(model, tensors)
    return model.eval()


def save_model(run: Run, model: nn.Module) -> Path:
    """The trained weights as `model/`, whole or not at all, ready for `from_pretrained`; adapters as `adapter/` beside it."""
    final = run.output_dir / "model"
    if (section := run.recipe.model.lora) is not None:
        from accel_train.lora import merge_adapters, save_adapters, without_adapters

        with replacing(run.output_dir / "adapter") as aside:
            save_adapters(model, run.recipe.model, aside)
        model = merge_adapters(model) if section.merge else without_adapters(model)
    with replacing(final) as aside:
        run.task.save(model, run.data, aside)
    return final


def summarise(run: Run, model: nn.Module) -> dict[str, Any]:
    """What summary.json holds; plain JSON values."""
    seconds = max(run.observer.train_seconds, 1e-9)
    return {
        "status": "stopped early" if run.state.stopped_early else "finished",
        "steps": run.state.step,
        "num_targets": run.state.num_targets_seen,
        "skipped_steps": run.state.num_skipped_steps,
        "eval": run.last_scores,
        "metric_for_best_model": run.recipe.evaluate.metric_for_best_model,
        "best_metric": run.state.best_metric,
        "best_step": run.state.best_step,
        "baselines": run.task.baselines(run.data),
        "sample": run.task.sample(run.recipe, model, run.data),
        "data": redact(run.data.facts),
        "started_in": os.getcwd(),
        "parameters": whole_numel(list(run.inner.model.parameters())),
        "world_size": run.accelerator.num_processes,
        "train_seconds": round(run.observer.train_seconds, 3),
        rate_name(TARGET_UNITS.get(run.recipe.task, "targets")): run.state.num_targets_seen / seconds,
        "samples_per_second": run.state.step * run.sizes.global_batch_size / seconds,
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
    numbers = {name.replace("_", " "): value for name, value in {**summary["eval"], **summary["baselines"]}.items()}
    if numbers:
        run.observer.note("Evaluation on all held-out data, and what it takes without a model:")
    width = max(map(len, numbers), default=0)
    for name, value in numbers.items():
        text = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        run.observer.note(f"  {name:{width}}{text:>14}")
    if augmented := format_augmentation(run.last_details.get("details", {})):
        run.observer.note(augmented)
    run.observer.note(f"weights: {run.output_dir / 'model'}\nreport:  {report}")
