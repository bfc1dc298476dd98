"""Turn a recipe into a run that is ready to train: resolve and check everything, then build."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from accel_train.checkpoint.fingerprint import digest_of_recipe, run_identity
from accel_train.checkpoint.resume import BY_ITSELF, ResumePoint, agree_on_checkpoint, read_state
from accel_train.checkpoint.weight_files import check_pretrained
from accel_train.core.errors import SettingError
from accel_train.core.json_io import read_json
from accel_train.core.ownership import RUN_NAMES
from accel_train.core.redaction import remember_secrets
from accel_train.core.state import Choice, Choices, JsonRecord
from accel_train.data.batch_sizes import BatchSizes, resolve_batch
from accel_train.data.digest import digest_of_code
from accel_train.engine.compilation import Machine, choose_compile, spare_bytes, with_compile
from accel_train.engine.loader import choose_reading
from accel_train.engine.mixed_order import MixedOrder
from accel_train.engine.mixture import SourceCounts
from accel_train.engine.resolve import check_recipe, resolve_run
from accel_train.engine.run import Extensions, RunContext, RunPlan
from accel_train.model.kernels.frozen import choose_frozen_dtype
from accel_train.observe.goodput import LaunchClock
from accel_train.observe.run_folder import SUMMARY_FILE
from accel_train.optim.custom import try_custom
from accel_train.optim.muon import choose_dtype
from accel_train.parallel.compatibility import check_compatibility
from accel_train.parallel.dims import across_machines, choose_sequences, processes_on_machine
from accel_train.parallel.fsdp2 import allow_sharding
from accel_train.parallel.precision import agree_on_mixed_precision, set_backends, start_accelerator
from accel_train.parallel.sequence_parallel import in_slices, tell_accelerator
from accel_train.parallel.strategies import open_strategy
from accel_train.parallel.strategy import Strategy
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import check_spec
from accel_train.runtime.consistency import check_agreement, check_shared
from accel_train.runtime.doctor import check_launcher, idle_gpus
from accel_train.runtime.exit import exits_are_errors
from accel_train.runtime.heartbeat import open_heartbeats
from accel_train.runtime.launch_environment import describe_launch, with_launch_environment
from accel_train.runtime.launcher import take_age_seconds
from accel_train.runtime.process_group import on_main, start_processes
from accel_train.runtime.signals import StopRequest
from accel_train.runtime.watchdog import Watchdog
from accel_train.task import Task, load_function, read_data, with_data_of
from accel_train.training.build import build_run, settings_of
from accel_train.training.callbacks import with_callbacks
from accel_train.training.model_selection import check_metric_name
from accel_train.training.output import FolderOutput, Output
from accel_train.training.trial import check_lone_samples, check_sums


def prepare_run(
    recipe: Recipe, task: Task | None = None, extensions: Extensions | None = None, stop: StopRequest | None = None
) -> RunContext:
    """Plan a run on this machine, load its data, build its model, and restore its newest valid checkpoint.

    Args:
        task: replaces the recipe's task.
        stop: an already open stop request, if signals are to be caught before this call.

    Raises:
        ValueError: the recipe, the data, the launcher, or the output folder is wrong. The message names the fix.
        CheckpointError: checkpoints exist, but all are invalid.
        Preempted: a signal asked the run to stop.
    """
    stop = StopRequest() if stop is None else stop
    with stop.preparing():
        if not torch.is_grad_enabled():
            problem = "gradients are off here (torch.no_grad or inference_mode)"
            raise SettingError(problem, "Train outside of that context")
        clock = LaunchClock(take_age_seconds())
        extensions = with_callbacks(recipe, extensions or Extensions())
        remember_secrets(recipe.model_dump())
        recipe = with_launch_environment(recipe)
        if task is None:
            recipe, task = check_recipe(recipe)
        else:
            recipe = with_data_of(task, recipe)
            check_spec(recipe, task.spec)
        refuse_inputs_in_output(recipe)
        strategy, sizes, choices = open_processes(recipe, task)
        accelerator = strategy.accelerator
        with ExitStack() as resources, exits_are_errors():
            watchdog = extensions.watchdog or open_watchdog(recipe, accelerator, extensions, stop, resources)
            is_main, num_processes = accelerator.is_main_process, accelerator.num_processes
            output = resources.enter_context(FolderOutput(recipe, clock, num_processes) if is_main else Output())
            # A module that exists without transformers' masks does not use them. Importing them takes a second.
            if not isinstance(getattr(task, "module", None), nn.Module) or "transformers.masking_utils" in sys.modules:
                from accel_train.model.kernels.attention import masks_without_reading

                resources.enter_context(masks_without_reading())
            with clock.inside("data_preparation"):
                plan = plan_run(recipe, task, strategy, sizes, choices, extensions)
            # Lock after the data is read, so that unreadable data leaves no folder behind. Read the folder after the
            # lock.
            on_main(output.open)
            check_shared(plan.output_dir, num_processes)
            settings, first_fingerprint = settings_of(plan), plan.data.first_fingerprint
            point = agree_on_checkpoint(recipe, accelerator, plan.identity, settings, first_fingerprint)
            plan = replace(plan, resume_point=point)
            finished = on_main(lambda: finished_before(plan))
            if finished is None:
                output.record_launch()
                # A checkpoint has the weights of a resume, or the digests of its frozen base.
                if point.path is None and (pretrained := recipe.model.pretrained) is not None:
                    on_main(lambda: check_pretrained(pretrained))
            resources.callback(strategy.close)
            run = build_run(plan, strategy, stop, watchdog)
            if finished is not None and not run.changes:
                output.be_silent()
                run.finished, run.resources = finished, resources.pop_all()
                return run
            output.record_launch()
            check_metric_name(run)
            check_lone_samples(run)
            check_sums(run)
            output.start(run)
            if run.digest_check is not None:
                resources.callback(run.digest_check.stop)
            watchdog.record = output.append_event
            resources.push(watchdog.note_end)  # pushed last, so called first: later closes may be slow
            stop.raise_if_requested()  # inside `resources`, so the watchdog closes and informs the other processes
            run.resources = resources.pop_all()
            return run


def finished_before(plan: RunPlan) -> JsonRecord | None:
    """Return the contents of summary.json if this run has finished in this folder with the same recipe; else None."""
    point, folder = plan.resume_point, plan.output_dir
    # The Trainer's callbacks and a program's observers expect a run.
    if point.path is None or point.broken or point.changes or plan.extensions.observers:
        return None
    if plan.recipe.checkpoint.resume not in BY_ITSELF:
        return None
    state = read_state(point.path)
    if state.evaluation_owed or not (state.stopped_early or state.step >= plan.max_steps):
        return None
    try:
        summary = read_json(folder / SUMMARY_FILE)
    except (OSError, ValueError):
        return None
    # The recipe in the folder may be of a later start, which was killed before its own end.
    ended_as = state.step, digest_of_recipe(plan.given)
    is_same = isinstance(summary, dict) and (summary.get("steps"), summary.get("recipe_digest")) == ended_as
    return summary if is_same and (folder / "model").is_dir() else None


def open_watchdog(
    recipe: Recipe, accelerator: Accelerator, extensions: Extensions, stop: StopRequest, resources: ExitStack
) -> Watchdog:
    """Return the watchdog of this process. It stays closed and does nothing if a run must not kill it (a notebook)."""
    is_alone = accelerator.num_processes == 1
    heartbeats = None if is_alone else open_heartbeats(accelerator.process_index, accelerator.num_processes)
    watchdog = Watchdog(stop, Path(recipe.output_dir), recipe.guard.hang_timeout_seconds, heartbeats)
    return watchdog if is_alone and not extensions.owns_process else resources.enter_context(watchdog)


def refuse_inputs_in_output(recipe: Recipe) -> None:
    """Refuse a run whose output folder holds what it reads.

    Raises:
        ValueError: names the setting and the folder.
    """
    output_dir = Path(recipe.output_dir)
    root = output_dir.resolve()
    for setting, value in recipe.inputs():
        path = Path(value.split("*")[0].split("?")[0].split("[")[0])
        if not path.exists() and path == Path(value):
            # The name of a model or data set.
            continue
        path = path.resolve()
        if path.is_relative_to(root) and path != root and path.relative_to(root).parts[0] in RUN_NAMES:
            raise ValueError(
                f"{setting}={value} lies in output_dir={output_dir}, where this run would replace it. Give another "
                "output_dir."
            )


def open_processes(recipe: Recipe, task: Task) -> tuple[Strategy, BatchSizes, Choices]:
    """Join the processes of the run; return its strategy with an Accelerator, its batch sizes, and what was chosen for
    the user.

    Raises:
        ValueError: the recipe does not fit the number of processes, or the device.
    """
    section = recipe.parallel
    processes = start_processes(offloads=section.cpu_offload, uses_gloo=section.strategy == "fsdp2")
    num_processes, device = processes.num_processes, processes.device
    check_launcher(num_processes)
    strategy = open_strategy(section, num_processes, device)
    sequences = choose_sequences(section, num_processes)
    sizes = resolve_batch(recipe.batch, num_processes, section.num_sharing, section.shared_by)
    precision = agree_on_mixed_precision(recipe.precision, device, num_processes)
    check_compatibility(recipe, task, precision.value, sizes.gradient_accumulation_steps)
    try_custom(recipe.optimizer, device, is_sharded=section.strategy == "fsdp2" and num_processes > 1)
    choices: Choices = {
        "precision.mixed_precision": strategy.precision(precision),
        **set_backends(recipe.precision, precision.value, device),
        **describe_launch(recipe),
    }
    if (idle := idle_gpus(device, num_processes)) is not None:
        choices["gpus"] = idle
    if recipe.optimizer.name == "muon":
        choices["optimizer.muon_dtype"] = choose_dtype(recipe.optimizer, precision.value, device.type)
    if (kept := choose_frozen_dtype(recipe, precision.value, device.type)) is not None:
        choices["model.frozen_dtype"] = kept
    if section.strategy != "ddp":
        machines = across_machines(section, processes_on_machine(num_processes))
        reason = strategy.choice.reason if machines is None else f"{strategy.choice.reason}; {machines}"
        choices["parallel"] = replace(strategy.choice, reason=reason)
    if sequences.value > 1:
        choices["parallel.sp_size"] = sequences
    plugins = strategy.accelerator_arguments(num_processes, precision.value)
    if plugins:
        allow_sharding(device)
    accelerator = start_accelerator(precision.value, recipe.precision, recipe.guard, sizes, device, plugins)
    tell_accelerator(accelerator, sequences.value)
    strategy.attach(accelerator)
    return strategy, sizes, choices


def plan_run(
    recipe: Recipe, task: Task, strategy: Strategy, sizes: BatchSizes, choices: Choices, extensions: Extensions
) -> RunPlan:
    """Read the data, and decide how long the run is, in which order it reads, and what makes it the same run on a
    resume.

    Raises:
        ValueError: the data is wrong, does not fit the recipe, or is not the same on all processes.
    """
    accelerator = strategy.accelerator
    # Measured on one process, so that all of them go on, or none does.
    proved = on_main(lambda: task.prove(recipe))
    data = read_data(task, recipe, progress=accelerator.is_main_process)
    if ":" in recipe.task and not type(task).__module__.startswith("accel_train."):
        data = replace(data, inputs={**data.inputs, "task": digest_of_code(type(task))})
    if ":" in recipe.schedule.type:
        curve = load_function("schedule.type", recipe.schedule.type, "(t, span, schedule)")
        data = replace(data, inputs={**data.inputs, "curve of the rate": digest_of_code(curve)})
    # Code may hold a process's own rank: the main process's digests count.
    inputs = data.inputs
    data = replace(data, inputs=on_main(lambda: inputs))
    check_agreement(recipe, data, accelerator.num_processes)
    data = in_slices(data, strategy.dims)
    steps, order, rate = resolve_run(recipe, data, sizes, extensions.epoch_order)
    if isinstance(order, MixedOrder) and task.counts_sources and not data.max_broken:
        task.counted = SourceCounts(2 * len(order.sources))
    context = extensions.reading.get("multiprocessing_context")
    method = context if context is None or isinstance(context, str) else context.get_start_method()
    reading, reading_choices = choose_reading(recipe.data, data, accelerator, method)
    # A little less time than a step may take, so that what hangs is named.
    reading = replace(reading, timeout_seconds=0.8 * recipe.guard.hang_timeout_seconds, **extensions.reading)
    choices |= {
        "schedule.max_steps": Choice(steps.max_steps, steps.max_steps_reason),
        "schedule.warmup_steps": Choice(steps.warmup_steps, steps.warmup_reason),
        **reading_choices,
        **proved,
    }
    if recipe.loads_best_model and recipe.checkpoint.load_best_model_at_end == "auto":
        choices["checkpoint.load_best_model_at_end"] = Choice(
            True, "early stopping is on: its last weights are never the best"
        )
    identity, given = run_identity(recipe, data, sizes, steps), recipe
    machine = Machine.here(accelerator.device, choices["precision.mixed_precision"].value)
    if recipe.precision.compile == "auto":
        auto = on_main(lambda: choose_compile(given, task, data, sizes, steps.max_steps, machine))
        choices["precision.compile"], recipe = auto, with_compile(recipe, auto.value)
    compiled = recipe
    task.spare_bytes = on_main(lambda: spare_bytes(compiled, task, data, sizes, machine))
    plan = RunPlan(
        recipe, given, task, data, order, steps, rate, sizes, reading, identity, choices, extensions, ResumePoint(None)
    )
    if plan.evaluates_untrained and recipe.evaluate.at_start == "auto":
        plan = plan.with_choices({"evaluate.at_start": Choice(True, "the untrained model is a baseline of this task")})
    return plan
