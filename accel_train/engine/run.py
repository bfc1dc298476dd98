"""State and resources of an active run."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from accel_train.checkpoint.fingerprint import Settings
from accel_train.checkpoint.health import Health
from accel_train.checkpoint.saver import Saver
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
    scores: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Contents of evaluation.json: step, metrics, and the task's details."""


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
    watchdog: Watchdog | None
    """Kills this process if it hangs. None for a single process that does not own its interpreter (a notebook)."""
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
    finished: Mapping[str, Any] | None = None
    """Contents of summary.json if the same run has already finished. Then nothing is trained, evaluated, or written."""
    out_of_memory: str = ""
    """Allocator's error if this process ran out of memory in the last step (DDP) and the others do not know it yet."""

    @property
    def accelerator(self) -> Accelerator:
        """The strategy's Accelerator."""
        return self.strategy.accelerator

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
        self.statistics.put_back(torch.ones((), device=self.accelerator.device))

    def leaves_evaluation(self) -> bool:
        """Count a batch of an evaluation; return whether the evaluation must end because the run was asked to stop."""
        self.evaluation.num_batches += 1
        return self.stop.requested

    def watch_for_hangs(self) -> None:
        """Start the watchdog's check for finished steps."""
        if self.watchdog is not None:
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
