"""A run that is alive: what changes while it trains, and what is closed at its end."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from accel_train.checkpoint.fingerprint import Settings
from accel_train.checkpoint.health import Health
from accel_train.checkpoint.writer import Saver
from accel_train.core.state import Requests, TrainState
from accel_train.data.batch_sizes import BatchSizes
from accel_train.data.cache import DigestCheck
from accel_train.engine.agreement import Wire
from accel_train.engine.batch_search import BatchCache
from accel_train.engine.run_plan import Calendar, RunPlan
from accel_train.engine.step import MicroBatch
from accel_train.guard.guard import Guard, learning_rate_factor
from accel_train.model.batch_norm import RunningStatistics
from accel_train.model.compile import GraphCount
from accel_train.observe.observer import Observer
from accel_train.optim.optimizers import set_learning_rate
from accel_train.parallel.strategy import Strategy
from accel_train.runtime.memory import PeakMemory
from accel_train.runtime.signals import StopRequest
from accel_train.runtime.watchdog import Watchdog


@dataclass(frozen=True)
class ModelFacts:
    """Facts that are known once the model is built."""

    description: dict[str, bytes]
    """Files that go into each checkpoint, so that `from_pretrained` can read it; on the main process."""
    flops_per_target: float | None
    peak_flops: float | None
    """FLOP/s of one device in the run's precision; None where they are not known."""
    settings: Settings
    """Settings that the training depends on, and that a resume may change."""
    base: Mapping[str, str]
    """Digests of the frozen weights that checkpoints leave out, by name; on the main process."""


@dataclass
class EvaluationProgress:
    """Progress of the evaluation that runs, and results of the one before."""

    chunk_size: int | None = None
    """Samples that this process can evaluate at once, where memory did not hold all that the recipe wants."""
    num_batches: int = 0
    """Forwarded since the start: the watchdog sees by it that the process does not hang."""
    scores: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Contents of evaluation.json: step, metrics, and the task's details."""


@dataclass
class RunContext:
    """A run that is alive: its plan, its model, and whatever changes while it trains."""

    plan: RunPlan
    facts: ModelFacts
    strategy: Strategy
    """Spreads the model over processes; it has the module, the optimizer and the average of the weights."""
    schedule: Callable[[int], float | Sequence[float]]
    """The learning rate of a 0-based step, for all parameter groups or for each of them."""
    statistics: RunningStatistics
    state: TrainState
    sizes: BatchSizes
    """Batch sizes of now: micro-batches get smaller where memory runs out."""
    guard: Guard
    calendar: Calendar
    saver: Saver
    """Writes checkpoints, on the main process."""
    health: Health
    """Tells which checkpoints a rollback may use, on the main process."""
    memory: PeakMemory
    requests: Requests
    stop: StopRequest
    """Set by signals that ask this process to stop."""
    watchdog: Watchdog | None
    """Ends this process where it would wait for ever; None for a process that is alone, and not there for this run alone."""
    batch_cache: BatchCache | None
    """Keeps the micro-batch size that fits for the next start; None where there is one size only."""
    observer: Observer = field(default_factory=Observer)
    resources: ExitStack = field(default_factory=ExitStack)
    """Closed at the end, however it comes: folder, trackers, progress bar."""
    evaluation: EvaluationProgress = field(default_factory=EvaluationProgress)
    digest_check: DigestCheck | None = None
    """Compares large files with their digests while the run trains; on the first process of each machine."""
    graphs: GraphCount = field(default_factory=GraphCount)
    """Counts what torch.compile makes in this process."""
    finished: Mapping[str, Any] | None = None
    """The contents of summary.json where the same run has finished before: nothing is trained, evaluated or written."""
    out_of_memory: str = ""
    """The allocator's error, where this process ran out of memory in the last step and the others do not know it yet (DDP)."""

    @property
    def accelerator(self) -> Accelerator:
        """The strategy's Accelerator."""
        return self.strategy.accelerator

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of a 0-based step on all parameter groups, and return it."""
        rate = self.schedule(step)
        if isinstance(rate, float):  # rates for each group are a program's own, and rollbacks leave them alone
            rate *= learning_rate_factor(step + 1, self.state.rollbacks)
        return set_learning_rate(self.strategy.optimizer, rate)

    def signals(self, micro_batches: Sequence[MicroBatch] = ()) -> Wire:
        """Return what this process tells the others when a step begins."""
        num_targets = sum(num_targets for _, num_targets in micro_batches)
        return Wire(num_targets, self.stop.requested, self.saver.failed)

    def undo_forward(self) -> None:
        """Put running statistics back to before a forward whose step is done again."""
        self.statistics.put_back(torch.ones((), device=self.accelerator.device))

    def leaves_evaluation(self) -> bool:
        """Count a batch of an evaluation; return whether the evaluation ends here, because the run was asked to stop."""
        self.evaluation.num_batches += 1
        return self.stop.requested

    def watch_for_hangs(self) -> None:
        """Let the watchdog expect steps from now on."""
        if self.watchdog is not None:
            self.watchdog.watch_steps(
                lambda: (self.state.step, self.evaluation.num_batches), lambda: self.memory.current_phase
            )


def make_guard(plan: RunPlan, state: TrainState) -> Guard:
    """Return the guard of a run, with the memory that is in its counters."""
    return Guard(
        plan.recipe.guard,
        state,
        max_grad_norm=plan.recipe.optimizer.max_grad_norm,
        warmup_steps=plan.steps.warmup_steps,
        epoch_steps=math.ceil(plan.max_steps / max(plan.steps.num_epochs, 1)),
    )
