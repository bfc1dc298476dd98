"""An active run: everything that is decided before its model is built, its state, and its resources."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

from accel_train.checkpoint.fingerprint import Change, Settings
from accel_train.checkpoint.health import Health
from accel_train.checkpoint.resume import BY_ITSELF, ResumePoint
from accel_train.checkpoint.saver import Saver
from accel_train.core.state import Choices, JsonRecord, Requests, TrainState
from accel_train.data.batch_sizes import BatchSizes
from accel_train.data.cache import DigestCheck
from accel_train.data.order import DataOrder
from accel_train.engine.batch_search import BatchCache
from accel_train.engine.broken import Faults
from accel_train.engine.loader import Reading
from accel_train.engine.step import Counted, MicroBatch, Wire
from accel_train.guard.guard import Guard, learning_rate_factor
from accel_train.model.batch_norm import RunningStatistics
from accel_train.model.compile import GraphCount
from accel_train.observe.observer import Observer
from accel_train.optim.schedule import Rate, StepPlan, set_learning_rate
from accel_train.parallel.strategy import MakeOptimizer, Strategy
from accel_train.recipe.schema import Recipe
from accel_train.runtime.memory import PeakMemory
from accel_train.runtime.signals import StopRequest
from accel_train.runtime.watchdog import Watchdog
from accel_train.task import Task, TaskData


class Door(NamedTuple):
    """Advice to the user: what starts a run again and changes a setting. The defaults are for a command."""

    again: str = "run the same command again"
    resume: str = "set checkpoint.resume to auto"
    """Advice where a run does not resume by itself."""
    load_best: str = "set checkpoint.load_best_model_at_end to true"


COMMAND = Door()


@dataclass(frozen=True)
class Extensions:
    """Parts of a run that a program supplies and a recipe cannot express. The Trainer in `hf` is built on them."""

    observers: tuple[Observer, ...] = ()
    """Observers called after the run's own observer, on every process."""
    build_optimizer: MakeOptimizer | None = None
    """Function that replaces the recipe's optimizer, called with the model on its device.

    Groups without `param_names` get them.
    """
    group_learning_rates: Callable[[int], Sequence[float]] | None = None
    """Function that returns each parameter group's learning rate at a 0-based step. Replaces the recipe's schedule."""
    epoch_order: Callable[[int], NDArray[np.int64]] | None = None
    """Function that returns the samples of a 0-based epoch in order. Replaces the built-in order."""
    evaluate: Callable[[], Mapping[str, float]] | None = None
    """Function that replaces the task's evaluation. Returns metrics by name, equal on all processes."""
    find_unused_parameters: bool = False
    """Whether DDP looks for parameters without a gradient. It costs a walk through the graph. Without it, DDP fails
    there."""
    owns_process: bool = False
    """Whether this process exists for the run only and may be killed if it hangs. Always true with several
    processes."""
    verbose: bool = False
    """Whether the screen shows every choice with its reason, every logged step, and all scores."""
    requests: Requests | None = None
    """Requests of observers to the loop. If set, the host waits for each step, so observers see it before the next
    begins."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Reading` that a recipe cannot set."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of DistributedDataParallel, by Accelerate's names."""
    callbacks: tuple[Any, ...] = ()
    """Objects of `accel_train.Callback`, called after the observers, on every process."""
    watchdog: Watchdog | None = None
    """Watchdog that replaces the run's own. The program opens and closes it."""
    door: Door = COMMAND
    materialize: bool = True
    """Whether the main process makes weights with values. Without them, a run shows only shapes and traffic."""


@dataclass(frozen=True)
class RunPlan:
    """A run before its model is built, including everything that must stay the same on a resume."""

    recipe: Recipe
    """Recipe whose `precision.compile` is not `auto`."""
    given: Recipe
    """Recipe as it was given."""
    task: Task
    data: TaskData
    order: DataOrder
    steps: StepPlan
    rate: Rate
    sizes: BatchSizes
    """Batch sizes at the start. `RunContext.sizes` holds the current sizes."""
    reading: Reading
    identity: JsonRecord
    """Run fingerprint. A checkpoint is resumed only if its fingerprint is equal."""
    choices: Choices
    """Settings resolved for the user, by name, with the printed reasons."""
    extensions: Extensions
    resume_point: ResumePoint

    @property
    def output_dir(self) -> Path:
        """The run folder."""
        return Path(self.recipe.output_dir)

    @property
    def max_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.steps.max_steps

    @property
    def can_evaluate(self) -> bool:
        """Return whether the run has evaluation data or an evaluation function."""
        return self.data.eval is not None or self.extensions.evaluate is not None

    @property
    def evaluates_untrained(self) -> bool:
        """The `evaluate.at_start` setting, with `auto` resolved."""
        chosen = self.recipe.evaluate.at_start
        is_wanted = self.task.spec.evaluates_untrained if chosen == "auto" else chosen
        return bool(is_wanted) and self.data.eval is not None and self.extensions.evaluate is None

    @property
    def evaluates_part(self) -> bool:
        """Return whether evaluations during training read only part of the samples."""
        if self.extensions.evaluate is not None or self.data.eval is None:
            return False
        most = self.recipe.evaluate.max_samples
        return most is not None and most < len(self.data.eval)  # type: ignore[arg-type]

    def with_choices(self, choices: Choices) -> "RunPlan":
        """Return the same plan with additional choices."""
        return replace(self, choices={**self.choices, **choices})

    @property
    def how_to_resume(self) -> str:
        """Instruction for the user to resume the run."""
        auto = self.recipe.checkpoint.resume in BY_ITSELF
        return self.extensions.door.again if auto else self.extensions.door.resume


@dataclass(frozen=True)
class Calendar:
    """Step schedule: the work that is due after each step, as a function of the step alone. Steps count from 1."""

    plan: RunPlan
    compares_weights: bool

    def evaluation_due(self, step: int) -> bool:
        """Return whether to evaluate after this step. False for the last step, because the run ends with an
        evaluation."""
        plan, section = self.plan, self.plan.recipe.evaluate
        if not plan.can_evaluate or step >= plan.max_steps:
            return False
        every_epochs = section.every_epochs
        if every_epochs is None:
            return _is_multiple(step, section.every_steps)
        if every_epochs == 0:
            return False
        before, now = (int(plan.order.epoch_at(at) / every_epochs + 1e-9) for at in (step - 1, step))
        return now > before

    def checkpoint_due(self, step: int) -> bool:
        """Return whether to save after this step. The last step is always saved."""
        return step == self.plan.max_steps or _is_multiple(step, self.plan.recipe.checkpoint.every_steps)

    def drift_check_due(self, step: int, *, stopping: bool = False) -> bool:
        """Return whether to compare the processes' weights after this step: always before an evaluation or a save."""
        every_steps = self.plan.recipe.guard.drift_check_steps if self.compares_weights else 0
        is_due = stopping or _is_multiple(step, every_steps)
        return every_steps > 0 and (is_due or self.evaluation_due(step) or self.checkpoint_due(step))

    def pause_due(self, step: int) -> bool:
        """Return whether anything is due between this step and the next."""
        is_due = self.evaluation_due(step) or self.checkpoint_due(step) or self.drift_check_due(step)
        return is_due or self.plan.extensions.requests is not None


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class ModelFacts:
    """Facts that are known once the model is built."""

    description: dict[str, bytes]
    """Files added to each checkpoint so that `from_pretrained` can read it; on the main process."""
    flops_per_target: float | None
    peak_flops: float | None
    """Peak FLOP/s of one device in the run's precision. None if not known."""
    settings: Settings
    """Settings that affect training and that a resume may change."""
    base: Mapping[str, str]
    """Digests, by name, of the frozen base weights that checkpoints leave out; on the main process."""


@dataclass
class EvaluationProgress:
    """Progress of the current evaluation, and results of the previous one."""

    chunk_size: int | None = None
    """Samples per forward that fit on this process. None unless memory ran out."""
    num_batches: int = 0
    """Number of batches forwarded since the start. The watchdog reads it to detect a hang."""
    scores: JsonRecord = field(default_factory=dict)
    details: JsonRecord = field(default_factory=dict)
    """Contents of evaluation.json: step, metrics, and the task's details."""
    calibration: JsonRecord = field(default_factory=dict)
    """Settings of the model's configuration that `Task.calibrate` returned."""


@dataclass
class RunContext:
    """An active run: its plan, its model, and the state that changes while it trains."""

    plan: RunPlan
    facts: ModelFacts
    strategy: Strategy
    """Parallel strategy, with the module, the optimizer, and the averaged weights."""
    schedule: Callable[[int], float | Sequence[float]]
    """Learning rate of a 0-based step: one for all parameter groups, or one for each group."""
    statistics: RunningStatistics
    state: TrainState
    sizes: BatchSizes
    """Current batch sizes. Micro-batches shrink if memory runs out."""
    guard: Guard
    calendar: Calendar
    saver: Saver
    """Writer of checkpoints, on the main process."""
    health: Health
    """Record of the known-good checkpoints that a rollback may use, on the main process."""
    memory: PeakMemory
    requests: Requests
    stop: StopRequest
    """Flag that is set by signals that ask this process to stop."""
    watchdog: Watchdog
    """Kills this process if it hangs. Not open in a single process that does not own its interpreter (a notebook)."""
    batch_cache: BatchCache | None
    """Cache of the micro-batch size that fits, for the next start. None if only one size is possible."""
    observer: Observer = field(default_factory=Observer)
    resources: ExitStack = field(default_factory=ExitStack)
    """Resources closed at the end, also after an error: run folder, trackers, progress bar."""
    evaluation: EvaluationProgress = field(default_factory=EvaluationProgress)
    digest_check: DigestCheck | None = None
    """Comparison of large files with their digests during training; on the first process of each machine."""
    graphs: GraphCount = field(default_factory=GraphCount)
    """Counter of the graphs that torch.compile makes in this process."""
    finished: JsonRecord | None = None
    """Contents of summary.json if the same run has already finished. Then nothing is trained, evaluated, or written."""
    out_of_memory: str = ""
    """Allocator's error if this process ran out of memory in the last step (DDP) and the others do not know it yet."""
    faults: Faults = field(default_factory=Faults)
    """Errors of the broken samples, within `data.max_broken`."""
    changes: Sequence[Change] = ()
    """Settings that differ from the checkpoint's."""

    @property
    def accelerator(self) -> Accelerator:
        """The strategy's Accelerator."""
        return self.strategy.accelerator

    @property
    def counted(self) -> Counted | None:
        """Numbers that each step sums over all processes in addition to its loss."""
        return self.faults if self.plan.data.max_broken else self.plan.task.counted

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of a 0-based step on all parameter groups, and return it."""
        rate = self.schedule(step)
        if isinstance(rate, float):  # rollbacks do not change the rates of a program's own schedule
            rate *= learning_rate_factor(step + 1, self.state.rollbacks)
        return set_learning_rate(self.strategy.optimizer, rate)

    def signals(self, micro_batches: Sequence[MicroBatch] = ()) -> Wire:
        """Return the signals that this process sends when a step begins."""
        num_targets = sum(num_targets for _, num_targets in micro_batches)
        return Wire(num_targets, self.stop.requested, self.saver.failed)

    def undo_forward(self) -> None:
        """Restore the running statistics from before a forward whose step is repeated."""
        self.statistics.undo()

    def leaves_evaluation(self) -> bool:
        """Count a batch of an evaluation; return whether the evaluation must end because the run was asked to stop."""
        self.evaluation.num_batches += 1
        return self.stop.requested

    def watch_for_hangs(self) -> None:
        """Start the watchdog's check for finished steps."""
        self.watchdog.watch_steps(
            lambda: (self.state.step, self.evaluation.num_batches), lambda: self.memory.current_phase
        )


def make_guard(plan: RunPlan, state: TrainState) -> Guard:
    """Return the guard of a run. `state` holds the guard's counters."""
    return Guard(
        plan.recipe.guard,
        state,
        max_grad_norm=plan.recipe.optimizer.max_grad_norm,
        warmup_steps=plan.steps.warmup_steps,
        epoch_steps=math.ceil(plan.max_steps / max(plan.steps.num_epochs, 1)),
    )
