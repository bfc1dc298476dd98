"""A run that is resolved and built: what the loop works on, and when something other than the next step is due."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.batch_record import Remembered
from accel_train.batching import BatchSizes
from accel_train.data.cache import DigestCheck
from accel_train.data_group import data_group, is_sharded
from accel_train.ema import WeightAverage
from accel_train.guard import Ladder, Limits
from accel_train.health import Health
from accel_train.identity import Change, Settings
from accel_train.memory import PeakMemory
from accel_train.observe import (
    Observer,
)
from accel_train.recipe import Recipe
from accel_train.reduction import Reduction, ShardedReduction
from accel_train.resume import Found
from accel_train.sampling import DataOrder
from accel_train.saver import Saver
from accel_train.schedule import StepPlan
from accel_train.sharding import reshard
from accel_train.signals import StopRequest
from accel_train.state import Choice, Requests, TrainState
from accel_train.step import MicroBatch, TrainingModule, Wishes, update_within
from accel_train.task import Task, TaskData
from accel_train.watchdog import Watchdog
from accel_train.zero import Zero
from accel_train.zero_parts import ZeroParts


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
    zero: Zero | None
    """Where DeepSpeed spreads the optimizer (and more) over the processes."""
    flops_per_target: float | None
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
    settings: Settings
    """What the training depends on, and a resume may change."""
    setting_changes: Sequence[Change]
    """In what they differ from those of the checkpoint."""
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
    reduction: Reduction | ShardedReduction | None = None
    """Notes what this process hands in where gradients of several processes are summed."""
    digest_check: DigestCheck | None = None
    """Compares large files with their digests while the run trains; on the first process of each machine."""
    no_room: str = ""
    """What the allocator of this process said in the last step, if that ran out of memory; the others have yet to hear of it."""
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

    @cached_property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the model or of its optimizer, and not the whole of them."""
        return is_sharded(self.accelerator) or self.zero is not None

    @cached_property
    def num_copies(self) -> int:
        """Processes that hold the same part of a model that FSDP2 spreads (HSDP); 1 elsewhere."""
        config = self.accelerator.parallelism_config
        is_hsdp = config is not None and self.accelerator.is_fsdp2 and data_group(self.accelerator).num_alike == 1
        return int(config.dp_replicate_size) if is_hsdp else 1

    @property
    def has_whole_weights(self) -> bool:
        """Whether each process holds all weights of the model, whatever it holds of its optimizer."""
        return not is_sharded(self.accelerator) and not (self.zero is not None and self.zero.spreads_weights)

    @property
    def zero_parts(self) -> ZeroParts | None:
        """What DeepSpeed keeps of the model on this process, where it spreads it."""
        return None if self.zero is None else self.zero.parts

    @cached_property
    def meets_in_forward(self) -> bool:
        """Whether a forward waits for other processes: nobody can compute alone, or stay behind."""
        return self.is_sharded or data_group(self.accelerator).num_sharing > 1

    @property
    def can_evaluate(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.data.eval is not None or self.evaluate is not None

    @property
    def evaluates_part(self) -> bool:
        """Whether evaluations during the training see a part of the samples."""
        most = self.recipe.evaluate.max_samples
        return self.evaluate is None and self.data.eval is not None and most is not None and most < len(self.data.eval)  # type: ignore[arg-type]

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
        if every == 0 or self.accelerator.num_processes == 1 or (self.is_sharded and self.num_copies == 1):
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

    def update(self, limits: Limits) -> tuple[Tensor, Tensor, Tensor | None]:
        """The update of a step, within the guard's limits; as `step.update_within`."""
        if self.zero is not None:
            return self.zero.update_within(limits)
        return update_within(limits, self.optimizer, self.parameters, self.accelerator.scaler)

    def gradient_sum_here(self) -> Tensor | None:
        """Of this process's own gradients in the step just done, before they were summed over processes; None where nobody looked."""
        return None if self.reduction is None else self.reduction.sum_here()

    def step_back(self, step: int) -> None:
        """Go on from an earlier step, whose weights are still those of now: what came since was not applied."""
        self.state.step, self._quiet_until = step, 0

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


def make_guard(recipe: Recipe, state: TrainState, steps: StepPlan) -> Ladder:
    """The guard of a run, with the memory that is in its counters."""
    return Ladder(
        recipe.guard,
        state,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        warmup_steps=steps.warmup_steps,
        epoch_steps=math.ceil(steps.max_steps / max(steps.num_epochs, 1)),
    )
