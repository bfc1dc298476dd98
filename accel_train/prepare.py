"""From a recipe to a run that is ready to train: resolve everything, check everything, then build.

What a user can have wrong is found here, in the order of what it costs to find it: recipe, launcher, data, and only then
a model is built.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_train.batching import BatchSizes, resolve_batch, scale_learning_rate
from accel_train.compiling import compile_module
from accel_train.doctor import check_launcher
from accel_train.loading import choose_num_workers, choose_pin_memory
from accel_train.memory import PeakMemory
from accel_train.model_check import check_model_config
from accel_train.observe import (
    Meter,
    NoObserver,
    Observer,
    Progress,
    RunFolder,
    RunObserver,
    Trackers,
    check_tracker_names,
    peak_flops,
)
from accel_train.optim import build_optimizer
from accel_train.precision import choose_mixed_precision, set_backends, start_accelerator, start_processes
from accel_train.recipe import Recipe
from accel_train.recipe_writing import redact, write_recipe
from accel_train.resume import Found, agree_on_checkpoint, run_identity
from accel_train.sampling import DataOrder
from accel_train.schedule import StepPlan, make_schedule, resolve_steps
from accel_train.snapshot import restore
from accel_train.state import Choice, TrainState
from accel_train.step import TrainingModule
from accel_train.task import Task, TaskData, load_task


@dataclass
class Run:
    """One run, resolved and built: what the loop works on. Frozen in all but the counters in `state`."""

    recipe: Recipe
    output_dir: Path
    accelerator: Accelerator
    task: Task
    data: TaskData
    sizes: BatchSizes
    order: DataOrder
    steps: StepPlan
    choices: dict[str, Choice[Any]]
    identity: dict[str, Any]
    module: nn.Module
    """The training module as Accelerate wrapped it: what training forwards."""
    inner: TrainingModule
    """The training module inside the wrapper: what evaluation forwards, and what is saved."""
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    learning_rate: Callable[[int], float]
    """The learning rate of a 0-based step."""
    num_workers: int
    pin_memory: bool
    state: TrainState
    observer: Observer
    memory: PeakMemory
    resources: ExitStack
    """What is let go at the end, however it comes: folder, trackers, progress bar."""
    found: Found
    """What this sitting goes on from."""
    last_scores: dict[str, Any] = field(default_factory=dict)
    """Of the newest evaluation."""

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps.max_steps

    def evaluation_due(self) -> bool:
        """Whether to evaluate after the step just done; the end has an evaluation of its own."""
        step, every = self.state.step, self.recipe.evaluate.every_steps
        return self.data.eval is not None and every > 0 and step % every == 0 and step < self.max_steps

    def checkpoint_due(self) -> bool:
        """Whether to save after the step just done; the last step always is."""
        step, every = self.state.step, self.recipe.checkpoint.every_steps
        return step == self.max_steps or (every > 0 and step % every == 0)

    def pause_due(self) -> bool:
        """Whether something other than the next step comes now."""
        return self.evaluation_due() or self.checkpoint_due()


def prepare_run(recipe: Recipe) -> Run:
    """Resolve a recipe on this machine, load its data, build its model, and go back to its newest valid checkpoint.

    Raises:
        ValueError: the recipe, the data, the launcher or the output folder is wrong; the text says what to do.
        CheckpointError: there are checkpoints, and none is valid.
    """
    task = load_task(recipe.task)
    if recipe.task == "causal-lm":
        check_model_config(recipe)
    check_tracker_names(recipe.log.trackers)
    processes = start_processes()
    check_launcher(processes.num_processes)
    sizes = resolve_batch(recipe.batch, processes.num_processes)
    precision = choose_mixed_precision(recipe.precision, processes.device)
    choices: dict[str, Choice[Any]] = {"precision.mixed_precision": precision}
    choices |= set_backends(recipe.precision, precision.value, processes.device)
    accelerator = start_accelerator(precision.value, recipe.precision, recipe.guard, sizes, processes.device)
    with ExitStack() as resources:
        folder = resources.enter_context(RunFolder(Path(recipe.output_dir))) if accelerator.is_main_process else None
        run = _build(recipe, task, accelerator, sizes, choices)
        if folder is not None:
            run.observer = resources.enter_context(open_observer(run, folder))
            introduce(run, folder)
        run.resources = resources.pop_all()
        return run


def _build(
    recipe: Recipe,
    task: Task,
    accelerator: Accelerator,
    sizes: BatchSizes,
    choices: dict[str, Choice[Any]],
) -> Run:
    device = accelerator.device
    data = task.load_data(recipe, progress=accelerator.is_main_process)
    num_samples = len(data.train)  # type: ignore[arg-type]
    steps = resolve_steps(recipe.schedule, num_samples, sizes.global_batch_size)
    peak = scale_learning_rate(recipe.optimizer.learning_rate, recipe.optimizer.lr_scaling, sizes)
    workers = choose_num_workers(recipe.data.num_workers, data, accelerator.num_processes)
    pin = choose_pin_memory(recipe.data.pin_memory, device)
    identity = run_identity(recipe, data, sizes, steps)
    found = agree_on_checkpoint(recipe, accelerator, identity)

    torch.manual_seed(recipe.seed)  # the same first weights on every process
    inner = TrainingModule(task.build_model(recipe, data), task)
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
    optimizer = build_optimizer(inner.model.to(device), recipe.optimizer, device)
    module, prepared = accelerator.prepare(inner, optimizer)
    optimizer = prepared.optimizer  # the wrapper costs 70 us a step, and hides a skipped step from the kernel
    state = restore(found.path, inner.model, optimizer, accelerator) if found.path is not None else TrainState()
    multiplier = make_schedule(recipe.schedule, steps.max_steps, steps.warmup_steps)
    return Run(
        recipe=recipe,
        output_dir=Path(recipe.output_dir),
        accelerator=accelerator,
        task=task,
        data=data,
        sizes=sizes,
        order=DataOrder(num_samples, sizes.global_batch_size, recipe.seed, recipe.data.shuffle),
        steps=steps,
        choices=choices,
        identity=identity,
        module=module,
        inner=inner,
        optimizer=optimizer,
        parameters=[parameter for group in optimizer.param_groups for parameter in group["params"]],
        learning_rate=lambda step: peak.value * multiplier(step),
        num_workers=workers.value,
        pin_memory=pin.value,
        state=state,
        observer=NoObserver(),
        memory=PeakMemory(device),
        resources=ExitStack(),
        found=found,
    )


def open_observer(run: Run, folder: RunFolder) -> RunObserver:
    """Ledger, progress bar and trackers of the main process, behind one observer."""
    recipe, state = run.recipe, run.state
    folder.rewind(state.step)
    peak = device_peak(run)
    return RunObserver(
        folder,
        Progress(recipe.log.progress, total_steps=run.max_steps, initial_step=state.step),
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
            flops_per_token=run.task.flops_per_target(recipe, run.inner.model),
            peak_flops=peak and peak * run.sizes.world_size,
            train_seconds=state.train_seconds,
        ),
        log_every_steps=recipe.log.every_steps,
        total_steps=run.max_steps,
        samples_per_step=run.sizes.global_batch_size,
        num_samples_per_epoch=run.order.num_samples,
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
    write_recipe(run.recipe, folder.path / "recipe.yaml", run.choices)
    width = max(map(len, run.choices))
    for name, choice in run.choices.items():
        value = f"{choice.value:g}" if isinstance(choice.value, float) else str(choice.value)
        run.observer.note(f"{name.ljust(width)}  {value}  ({choice.reason})")
    num_parameters = sum(parameter.numel() for parameter in run.parameters)
    where = f"{run.sizes.world_size} x {run.accelerator.device.type}"
    run.observer.note(f"{'model'.ljust(width)}  {num_parameters:,} trainable parameters  (on {where})")
    if not folder.lock.value:
        run.observer.note(f"output_dir is not locked: {folder.lock.reason}")
    for status in run.found.broken:
        run.observer.on_event("checkpoint_invalid", status.step, f"{status.path.name} is not used: {status.problem}")
    if run.found.path is None:
        run.observer.on_event("start", 0, f"starting: {run.max_steps} steps of {run.sizes.global_batch_size} samples")
    else:
        run.observer.on_event(
            "resume",
            run.state.step,
            f"going on from {run.found.path.name}, at step {run.state.step} of {run.max_steps}",
        )
