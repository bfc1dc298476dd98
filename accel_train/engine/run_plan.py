"""Everything about a run that is decided before its model is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from accel_train.checkpoint.resume import BY_ITSELF, ResumePoint
from accel_train.core.state import Choice, Requests
from accel_train.data.batch_sizes import BatchSizes
from accel_train.data.order import DataOrder
from accel_train.engine.loader import Reading
from accel_train.observe.observer import Observer
from accel_train.optim.schedule import StepPlan
from accel_train.recipe.schema import Recipe
from accel_train.task import Task, TaskData


@dataclass(frozen=True)
class Extensions:
    """Parts of a run that a program brings along and no recipe can say; the Trainer in `hf` is built of these."""

    observers: tuple[Observer, ...] = ()
    """Called after the run's own observer, on every process."""
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
    """Requests of observers to the loop. With it the host waits for every step, so that they see a step before the next begins."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Reading` that no recipe has."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of DistributedDataParallel, by the names that Accelerate has for them."""


@dataclass(frozen=True)
class RunPlan:
    """A run before its model is built; what must be the same on a resume follows from it."""

    recipe: Recipe
    task: Task
    data: TaskData
    order: DataOrder
    steps: StepPlan
    sizes: BatchSizes
    """Batch sizes at the start; `RunContext.sizes` has those of now."""
    reading: Reading
    identity: dict[str, Any]
    """The run's fingerprint: a checkpoint is resumed only where it is equal."""
    choices: Mapping[str, Choice[Any]]
    """Decisions made for the user, by setting, with the reasons that are printed."""
    extensions: Extensions
    resume_point: ResumePoint

    @property
    def output_dir(self) -> Path:
        """The run folder."""
        return Path(self.recipe.output_dir)

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps.max_steps

    @property
    def can_evaluate(self) -> bool:
        """There is something to evaluate on."""
        return self.data.eval is not None or self.extensions.evaluate is not None

    @property
    def evaluates_part(self) -> bool:
        """Evaluations during the training see a part of the samples."""
        if self.extensions.evaluate is not None or self.data.eval is None:
            return False
        most = self.recipe.evaluate.max_samples
        return most is not None and most < len(self.data.eval)  # type: ignore[arg-type]

    def with_choices(self, choices: Mapping[str, Choice[Any]]) -> "RunPlan":
        """Return the same plan with further choices."""
        return replace(self, choices={**self.choices, **choices})

    @property
    def how_to_resume(self) -> str:
        """Tells a user what to do to resume the run."""
        auto = self.recipe.checkpoint.resume in BY_ITSELF
        return "run the same command again" if auto else "set checkpoint.resume to auto"


class Calendar:
    """Says what is due after a step; steps count from 1."""

    def __init__(self, plan: RunPlan, *, compares_weights: bool) -> None:
        recipe = plan.recipe
        self._evaluate, self._checkpoint_steps = recipe.evaluate, recipe.checkpoint.every_steps
        self._drift_steps = recipe.guard.drift_check_steps if compares_weights else 0
        self._max_steps, self._epoch_at, self._can_evaluate = plan.max_steps, plan.order.epoch_at, plan.can_evaluate
        self._pauses_always = plan.extensions.requests is not None

    def evaluation_due(self, step: int) -> bool:
        """Return whether to evaluate after this step; the end has an evaluation of its own."""
        if not self._can_evaluate or step >= self._max_steps:
            return False
        every_epochs = self._evaluate.every_epochs
        if every_epochs is None:
            return _is_multiple(step, self._evaluate.every_steps)
        if every_epochs == 0:
            return False
        before, now = (int(self._epoch_at(at) / every_epochs + 1e-9) for at in (step - 1, step))
        return now > before

    def checkpoint_due(self, step: int) -> bool:
        """Return whether to save after this step; the last step always is saved."""
        return step == self._max_steps or _is_multiple(step, self._checkpoint_steps)

    def drift_check_due(self, step: int, *, stopping: bool = False) -> bool:
        """Return whether to compare the weights of the processes after this step: always before an evaluation or a save."""
        is_due = stopping or _is_multiple(step, self._drift_steps)
        return self._drift_steps > 0 and (is_due or self.evaluation_due(step) or self.checkpoint_due(step))

    def pause_due(self, step: int) -> bool:
        """Return whether something other than the next step comes after this one."""
        is_due = self.evaluation_due(step) or self.checkpoint_due(step) or self.drift_check_due(step)
        return is_due or self._pauses_always


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
