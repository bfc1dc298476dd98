"""The startup log: what was decided and why, and the start or the resume; and the observer that it is written to."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from accel_train.checkpoint.fingerprint import OF_BEST, Change
from accel_train.checkpoint.rollback_log import describe
from accel_train.checkpoint.zero_shards import whole_numel
from accel_train.core.hardware import peak_flops
from accel_train.core.redaction import redact
from accel_train.core.state import Choice
from accel_train.data.labels import class_notes
from accel_train.engine.run import RunContext
from accel_train.engine.save import ALIKE
from accel_train.model.batch_norm import SyncedBatchNorm, trained_batch_norms
from accel_train.observe.goodput import LaunchClock
from accel_train.observe.notify import Notifier
from accel_train.observe.observer import LogPlan, RunObserver
from accel_train.observe.progress import Progress
from accel_train.observe.run_folder import RECIPE_FILE, RunFolder, read_events
from accel_train.observe.system_metrics import SystemMetrics
from accel_train.observe.throughput import Meter
from accel_train.observe.trackers import Trackers
from accel_train.recipe.schema import Recipe
from accel_train.recipe.writer import format_recipe
from accel_train.runtime.doctor import device_name, launch_facts
from accel_train.runtime.exit import exit_code, message_of
from accel_train.runtime.watchdog import Watchdog
from accel_train.task import TARGET_UNITS, TaskData
from accel_train.training.model_selection import short_name

FEW_HELD_OUT = 100
"""Fewer held-out samples of a classifier than this are warned of."""


def open_observer(run: RunContext, folder: RunFolder, clock: LaunchClock) -> RunObserver:
    """Return the main process's observer: run folder, progress bar and trackers."""
    plan, state, accelerator = run.plan, run.state, run.accelerator
    recipe, global_batch_size, peak = plan.recipe, run.sizes.global_batch_size, run.facts.peak_flops
    folder.rewind(state.step, evaluated=not state.evaluation_owed and state.step < plan.max_steps)
    targets = TARGET_UNITS.get(recipe.task, "targets")
    return RunObserver(
        folder,
        Progress(
            recipe.log.progress,
            total_steps=plan.max_steps,
            initial_step=state.step,
            targets=targets,
            metric=short_name(recipe.evaluate.metric_for_best_model),
        ),
        Trackers(
            accelerator,
            recipe.log.trackers,
            project=recipe.log.project,
            run_name=plan.output_dir.name,
            config=redact(recipe.model_dump()),
            logging_dir=plan.output_dir,
            initial_step=state.step,
        ),
        Meter(
            flops_per_token=run.facts.flops_per_target,
            peak_flops=peak and peak * accelerator.num_processes,
            train_seconds=state.train_seconds,
        ),
        LogPlan(
            log_every_steps=recipe.log.every_steps,
            total_steps=plan.max_steps,
            samples_per_step=global_batch_size,
            num_samples_per_epoch=plan.order.steps_per_epoch * global_batch_size,
            targets=targets,
        ),
        clock,
        SystemMetrics(accelerator.device),
    )


def open_notifier(recipe: Recipe, resources: ExitStack) -> Notifier | None:
    """Return the observer that posts to the URLs of `log.notify`, or None if there are no URLs.

    It posts the end when `resources` close, or when the watchdog ends the process.
    """
    if not recipe.log.notify:
        return None
    notifier = Notifier(recipe.log.notify, Path(recipe.output_dir), how_it_ended)
    resources.push(notifier.note_end)
    Watchdog.at_end.append(notifier.end)
    resources.callback(Watchdog.at_end.remove, notifier.end)
    return notifier


def how_it_ended(error: BaseException, has_begun: bool) -> tuple[str, int]:
    """Return message and exit code of a run that an error ends, once it `has_begun` to train or before."""
    code = exit_code(error)
    if code is None:
        code = 2 if isinstance(error, ValueError) and not has_begun else 1
    return message_of(error), code


def device_peak(device: torch.device, choices: Mapping[str, Choice[Any]]) -> tuple[float | None, Choice[str]]:
    """Return the FLOP/s of one device in the run's precision, and whether the run reports its MFU, with the reason."""
    name, precision = device_name(device), choices["precision.mixed_precision"].value
    is_tf32 = "precision.tf32" in choices and choices["precision.tf32"].value
    # In fp8 some products stay in bf16, whose peak is the known measure.
    peak = peak_flops(name, {"no": "tf32" if is_tf32 else "fp32", "fp8": "bf16"}.get(precision, precision))
    if peak is None:
        return None, Choice("not reported", f"the peak of {name} is not known")
    return peak, Choice("reported", f"of {peak / 1e12:g} TFLOP/s, the dense peak of {name}")


def _of_data(data: TaskData, recipe: Recipe) -> list[str]:
    """Return how many samples there are, and the notes on them."""
    facts = data.facts
    sizes = []
    if {"num_train", "num_eval"} <= facts.keys():
        sizes = [f"{facts['num_train']:,} samples to train on, {facts['num_eval']:,} held out"]
    counts = facts.get("num_train_of_label")
    labels = class_notes(counts) if counts else []
    if _is_regression(facts):
        labels = [f"labels: {facts['problem_type']}; no classes"]
    return [*sizes, *labels, *few_held_out(facts, recipe.data.eval), *facts.get("notes", ())]


def _is_regression(facts: Mapping[str, Any]) -> bool:
    return "problem_type" in facts and not facts.get("num_train_of_label")


def few_held_out(facts: Mapping[str, Any], own: object) -> list[str]:
    """Return a warning about too few held-out samples to measure a classifier or a regression; `own` is `data.eval`."""
    num_eval, is_labelled = facts.get("num_eval", 0), "num_train_of_label" in facts or "problem_type" in facts
    if not (is_labelled and 0 < num_eval < FEW_HELD_OUT):
        return []
    costs = "" if _is_regression(facts) else f": one more error is {1 / num_eval:.1%} of the accuracy"
    remedy = (
        "Raise data.eval_fraction, to 0.1 for example, or give data.eval" if own is None else "Give more in data.eval"
    )
    return [f"{num_eval} held-out samples are few{costs}. {remedy}"]


def describe_batch_norm(run: RunContext) -> str | None:
    """Return how the statistics of trained batch norms depend on how a step is cut; None where it is not cut."""
    processes, parts = run.accelerator.num_processes, run.sizes.gradient_accumulation_steps
    norms = trained_batch_norms(run.strategy.inner)
    is_synced = any(isinstance(each, SyncedBatchNorm) for each in norms)
    if not norms or (parts == 1 and (processes == 1 or is_synced)):
        return None
    samples = run.sizes.per_device_batch_size * (processes if is_synced else 1)
    can_sync = processes > 1 and not is_synced and run.plan.recipe.parallel.strategy == "ddp"
    remedy = ". Set parallel.sync_batch_norm true for statistics over all processes" if can_sync else ""
    return (
        f"{len(norms)} batch norms take statistics of {samples} samples, not of the {run.sizes.global_batch_size} of "
        "a step: another "
        f"number of processes or micro-batches trains differently{remedy}"
    )


def announce(run: RunContext, folder: RunFolder, setting_changes: Sequence[Change]) -> None:
    """Print every decision with its reason, write the resolved recipe, and record the start or the resume."""
    plan, point, step, observer = run.plan, run.plan.resume_point, run.state.step, run.observer
    has_finished = step >= plan.max_steps
    if not (has_finished and setting_changes):  # it would say what no step was trained with
        folder.write_text(RECIPE_FILE, format_recipe(plan.recipe, plan.choices))
    width = max(map(len, plan.choices))
    for name, choice in plan.choices.items():
        value = f"{choice.value:g}" if isinstance(choice.value, float) else str(choice.value)
        observer.note(f"{name.ljust(width)}  {value}  ({choice.reason})")
    num_parameters = whole_numel(run.strategy.parameters)
    where = f"{run.accelerator.num_processes} x {run.accelerator.device.type}"
    observer.note(f"{'model'.ljust(width)}  {num_parameters:,} trainable parameters  (on {where})")
    if (norms := describe_batch_norm(run)) is not None:
        observer.note(f"{'batch norm'.ljust(width)}  {norms}")
    for note in _of_data(plan.data, plan.recipe):
        observer.note(f"{'data'.ljust(width)}  {note}")
    if not folder.lock.value:
        observer.note(f"output_dir is not locked: {folder.lock.reason}")
    for status in point.broken:
        name = status.path.name
        message = f"{name} is not used: {status.problem}; it is now broken-{name}, to be looked at or removed"
        observer.on_event("checkpoint_invalid", status.step, message)
    if point.path is not None and point.changed:
        changed = ", ".join(point.changed)
        message = (
            f"{point.path.name}: {changed} changed since the save; weights and state are whole, so the run resumes"
        )
        observer.on_event("checkpoint_changed", step, message)
    if point.previous is not None:
        observer.note(f"what is not resumed is now in {point.previous}")
    recorded = {event.get("number") for event in read_events(folder.path)} if point.rollbacks else set()
    for rollback in point.rollbacks:
        if rollback.number not in recorded and step <= rollback.to_step:  # killed before it was an event
            message = describe(rollback, plan.recipe.guard.max_rollbacks)
            observer.on_event("rollback", rollback.at_step, message, **asdict(rollback))
    facts: dict[str, Any] = dict(launch_facts())
    if point.path is None:
        what = f"starting a new run: {'; '.join(map(str, point.changes))};" if point.changes else "starting:"
        message = f"{what} {plan.max_steps} steps of {run.sizes.global_batch_size} samples"
        observer.on_event("start", 0, message, **facts)
    else:
        message = f"resuming from {point.path.name}, at step {step} of {plan.max_steps}"
        if has_finished:
            message = f"the run has finished with step {step}: nothing is trained, and its model is loaded"
        observer.on_event("resume", step, message, **facts)
    if has_finished and setting_changes:
        kept = "; ".join(map(str, setting_changes))
        observer.note(
            f"the run has finished, and is not trained again: it keeps what was ({kept}); give another output_dir to "
            "train anew"
        )
    for change in () if has_finished else setting_changes:
        forgotten = "; what was best until then no longer counts" if change.name in OF_BEST else ""
        facts = {"setting": change.name, "was": change.was, "now": change.now}
        observer.on_event("settings_changed", step, f"{change}, from step {step + 1} on{forgotten}", **redact(facts))
    if point.changes and point.path is not None:
        changes = [str(change) for change in point.changes]
        names = [{change.was, change.now} for change in point.changes if change.name == "optimizer.name"]
        is_other = any(not each <= ALIKE for each in names)
        anew = "; the optimizer begins anew" if is_other else ""
        message = f"changed since, and accepted: {'; '.join(changes)}{anew}"
        settings = [change.name for change in point.changes]
        observer.on_event("changes_accepted", step, message, changes=changes, settings=settings)
