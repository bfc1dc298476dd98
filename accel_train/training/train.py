"""Train a recipe from start to end: prepare the run, run the loop, and write the results."""

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from accel_train.engine.run import RunContext
from accel_train.recipe.schema import Recipe
from accel_train.runtime.exit import exits_are_errors
from accel_train.runtime.memory import garbage_collected_at_steps
from accel_train.runtime.signals import StopRequest
from accel_train.training.finish import finish_run, report_finished
from accel_train.training.loop import run_steps
from accel_train.training.model_selection import continue_unless_stopped
from accel_train.training.setup import prepare_run


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run."""

    output_dir: Path
    summary: dict[str, Any]
    """Contents of summary.json: final metrics, totals, wall time, peak memory, throughput. Only on the main process."""
    model: nn.Module
    """Trained model with the weights of `model/`. If it is sharded, only on the main process."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation, on all evaluation data."""
        return dict(self.summary.get("eval", {}))

    def report(self) -> "Report":
        """Return the report. A notebook displays it; elsewhere it acts as a path."""
        return Report(self.output_dir / "report.html")


@dataclass(frozen=True)
class Report:
    """Page of a run or a comparison. A notebook shows it below its cell."""

    path: Path

    def __fspath__(self) -> str:
        """Return the path of the page."""
        return str(self.path)

    def __str__(self) -> str:
        """Return the path of the page."""
        return str(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 800px; border: 0"></iframe>'


@exits_are_errors()
def train(recipe: Recipe) -> RunResult:
    """Train a recipe, resuming from the newest valid checkpoint of its output folder.

    Raises:
        ValueError: the recipe, the data, or the launcher is wrong. Raised before the model is built.
        TrainingStopped: the guard stopped the run. The last checkpoint is good.
        CheckpointError: a checkpoint could not be read or written.
        Preempted: the run was asked to stop, and saved a checkpoint. Call `train` again to resume.
        RestartNeeded: memory ran out. Call `train` again to continue with smaller micro-batches.
        ExitedEarly: code of the task called `sys.exit()`.
    """
    with StopRequest() as stop:
        return train_run(prepare_run(recipe, stop=stop))


def train_run(run: RunContext) -> RunResult:
    """Train a prepared run to its end, and write its evaluation, weights, summary, and report."""
    with run.resources, run.stop, exits_are_errors():
        if run.finished is not None:
            model = report_finished(run, run.finished)
            return RunResult(run.plan.output_dir, dict(run.finished) if run.accelerator.is_main_process else {}, model)
        run.watch_for_hangs()
        continue_unless_stopped(run)
        with run.memory.phase("train"), garbage_collected_at_steps():
            run_steps(run)
        summary, model = finish_run(run)
        return RunResult(run.plan.output_dir, summary, model)
