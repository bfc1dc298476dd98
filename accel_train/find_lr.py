"""The learning-rate range test (Smith 2017, arXiv 1506.01186): the rate rises step by step until the loss diverges.

The steps are those of a run, through the same loop, in a temporary folder: nothing of a run is read or changed.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from accel_train.batching import scale_learning_rate
from accel_train.loop import run_steps
from accel_train.memory import garbage_collected_at_steps
from accel_train.observe import NoObserver
from accel_train.prepare import Extensions, prepare_run
from accel_train.range_test import FIRST_STEPS, Array, RangeTest, rates_of_test, suggest
from accel_train.recipe import Recipe
from accel_train.run import Run
from accel_train.signals import StopRequest
from accel_train.state import StepResult

_EMA_DECAY = 0.8


class _Enough(Exception):
    """The test has seen what it needs. It leaves the loop by this, because a stop that is asked for writes a checkpoint."""


@dataclass
class Recorder:
    """Notes the loss of each step, and ends the run when the loss has diverged or all steps are done.

    All processes see the same numbers, so all end at the same step. Diverged: a loss that is not finite, or whose
    smoothed value is twice that of the beginning or four times the lowest.
    """

    num_steps: int
    losses: list[float] = field(default_factory=list)
    diverged: bool = False
    _average: float = 0.0
    _first: float = math.nan
    _best: float = math.inf

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Note a step.

        Raises:
            _Enough: it was the last that is needed.
        """
        self.losses.append(result.loss)
        step = len(self.losses)
        self._average = _EMA_DECAY * self._average + (1 - _EMA_DECAY) * result.loss
        smoothed = self._average / (1 - _EMA_DECAY**step)
        if step <= FIRST_STEPS:
            self._first = float(np.mean(self.losses))
        self._best = min(self._best, smoothed)
        too_high = step > FIRST_STEPS and smoothed > min(2 * abs(self._first), 4 * abs(self._best))
        self.diverged = too_high or not math.isfinite(result.loss)
        if self.diverged or step >= self.num_steps:
            raise _Enough


def prepare_test(recipe: Recipe, rates: Array, folder: Path) -> tuple[Run, Recorder]:
    """A run of the recipe that only tests learning rates, in a folder of its own.

    Raises:
        ValueError: as `prepare_run`.
    """
    recorder = Recorder(len(rates))
    runs: list[Run] = []  # the groups and their factors are known once the optimizer is built

    def rates_of_groups(step: int) -> Sequence[float]:
        rate = float(rates[min(step, len(rates) - 1)])
        return [rate * group["lr_scale"] for group in runs[0].optimizer.param_groups]

    extensions = Extensions(observers=(NoObserver(recorder.on_step),), group_learning_rates=rates_of_groups)
    runs.append(prepare_run(_recipe_of_test(recipe, len(rates), folder), extensions=extensions))
    return runs[0], recorder


def _recipe_of_test(recipe: Recipe, num_steps: int, folder: Path) -> Recipe:
    """The same model, data, batch and optimizer; no evaluation, checkpoint, tracker, average, or guard that would step in."""
    schedule = recipe.schedule.model_copy(
        # A step more than is looked at: after the last step of a run comes a checkpoint.
        update={
            "type": "constant",
            "max_steps": num_steps + 1,
            "num_epochs": None,
            "warmup_steps": 0,
            "warmup_ratio": None,
        }
    )
    guard = recipe.guard.model_copy(
        update={
            **{"on_nonfinite": "skip", "max_consecutive_skips": num_steps, "max_skips_per_1000_steps": 1000},
            **{"on_spike": "off", "max_incidents": 0},
        }
    )
    checkpoint = recipe.checkpoint.model_copy(update={"every_steps": 0, "resume": "auto"})
    evaluate = recipe.evaluate.model_copy(update={"every_steps": 0, "every_epochs": None})
    log = recipe.log.model_copy(update={"trackers": (), "progress": False, "every_steps": num_steps})
    return recipe.model_copy(
        update={
            "output_dir": str(folder / "run"),
            "schedule": schedule,
            "guard": guard,
            "checkpoint": checkpoint,
            "evaluate": evaluate,
            "log": log,
            "optimizer": recipe.optimizer.model_copy(update={"ema_decay": None}),
        }
    )


def run_test(run: Run, recorder: Recorder, rates: Array) -> RangeTest:
    """Train through the rates until the loss diverges, and look at what it did."""
    with run.resources, garbage_collected_at_steps(), suppress(_Enough):
        run_steps(run, StopRequest())  # not opened: Ctrl-C interrupts at once, for there is nothing to save
    losses = np.array(recorder.losses)
    written = run.recipe.optimizer.learning_rate
    scaled = scale_learning_rate(written, run.recipe.optimizer.lr_scaling, run.sizes)
    return RangeTest(
        rates=rates[: len(losses)],
        losses=losses,
        diverged=recorder.diverged,
        suggestion=suggest(rates[: len(losses)], losses, recorder.diverged),
        scale=scaled.value / written,
        scale_reason=scaled.reason,
        is_main_process=run.accelerator.is_main_process,
    )


def find_learning_rate(recipe: Recipe, *, low: float = 1e-6, high: float = 1.0, num_steps: int = 100) -> RangeTest:
    """Run a range test of a recipe; nothing of its output folder is touched.

    Raises:
        ValueError: the recipe, the data, the launcher or the rates are wrong.
    """
    rates = rates_of_test(low, high, num_steps)
    with TemporaryDirectory(prefix="accel-train-find-lr-") as folder:
        run, recorder = prepare_test(recipe, rates, Path(folder))
        return run_test(run, recorder, rates)
