"""Who watches a run, and what is said when it begins: ledger, progress bar, trackers, choices, the start or the resume."""

from dataclasses import asdict

import torch

from accel_train.identity import OF_BEST
from accel_train.observe import (
    Meter,
    Progress,
    RunFolder,
    RunObserver,
    Trackers,
    peak_flops,
)
from accel_train.observe.ledger import RECIPE_FILE, read_events
from accel_train.recipe_writing import format_recipe
from accel_train.redaction import redact
from accel_train.rollback_record import describe
from accel_train.run import Run
from accel_train.state import Choice
from accel_train.task import TARGET_UNITS
from accel_train.zero_parts import whole_numel


def open_observer(run: Run, folder: RunFolder) -> RunObserver:
    """Ledger, progress bar and trackers of the main process, behind one observer."""
    recipe, state = run.recipe, run.state
    folder.rewind(state.step, evaluated=not state.evaluation_owed and state.step < run.max_steps)
    peak = device_peak(run)
    targets = TARGET_UNITS.get(recipe.task, "targets")
    return RunObserver(
        folder,
        Progress(
            recipe.log.progress,
            total_steps=run.max_steps,
            initial_step=state.step,
            targets=targets,
        ),
        Trackers(
            run.accelerator,
            recipe.log.trackers,
            project=recipe.log.project,
            run_name=run.output_dir.name,
            config=redact(recipe.model_dump()),
            logging_dir=run.output_dir,
            initial_step=state.step,
        ),
        Meter(
            flops_per_token=run.flops_per_target,
            peak_flops=peak and peak * run.accelerator.num_processes,
            train_seconds=state.train_seconds,
        ),
        log_every_steps=recipe.log.every_steps,
        total_steps=run.max_steps,
        samples_per_step=run.sizes.global_batch_size,
        num_samples_per_epoch=run.order.steps_per_epoch * run.sizes.global_batch_size,
        targets=targets,
    )


def device_peak(run: Run) -> float | None:
    """FLOP/s of one device in this run's precision; where it is not known the choices say that there is no MFU, and why."""
    device = run.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision = run.choices["precision.mixed_precision"].value
    is_tf32 = "precision.tf32" in run.choices and run.choices["precision.tf32"].value
    peak = peak_flops(name, precision if precision != "no" else "tf32" if is_tf32 else "fp32")
    if peak is None:
        run.choices["mfu"] = Choice("not reported", f"the peak of {name} is not known")
    else:
        run.choices["mfu"] = Choice("reported", f"of {peak / 1e12:g} TFLOP/s, the dense peak of {name}")
    return peak


def introduce(run: Run, folder: RunFolder) -> None:
    """Say what was decided, and why; write the resolved recipe; note the start or the resume."""
    folder.write_text(RECIPE_FILE, format_recipe(run.recipe, run.choices))
    width = max(map(len, run.choices))
    for name, choice in run.choices.items():
        value = f"{choice.value:g}" if isinstance(choice.value, float) else str(choice.value)
        run.observer.note(f"{name.ljust(width)}  {value}  ({choice.reason})")
    num_parameters = whole_numel(run.parameters)
    where = f"{run.accelerator.num_processes} x {run.accelerator.device.type}"
    run.observer.note(f"{'model'.ljust(width)}  {num_parameters:,} trainable parameters  (on {where})")
    if not folder.lock.value:
        run.observer.note(f"output_dir is not locked: {folder.lock.reason}")
    for status in run.found.broken:
        said = f"{status.path.name} is not used: {status.problem}; it is now broken-{status.path.name}, to be looked at or removed"
        run.observer.on_event("checkpoint_invalid", status.step, said)
    if run.found.previous is not None:
        run.observer.note(f"what is not gone on from is now in {run.found.previous}")
    told = {event.get("number") for event in read_events(folder.path)} if run.found.rollbacks else set()
    for rollback in run.found.rollbacks:
        if rollback.number not in told and run.state.step <= rollback.to_step:  # killed before it could say so
            said = describe(rollback, run.recipe.guard.max_rollbacks)
            run.observer.on_event("rollback", rollback.at_step, said, **asdict(rollback))
    if run.found.path is None:
        run.observer.on_event("start", 0, f"starting: {run.max_steps} steps of {run.sizes.global_batch_size} samples")
    else:
        run.observer.on_event(
            "resume",
            run.state.step,
            f"going on from {run.found.path.name}, at step {run.state.step} of {run.max_steps}",
        )
    for change in run.setting_changes:
        forgotten = "; what was best until then no longer counts" if change.name in OF_BEST else ""
        said = f"{change}, from step {run.state.step + 1} on{forgotten}"
        facts = {"setting": change.name, "was": change.was, "now": change.now}
        run.observer.on_event("settings_changed", run.state.step, said, **redact(facts))
    if run.found.changes:
        changes = [str(change) for change in run.found.changes]
        run.observer.on_event(
            "changes_accepted", run.state.step, f"changed since, and accepted: {'; '.join(changes)}", changes=changes
        )
