"""Train a recipe to its end: prepare, run the loop, and write the results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.engine.run import RunContext
from accel_train.recipe.schema import Recipe
from accel_train.runtime.exit import exits_are_errors
from accel_train.runtime.memory import garbage_collected_at_steps
from accel_train.runtime.signals import StopRequest
from accel_train.training.finish import finish_run
from accel_train.training.loop import run_steps
from accel_train.training.model_selection import continue_unless_stopped
from accel_train.training.setup import prepare_run


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run."""

    output_dir: Path
    summary: dict[str, Any]
    """Contents of summary.json: final metrics, totals, wall time, peak memory, throughput."""


@exits_are_errors()
def train(recipe: Recipe) -> RunResult:
    """Train a recipe, resuming from the newest valid checkpoint of its output folder.

    Raises:
        ValueError: the recipe, the data or the launcher is wrong; raised before a model is built.
        TrainingStopped: the guard stopped the run; the last checkpoint is good.
        CheckpointError: no checkpoint could be read or written.
        Preempted: the run was asked to stop, and saved; call it again to resume.
        RestartNeeded: memory ran out; call it again to continue with smaller micro-batches.
        ExitedEarly: code of the task called `sys.exit()`.
    """
    with StopRequest() as stop:
        return train_run(prepare_run(recipe, stop=stop))


def train_run(run: RunContext) -> RunResult:
    """Train a prepared run to its end, and write its evaluation, weights, summary and report."""
    with run.resources, run.stop, exits_are_errors():
        run.watch_for_hangs()
        continue_unless_stopped(run)
        with run.memory.phase("train"), garbage_collected_at_steps():
            run_steps(run)
        return RunResult(run.plan.output_dir, finish_run(run))
