"""From a recipe to a run that is ready to train: resolve everything, check everything, then build.

What a user can have wrong is found here, in the order of what it costs to find it: recipe, launcher, data, and only then
a model is built.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import nn

from accel_train.agreement_check import check_agreement
from accel_train.batch_record import Remembered
from accel_train.batch_search import fit_micro_batch
from accel_train.batch_trial import Trials
from accel_train.batching import BatchSizes, resolve_batch, scale_learning_rate
from accel_train.compiling import compile_module
from accel_train.doctor import check_launcher
from accel_train.ema import WeightAverage
from accel_train.guard import Ladder, learning_rate_factor
from accel_train.health import Health
from accel_train.identity import run_identity
from accel_train.launch_environment import with_launch_environment
from accel_train.loading import choose_num_workers, choose_pin_memory
from accel_train.memory import PeakMemory
from accel_train.memory_estimate import build_without_weights
from accel_train.observe import (
    Meter,
    NoObserver,
    Observer,
    Progress,
    RunFolder,
    RunObserver,
    Trackers,
    peak_flops,
)
from accel_train.observe.ledger import read_events
from accel_train.observe.several import Several
from accel_train.optim import build_optimizer, name_parameters, set_learning_rate
from accel_train.peers import open_peers
from accel_train.precision import choose_mixed_precision, set_backends, start_accelerator, start_processes
from accel_train.recipe import Recipe
from accel_train.recipe_writing import write_recipe
from accel_train.redaction import redact, remember_secrets
from accel_train.resolve import change_model, check_recipe, resolve_run
from accel_train.resume import Found, agree_on_checkpoint
from accel_train.rollback_record import describe, take_up
from accel_train.sampling import DataOrder
from accel_train.saver import Saver
from accel_train.schedule import StepPlan, make_schedule
from accel_train.sharding import (
    allow_sharding,
    build_for_sharding,
    choose_sharding,
    is_sharded,
    reshard,
    shard_model,
    sharding_plugins,
)
from accel_train.signals import StopRequest
from accel_train.snapshot import restore
from accel_train.state import Choice, Requests, TrainState
from accel_train.step import MicroBatch, TrainingModule, Wishes
from accel_train.task import TARGET_UNITS, Task, TaskData
from accel_train.watchdog import Watchdog


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
    set_learning_rate: Callable[[int], float]
    """Sets the learning rate of a 0-based step on all groups, and returns it."""
    average: WeightAverage | None
    """Of the weights, where the recipe asks for one."""
    description: dict[str, bytes]
    """Files that go into each checkpoint, so that `from_pretrained` can read it; on the main process."""
    num_workers: int
    pin_memory: bool
    state: TrainState
    guard: Ladder
    saver: Saver
    """Writes checkpoints, on the main process."""
    health: Health
    """Says which of them can be gone back to, on the main process."""
    observer: Observer
    memory: PeakMemory
    resources: ExitStack
    """What is let go at the end, however it comes: folder, trackers, progress bar."""
    found: Found
    """What this sitting goes on from."""
    remembered: Remembered | None = None
    """Where the size of the micro-batches is kept that was found to fit, if it was looked for."""
    evaluate: Callable[[], Mapping[str, float]] | None = None
    """A program's own evaluation, in place of the task's."""
    requests: Requests | None = None
    saving_group: dist.ProcessGroup | None = None
    """Of the threads that save, where each process saves its part: what they agree on must not mix with the training's."""
    evaluation_piece_size: int | None = None
    """Samples that this process can evaluate at once, where memory did not hold all that the recipe wants."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Whether the run was asked to stop."""
    watchdog: Watchdog | None = None
    """Ends this process where it would wait for ever; none where it is alone, and not there for this run alone."""
    batches_evaluated: int = 0
    _quiet_until: int = 0
    """Nothing is due after steps before this one."""
    last_scores: dict[str, Any] = field(default_factory=dict)
    """Of the newest evaluation."""
    last_details: dict[str, Any] = field(default_factory=dict)
    """What evaluation.json holds of it: step, metrics, and the task's details."""

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps.max_steps

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the model, and not the whole of it."""
        return is_sharded(self.accelerator)

    @property
    def can_evaluate(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.data.eval is not None or self.evaluate is not None

    def evaluation_due(self) -> bool:
        """Whether to evaluate after the step just done; the end has an evaluation of its own."""
        if not self.can_evaluate or self.state.step >= self.max_steps:
            return False
        step, every_epochs = self.state.step, self.recipe.evaluate.every_epochs
        if every_epochs is None:
            every_steps = self.recipe.evaluate.every_steps
            return every_steps > 0 and step % every_steps == 0
        if every_epochs == 0:
            return False
        before, now = (int(self.order.epoch_at(at) / every_epochs + 1e-9) for at in (step - 1, step))
        return now > before

    def checkpoint_due(self) -> bool:
        """Whether to save after the step just done; the last step always is."""
        step, every = self.state.step, self.recipe.checkpoint.every_steps
        return step == self.max_steps or (every > 0 and step % every == 0)

    def drift_check_due(self, stopping: bool = False) -> bool:
        """Whether to compare the weights of the processes after the step just done; always where it is evaluated or saved."""
        every = self.recipe.guard.drift_check_steps
        if every == 0 or self.accelerator.num_processes == 1 or self.is_sharded:
            return False
        return stopping or self.state.step % every == 0 or self.evaluation_due() or self.checkpoint_due()

    @property
    def data_timeout_seconds(self) -> float:
        """How long a batch may take to be read: a little less than a step, so that what hangs is named."""
        return 0.8 * self.recipe.guard.hang_timeout_seconds

    def pause_due(self) -> bool:
        """Whether something other than the next step comes now."""
        if self.requests is not None:
            return True
        if self.state.step < self._quiet_until:
            return False
        self._quiet_until = self._next_pause()
        return self.evaluation_due() or self.checkpoint_due() or self.drift_check_due()

    def _next_pause(self) -> int:
        """The next step after which something may be due."""
        evaluate, step = self.recipe.evaluate, self.state.step
        if evaluate.every_epochs is not None:
            return step + 1
        intervals = (evaluate.every_steps, self.recipe.checkpoint.every_steps, self.recipe.guard.drift_check_steps)
        return min([self.max_steps, *((step // every + 1) * every for every in intervals if every)])

    def is_evaluation_over(self) -> bool:
        """Between two batches of an evaluation: whether it is left, because the run was asked to stop."""
        self.batches_evaluated += 1
        return self.stop.requested

    def watch(self) -> None:
        """From now on the watchdog expects steps."""
        if self.watchdog is not None:
            self.watchdog.watch_steps(
                lambda: (self.state.step, self.batches_evaluated), lambda: self.memory.current_phase
            )

    def go_on_from(self, state: TrainState) -> None:
        """Take these counters for the run's, and let the guard judge by them."""
        self.state, self._quiet_until = state, 0
        self.guard = make_guard(self.recipe, state, self.steps)

    def wishes(self, stop_requested: bool, micro_batches: Sequence[MicroBatch] = ()) -> Wishes:
        """What this process has to tell the others when a step begins."""
        num_targets = sum(num_targets for _, num_targets in micro_batches)
        return Wishes(num_targets, stop_requested, self.saver.failed)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has its averaged weights, where there is an average."""
        return nullcontext() if self.average is None else self._averaged()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        assert self.average is not None
        self.let_go_of_gathered_weights()
        with self.average.in_place():
            try:
                yield
            finally:
                self.let_go_of_gathered_weights()

    def let_go_of_gathered_weights(self) -> None:
        """Before weights are changed other than by a step: what was gathered of them is of before."""
        if self.is_sharded:
            reshard(self.inner)


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
    processes = start_processes(offloads=recipe.parallel.cpu_offload)
    check_launcher(processes.num_processes)
    sizes = resolve_batch(recipe.batch, processes.num_processes)
    precision = choose_mixed_precision(recipe.precision, processes.device)
    choices: dict[str, Choice[Any]] = {"precision.mixed_precision": precision}
    choices |= set_backends(recipe.precision, precision.value, processes.device)
    sharding = choose_sharding(recipe.parallel, processes.num_processes, processes.device)
    if recipe.parallel.strategy != "ddp":
        choices["parallel"] = sharding
    plugins = sharding_plugins(recipe.parallel, sharding.value, processes.num_processes, precision.value)
    if plugins:
        allow_sharding(processes.device)
    accelerator = start_accelerator(precision.value, recipe.precision, recipe.guard, sizes, processes.device, plugins)
    with ExitStack() as resources:
        watchdog = open_watchdog(recipe, accelerator, extensions, stop)
        if watchdog is not None:
            resources.enter_context(watchdog)
        folder = resources.enter_context(RunFolder(Path(recipe.output_dir))) if accelerator.is_main_process else None
        run = _build(recipe, task, accelerator, sizes, choices, extensions)
        own = open_observer(run, folder) if folder is not None else run.observer
        run.observer = resources.enter_context(Several((own, *extensions.observers)) if extensions.observers else own)
        if folder is not None:
            introduce(run, folder)
        run.stop, run.watchdog = stop, watchdog
        if watchdog is not None:
            watchdog.record = None if folder is None else folder.append_event
            resources.push(watchdog.note_end)  # called first: what is closed after it may take its time
        run.resources = resources.pop_all()
        return run


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
) -> Run:
    device = accelerator.device
    data = task.load_data(recipe, progress=accelerator.is_main_process)
    check_agreement(recipe, data, accelerator.num_processes)
    resolved = resolve_run(recipe, data, sizes, extensions.epoch_order)
    steps, order = resolved.steps, resolved.order
    workers = choose_num_workers(recipe.data.num_workers, data, accelerator.num_processes)
    pin = choose_pin_memory(recipe.data.pin_memory, device)
    identity = run_identity(recipe, data, sizes, steps)
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
    peak = scale_learning_rate(recipe.optimizer.learning_rate, recipe.optimizer.lr_scaling, sizes)
    choices |= changes
    choices |= fitted.choices
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
    accelerator.ddp_handler.find_unused_parameters = extensions.find_unused_parameters
    if sharded:
        module: nn.Module = inner
        choices["parallel.wrapped"] = shard_model(accelerator, inner, weights)
        del weights
    optimizer = name_parameters(build(inner.model), inner.model)
    with warnings.catch_warnings():
        # Accelerate hands it to DDP by this name, which torch is about to rename.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
        if not sharded:
            module, prepared = accelerator.prepare(inner, optimizer)
            optimizer = prepared.optimizer  # the wrapper costs 70 us a step, and hides a skipped step from the kernel
    average = None
    if recipe.optimizer.ema_decay is not None:
        trained = [(name, parameter) for name, parameter in inner.model.named_parameters() if parameter.requires_grad]
        average = WeightAverage(trained, recipe.optimizer.ema_decay)
    state = TrainState()
    if found.path is not None:
        state = restore(found.path, inner.model, optimizer, accelerator, average)
    take_up(state, found.rollbacks)
    multiplier = make_schedule(recipe.schedule, steps.max_steps, steps.warmup_steps)
    own_rates = extensions.group_learning_rates

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
        parameters=[parameter for group in optimizer.param_groups for parameter in group["params"]],
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
        remembered=fitted.remembered,
        evaluate=extensions.evaluate,
        requests=extensions.requests,
        saving_group=dist.new_group(backend="gloo") if sharded else None,
    )
    return run


def make_guard(recipe: Recipe, state: TrainState, steps: StepPlan) -> Ladder:
    """The guard of a run, with the memory that is in its counters."""
    return Ladder(recipe.guard, state, max_grad_norm=recipe.optimizer.max_grad_norm, warmup_steps=steps.warmup_steps)


def describe_model(task: Task, model: nn.Module, data: TaskData) -> dict[str, bytes]:
    """What `from_pretrained` needs beside the weights (configuration, tokenizer), by file name."""
    with TemporaryDirectory() as folder:
        task.save_description(model, data, Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def open_observer(run: Run, folder: RunFolder) -> RunObserver:
    """Ledger, progress bar and trackers of the main process, behind one observer."""
    recipe, state = run.recipe, run.state
    folder.rewind(state.step, evaluated=not state.evaluation_owed and state.step < run.max_steps)
    peak = device_peak(run)
    return RunObserver(
        folder,
        Progress(
            recipe.log.progress,
            total_steps=run.max_steps,
            initial_step=state.step,
            targets=TARGET_UNITS.get(recipe.task, "targets"),
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
            flops_per_token=run.task.flops_per_target(recipe, run.inner.model),
            peak_flops=peak and peak * run.sizes.world_size,
            train_seconds=state.train_seconds,
        ),
        log_every_steps=recipe.log.every_steps,
        total_steps=run.max_steps,
        samples_per_step=run.sizes.global_batch_size,
        num_samples_per_epoch=run.order.steps_per_epoch * run.sizes.global_batch_size,
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
    if run.found.changes:
        changes = [str(change) for change in run.found.changes]
        run.observer.on_event(
            "changes_accepted", run.state.step, f"changed since, and accepted: {'; '.join(changes)}", changes=changes
        )
