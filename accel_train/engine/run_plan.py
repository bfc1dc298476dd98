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
    """Parts of a run that a program supplies and a recipe cannot express. The Trainer in `hf` is built on them."""

    observers: tuple[Observer, ...] = ()
    """Observers called after the run's own observer, on every process."""
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
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
    requests: Requests | None = None
    """Requests of observers to the loop. If set, the host waits for each step, so observers see it before the next
    begins."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Reading` that a recipe cannot set."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of DistributedDataParallel, by Accelerate's names."""


@dataclass(frozen=True)
class RunPlan:
    """A run before its model is built, including everything that must stay the same on a resume."""

    recipe: Recipe
    task: Task
    data: TaskData
    order: DataOrder
    steps: StepPlan
    sizes: BatchSizes
    """Batch sizes at the start. `RunContext.sizes` holds the current sizes."""
    reading: Reading
    identity: dict[str, Any]
    """Run fingerprint. A checkpoint is resumed only if its fingerprint is equal."""
    choices: Mapping[str, Choice[Any]]
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
    def evaluates_part(self) -> bool:
        """Return whether evaluations during training read only part of the samples."""
        if self.extensions.evaluate is not None or self.data.eval is None:
            return False
        most = self.recipe.evaluate.max_samples
        return most is not None and most < len(self.data.eval)  # type: ignore[arg-type]

    def with_choices(self, choices: Mapping[str, Choice[Any]]) -> "RunPlan":
        """Return the same plan with additional choices."""
        return replace(self, choices={**self.choices, **choices})

    @property
    def how_to_resume(self) -> str:
        """Instruction for the user to resume the run."""
        auto = self.recipe.checkpoint.resume in BY_ITSELF
        return "run the same command again" if auto else "set checkpoint.resume to auto"


class Calendar:
    """Step schedule: the work that is due after each step. Steps count from 1."""

    def __init__(self, plan: RunPlan, *, compares_weights: bool) -> None:
        recipe = plan.recipe
        self._evaluate, self._checkpoint_steps = recipe.evaluate, recipe.checkpoint.every_steps
        self._drift_steps = recipe.guard.drift_check_steps if compares_weights else 0
        self._max_steps, self._epoch_at, self._can_evaluate = plan.max_steps, plan.order.epoch_at, plan.can_evaluate
        self._pauses_always = plan.extensions.requests is not None

    def evaluation_due(self, step: int) -> bool:
        """Return whether to evaluate after this step. False for the last step, because the run ends with an
        evaluation."""
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
        """Return whether to save after this step. The last step is always saved."""
        return step == self._max_steps or _is_multiple(step, self._checkpoint_steps)

    def drift_check_due(self, step: int, *, stopping: bool = False) -> bool:
        """Return whether to compare the processes' weights after this step: always before an evaluation or a save."""
        is_due = stopping or _is_multiple(step, self._drift_steps)
        return self._drift_steps > 0 and (is_due or self.evaluation_due(step) or self.checkpoint_due(step))

    def pause_due(self, step: int) -> bool:
        """Return whether anything is due between this step and the next."""
        is_due = self.evaluation_due(step) or self.checkpoint_due(step) or self.drift_check_due(step)
        return is_due or self._pauses_always


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
