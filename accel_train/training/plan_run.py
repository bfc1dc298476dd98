"""Decide what a run is before its model is built: processes, sizes, data, steps and their order.

What a user can have wrong is found here, in the order of what it costs to find it: recipe, launcher, data.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_train.checkpoint.fingerprint import run_identity
from accel_train.checkpoint.resume import ResumePoint
from accel_train.core.ownership import refuse_inputs_in
from accel_train.core.state import Choice
from accel_train.data.batch_sizes import BatchSizes, resolve_batch
from accel_train.data.digest import digest_of_code
from accel_train.engine.loader import choose_reading
from accel_train.engine.resolve import resolve_run
from accel_train.engine.run_plan import Extensions, RunPlan
from accel_train.model.kernels.frozen import choose_frozen_dtype
from accel_train.optim.custom import try_custom
from accel_train.parallel.compatibility import check_compatibility
from accel_train.parallel.dims import across_machines, choose_sequences, processes_on_machine
from accel_train.parallel.fsdp2 import allow_sharding
from accel_train.parallel.precision import agree_on_mixed_precision, set_backends, start_accelerator
from accel_train.parallel.sequence_parallel import in_slices, tell_accelerator
from accel_train.parallel.strategies import open_strategy
from accel_train.parallel.strategy import Strategy
from accel_train.recipe.schema import Recipe
from accel_train.runtime.consistency import check_agreement
from accel_train.runtime.doctor import check_launcher, idle_gpus
from accel_train.runtime.process_group import on_main, start_processes
from accel_train.task import Task, prove_forward, read_data

Choices = dict[str, Choice[Any]]


def refuse_inputs_in_output(recipe: Recipe) -> None:
    """Refuse a run whose output folder holds what it reads.

    Raises:
        ValueError: names the setting and the folder.
    """
    tokenizer = recipe.tokenizer_in_use
    inputs = {
        "model.pretrained": recipe.model.pretrained,
        "tokenizer": tokenizer if isinstance(tokenizer, str) else None,
    }
    for name, value in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        values = (value,) if isinstance(value, str) else value or ()
        inputs |= {name if len(values) == 1 else f"{name}[{index}]": each for index, each in enumerate(values)}
    refuse_inputs_in(Path(recipe.output_dir), {name: value for name, value in inputs.items() if value})


def open_processes(recipe: Recipe, task: Task) -> tuple[Strategy, BatchSizes, Choices]:
    """Join the processes of the run; return its strategy with an Accelerator, its batch sizes, and what was chosen for
    the user.

    Raises:
        ValueError: the recipe does not fit the number of processes, or the device.
    """
    section = recipe.parallel
    processes = start_processes(offloads=section.cpu_offload)
    num_processes, device = processes.num_processes, processes.device
    check_launcher(num_processes)
    strategy = open_strategy(section, num_processes, device)
    sequences = choose_sequences(section, num_processes)
    sizes = resolve_batch(recipe.batch, num_processes, section.num_sharing, section.shared_by)
    precision = agree_on_mixed_precision(recipe.precision, device, num_processes)
    check_compatibility(recipe, task, precision.value)
    try_custom(recipe.optimizer, device, is_sharded=section.strategy == "fsdp2" and num_processes > 1)
    choices: Choices = {
        "precision.mixed_precision": strategy.precision(precision),
        **set_backends(recipe.precision, precision.value, device),
    }
    if (idle := idle_gpus(device, num_processes)) is not None:
        choices["gpus"] = idle
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
    proved = on_main(lambda: prove_forward(task, recipe))
    data = read_data(task, recipe, progress=accelerator.is_main_process)
    if ":" in recipe.task and not type(task).__module__.startswith("accel_train."):
        data = replace(data, inputs={**data.inputs, "task": digest_of_code(type(task))})
    # Code may hold a process's own rank: the main process's digests count.
    inputs = data.inputs
    data = replace(data, inputs=on_main(lambda: inputs))
    check_agreement(recipe, data, accelerator.num_processes)
    data = in_slices(data, strategy.dims)
    steps, order = resolve_run(recipe, data, sizes, extensions.epoch_order)
    reading, reading_choices = choose_reading(recipe.data, data, accelerator)
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
    identity = run_identity(recipe, data, sizes, steps)
    return RunPlan(recipe, task, data, order, steps, sizes, reading, identity, choices, extensions, ResumePoint(None))
