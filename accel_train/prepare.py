"""From a recipe to a run that is ready to train: resolve everything, check everything, then build.

What a user can have wrong is found here, in the order of what it costs to find it: recipe, launcher, data, and only then
a model is built.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray
from torch import nn

from accel_train.agreement_check import check_agreement, check_shared
from accel_train.batch_search import fit_micro_batch
from accel_train.batch_trial import Trials
from accel_train.batching import BatchSizes, resolve_batch, scale_learning_rate
from accel_train.checkpoint import read_trainer
from accel_train.compiling import compile_module
from accel_train.data.cache import DigestCheck
from accel_train.data_group import data_group, is_sharded
from accel_train.doctor import check_launcher
from accel_train.ema import WeightAverage
from accel_train.ending import exits_are_errors
from accel_train.guard import learning_rate_factor
from accel_train.health import Health
from accel_train.identity import OF_BEST, Change, run_identity, setting_changes, training_settings
from accel_train.introduction import introduce, open_observer
from accel_train.launch_environment import with_launch_environment
from accel_train.loading import choose_num_workers, choose_pin_memory
from accel_train.memory import PeakMemory
from accel_train.memory_estimate import build_without_weights
from accel_train.observe import (
    NoObserver,
    Observer,
    RunFolder,
)
from accel_train.observe.several import Several
from accel_train.optim import build_optimizer, name_parameters, set_learning_rate
from accel_train.ownership import refuse_inputs_in
from accel_train.peers import open_peers
from accel_train.precision import choose_mixed_precision, set_backends, start_accelerator, start_processes
from accel_train.preflight import check_metric_name
from accel_train.recipe import Recipe
from accel_train.redaction import remember_secrets
from accel_train.reduction import note_gradients
from accel_train.resolve import change_model, check_recipe, resolve_run
from accel_train.resume import agree_on_checkpoint
from accel_train.rollback_record import take_up
from accel_train.run import Run, make_guard
from accel_train.saver import Saver
from accel_train.schedule import make_schedule
from accel_train.sequence_parallel import attend_over_slices, choose_sequences, tell_accelerator
from accel_train.sequence_slices import in_slices
from accel_train.sharding import (
    across_machines,
    allow_sharding,
    build_for_sharding,
    choose_sharding,
    precision_when_gathered,
    processes_on_machine,
    shard_model,
    sharding_plugins,
)
from accel_train.signals import StopRequest
from accel_train.snapshot import describe_model, restore
from accel_train.state import Choice, Requests, TrainState
from accel_train.step import TrainingModule
from accel_train.task import Task, read_data
from accel_train.watchdog import Watchdog
from accel_train.zero import check_zero, wrap_in_zero


@dataclass(frozen=True)
class Extensions:
    """What a program may bring along that no recipe can say: the HF-style face is built of these."""

    observers: tuple[Observer, ...] = ()
    """Told of everything after the run's own observer, on every process."""
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    """In place of the recipe's; called with the model on its device. Its groups get `param_names` if they lack them."""
    group_learning_rates: Callable[[int], Sequence[float]] | None = None
    """The learning rate of each parameter group at a 0-based step, in place of the recipe's schedule."""
    epoch_order: Callable[[int], NDArray[np.int64]] | None = None
    """The samples of an epoch (0-based) in order, in place of ours."""
    evaluate: Callable[[], Mapping[str, float]] | None = None
    """In place of the task's evaluation: the metrics by name, the same on all processes."""
    find_unused_parameters: bool = False
    """Let DDP look for parameters that took no part in a step, which costs a walk through the graph; else it fails there."""
    owns_process: bool = False
    """This process is there for the run alone, and may be ended where it hangs; of several processes each is."""
    requests: Requests | None = None
    """What observers ask of the loop. With it the host waits for every step, so that they see a step before the next begins."""


def prepare_run(
    recipe: Recipe, task: Task | None = None, extensions: Extensions = Extensions(), stop: StopRequest | None = None
) -> Run:
    """Resolve a recipe on this machine, load its data, build its model, and go back to its newest valid checkpoint.

    `task` takes the place of the one that the recipe names; `stop` is open already, where a signal is to be heard here, too.

    Raises:
        ValueError: the recipe, the data, the launcher or the output folder is wrong; the text says what to do.
        CheckpointError: there are checkpoints, and none is valid.
        Preempted: a signal came.
    """
    stop = StopRequest() if stop is None else stop
    with stop.preparing():
        return _prepare(recipe, task, extensions, stop)


def _prepare(recipe: Recipe, task: Task | None, extensions: Extensions, stop: StopRequest) -> Run:
    remember_secrets(recipe.model_dump())
    recipe = with_launch_environment(recipe)
    if task is None:
        task = check_recipe(recipe)
    refuse_inputs_in(Path(recipe.output_dir), _inputs(recipe))
    processes = start_processes(offloads=recipe.parallel.cpu_offload)
    check_launcher(processes.num_processes)
    sharding = choose_sharding(recipe.parallel, processes.num_processes, processes.device)
    sequences = choose_sequences(recipe.parallel, processes.num_processes)
    sizes = resolve_batch(recipe.batch, processes.num_processes, recipe.parallel.num_sharing, recipe.parallel.shared_by)
    precision = choose_mixed_precision(recipe.precision, processes.device)
    check_zero(recipe, precision.value)
    gathered = precision_when_gathered(recipe.parallel, sharding.value, precision)
    choices: dict[str, Choice[Any]] = {"precision.mixed_precision": gathered}
    choices |= set_backends(recipe.precision, precision.value, processes.device)
    if recipe.parallel.strategy != "ddp":
        told = across_machines(recipe.parallel, processes_on_machine(processes.num_processes))
        choices["parallel"] = sharding if told is None else replace(sharding, reason=f"{sharding.reason}; {told}")
    choices |= {"parallel.sp_size": sequences} if sequences.value > 1 else {}
    plugins = sharding_plugins(recipe.parallel, sharding.value, processes.num_processes, precision.value)
    if plugins:
        allow_sharding(processes.device)
    accelerator = start_accelerator(precision.value, recipe.precision, recipe.guard, sizes, processes.device, plugins)
    tell_accelerator(accelerator, sequences.value)
    with ExitStack() as resources, exits_are_errors():
        watchdog = open_watchdog(recipe, accelerator, extensions, stop)
        if watchdog is not None:
            resources.enter_context(watchdog)
        folder = RunFolder(Path(recipe.output_dir)) if accelerator.is_main_process else None
        if folder is not None:
            folder.check()
        hold = partial(hold_run_folder, resources, accelerator, folder)
        run = _build(recipe, task, accelerator, sizes, choices, extensions, hold)
        check_metric_name(run)
        own = open_observer(run, folder) if folder is not None else run.observer
        run.observer = resources.enter_context(Several((own, *extensions.observers)) if extensions.observers else own)
        if folder is not None:
            introduce(run, folder)
        run.stop, run.watchdog = stop, watchdog
        if run.data.large_files and accelerator.is_local_main_process:
            run.digest_check = DigestCheck(run.data.large_files)
            resources.callback(run.digest_check.stop)
        if watchdog is not None:
            watchdog.record = None if folder is None else folder.append_event
            resources.push(watchdog.note_end)  # called first: what is closed after it may take its time
        run.resources = resources.pop_all()
        return run


def _inputs(recipe: Recipe) -> dict[str, str]:
    """What a recipe reads, by the name of the setting."""
    tokenizer = recipe.tokenizer_in_use
    found = {
        "model.pretrained": recipe.model.pretrained,
        "tokenizer": tokenizer if isinstance(tokenizer, str) else None,
    }
    for name, value in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        values = (value,) if isinstance(value, str) else value or ()
        found |= {name if len(values) == 1 else f"{name}[{index}]": each for index, each in enumerate(values)}
    return {name: value for name, value in found.items() if value}


def hold_run_folder(resources: ExitStack, accelerator: Accelerator, folder: RunFolder | None) -> None:
    """Open the run folder on the main process until the run ends; what is wrong with it is raised on all of them.

    Raises:
        ValueError: as `RunFolder`.
    """
    problem: list[ValueError | None] = [None]
    if folder is not None:
        try:
            resources.enter_context(folder)
        except ValueError as error:
            problem[0] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]


def open_watchdog(
    recipe: Recipe, accelerator: Accelerator, extensions: Extensions, stop: StopRequest
) -> Watchdog | None:
    """The watchdog of this process, or none where it is not for a run to end it (a notebook)."""
    if accelerator.num_processes == 1 and not extensions.owns_process:
        return None
    peers = open_peers(accelerator.process_index, accelerator.num_processes)
    return Watchdog(stop, Path(recipe.output_dir), recipe.guard.hang_timeout_seconds, peers)


def _build(
    recipe: Recipe,
    task: Task,
    accelerator: Accelerator,
    sizes: BatchSizes,
    choices: dict[str, Choice[Any]],
    extensions: Extensions,
    hold: Callable[[], None],
) -> Run:
    device = accelerator.device
    data = read_data(task, recipe, progress=accelerator.is_main_process)
    check_agreement(recipe, data, accelerator.num_processes)
    data = in_slices(data, data_group(accelerator))
    resolved = resolve_run(recipe, data, sizes, extensions.epoch_order)
    steps, order = resolved.steps, resolved.order
    workers = choose_num_workers(recipe.data.num_workers, data, accelerator.num_processes)
    pin = choose_pin_memory(recipe.data.pin_memory, device)
    identity = run_identity(recipe, data, sizes, steps)
    hold()  # data that cannot be read leave no folder behind; and nothing of the folder is read before it is held
    check_shared(Path(recipe.output_dir), accelerator.num_processes)
    found = agree_on_checkpoint(recipe, accelerator, identity)

    torch.manual_seed(recipe.seed)  # the same first weights on every process

    changes: dict[str, Choice[Any]] = {}

    def build_model() -> nn.Module:
        model, changed = change_model(recipe, task.build_model(recipe, data))
        changes.update(changed)
        return model

    def build_empty() -> nn.Module:
        with torch.device("meta"):
            return change_model(recipe, build_without_weights(recipe, task, data))[0]

    weights = None
    sharded = is_sharded(accelerator)
    model, weights = build_for_sharding(accelerator, build_model, build_empty) if sharded else (build_model(), None)
    inner = TrainingModule(model, task)
    if not sharded:
        inner.model.to(device)
    fitted = fit_micro_batch(Trials(recipe, task, data, inner, accelerator, build_empty), sizes)
    sizes = fitted.sizes
    attend_over_slices(accelerator, inner.model)
    peak = scale_learning_rate(recipe.optimizer.learning_rate, recipe.optimizer.lr_scaling, sizes)
    choices |= changes | fitted.choices
    choices |= {
        "batch": Choice(sizes.global_batch_size, sizes.reason),
        "optimizer.learning_rate": peak,
        "schedule.max_steps": Choice(steps.max_steps, steps.max_steps_reason),
        "schedule.warmup_steps": Choice(steps.warmup_steps, steps.warmup_reason),
        "data.num_workers": workers,
        "data.pin_memory": pin,
        "precision.compile": compile_module(inner, recipe.precision.compile),
    }
    # Batch-norm statistics are kept the same on all processes; other buffers do not change, and need no broadcast.
    accelerator.ddp_handler.broadcast_buffers = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in inner.modules()
    )
    build = extensions.build_optimizer or (lambda model: build_optimizer(model, recipe.optimizer, device))
    asked = recipe.parallel.find_unused_parameters is True or extensions.find_unused_parameters
    accelerator.ddp_handler.find_unused_parameters = asked
    if sharded:
        module: nn.Module = inner
        choices["parallel.wrapped"] = shard_model(accelerator, inner, weights)
        del weights
    optimizer = name_parameters(build(inner.model), inner.model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    flops_per_target = task.flops_per_target(recipe, inner.model)
    zero = None
    if recipe.parallel.strategy == "deepspeed" and accelerator.num_processes > 1:
        module, zero = wrap_in_zero(accelerator, inner, optimizer, recipe.parallel.zero_stage)
    with warnings.catch_warnings():
        # Accelerate hands it to DDP by this name, which torch is about to rename.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
        if not sharded and zero is None:
            module, prepared = accelerator.prepare(inner, optimizer)
            optimizer = prepared.optimizer  # the wrapper costs 70 us a step, and hides a skipped step from the kernel
    average = None
    if recipe.optimizer.ema_decay is not None:
        trained = [(name, parameter) for name, parameter in inner.model.named_parameters() if parameter.requires_grad]
        average = WeightAverage(trained, recipe.optimizer.ema_decay)
    own_rates = extensions.group_learning_rates
    settings = training_settings(recipe, choices, None if own_rates is None else optimizer.param_groups)
    state, changed_settings = TrainState(), list[Change]()
    if found.path is not None:
        parts = None if zero is None else zero.parts
        state = restore(found.path, inner.model, optimizer, accelerator, average, parts)
        if state.step < steps.max_steps:
            changed_settings = setting_changes(read_trainer(found.path), settings)
        if any(change.name in OF_BEST for change in changed_settings):
            state.best_metric, state.best_step, state.evaluations_without_improvement = None, None, 0
    take_up(state, found.rollbacks)
    multiplier = make_schedule(recipe.schedule, steps.max_steps, steps.warmup_steps)

    def set_rates(step: int) -> float:
        rate = peak.value * multiplier(step) if own_rates is None else own_rates(step)
        if run.state.rollbacks and isinstance(rate, float):
            rate *= learning_rate_factor(step + 1, run.state.rollbacks)
        return set_learning_rate(optimizer, rate)

    checkpoints = Path(recipe.output_dir) / "checkpoints"
    run = Run(
        recipe=recipe,
        output_dir=Path(recipe.output_dir),
        accelerator=accelerator,
        task=task,
        data=data,
        sizes=sizes,
        order=order,
        steps=steps,
        choices=choices,
        identity=identity,
        module=module,
        inner=inner,
        optimizer=optimizer,
        parameters=parameters,
        zero=zero,
        flops_per_target=flops_per_target,
        set_learning_rate=set_rates,
        average=average,
        description=describe_model(task, inner.model, data) if accelerator.is_main_process else {},
        num_workers=workers.value,
        pin_memory=pin.value,
        state=state,
        guard=make_guard(recipe, state, steps),
        saver=Saver(checkpoints, in_background=recipe.checkpoint.in_background),
        health=Health(
            checkpoints if accelerator.is_main_process else None, recipe.guard.healthy_after_steps, state.last_incident
        ),
        observer=NoObserver(),
        memory=PeakMemory(device),
        resources=ExitStack(),
        found=found,
        settings=settings,
        setting_changes=changed_settings,
        remembered=fitted.remembered,
        evaluate=extensions.evaluate,
        requests=extensions.requests,
        saving_group=dist.new_group(backend="gloo") if sharded else None,
        reduction=note_gradients(module, inner, num_sharing=data_group(accelerator).num_sharing),
    )
    return run
