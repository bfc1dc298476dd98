"""Train a recipe (`train`) or a program's module (`fit`) from start to end: prepare, run the loop, write results."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from accel_train.core.errors import SettingError
from accel_train.core.format import LARGEST_COUNT
from accel_train.core.state import JsonRecord
from accel_train.engine.run import Door, Extensions, RunContext
from accel_train.recipe.loader import load_recipe, make_recipe
from accel_train.recipe.schema import Recipe
from accel_train.runtime.exit import exits_are_errors
from accel_train.runtime.memory import garbage_collected_at_steps
from accel_train.runtime.private import with_plain_names
from accel_train.runtime.signals import StopRequest
from accel_train.task import load_class
from accel_train.training.finish import finish_run, report_finished
from accel_train.training.loop import run_steps
from accel_train.training.model_selection import continue_unless_stopped, evaluate_untrained
from accel_train.training.setup import prepare_run

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from accel_train.training.callbacks import Callback

_TASK = "accel_train.tasks.module:FittedModule"
_FIT = Door(
    "call fit() again", 'pass resume="auto" to fit()', 'pass checkpoint={"load_best_model_at_end": True} to fit()'
)


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run."""

    output_dir: Path
    summary: JsonRecord
    """Contents of summary.json: final metrics, totals, wall time, peak memory, throughput. Only on the main process."""
    model: nn.Module
    """Trained model with the weights of `model/`. If it is sharded, only on the main process."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation, on all evaluation data."""
        return dict(self.summary.get("eval", {}))

    def predict(self, data: Any, min_score: float | None = None) -> list[JsonRecord]:
        """Return a row of predictions per sample of new data, as `accel-train predict` writes them.

        Args:
            data: a file or folder as for training; or rows: texts, mappings by column name, or a pandas DataFrame.
            min_score: least score of a box. None: the score with the best F1 in the run's evaluation.

        Raises:
            ValueError: the task has no predictions per row, or the data do not fit.
        """
        from accel_train.inference.predict import predict_rows

        return predict_rows(self.output_dir, data, min_score)

    def report(self) -> "Report":
        """Return the report. A notebook displays it; elsewhere it acts as a path."""
        return Report(self.output_dir / "report.html")


@dataclass(frozen=True)
class Report:
    """Page of a run or a comparison. A notebook shows it below its cell."""

    path: Path

    def __str__(self) -> str:
        """Return the path of the page."""
        return str(self.path)

    __fspath__ = __str__

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 800px; border: 0"></iframe>'


@exits_are_errors()
def train(recipe: Recipe | Mapping[str, Any] | str | Path) -> RunResult:
    """Train a recipe, resuming from the newest valid checkpoint of its output folder.

    Args:
        recipe: a recipe, its sections as mappings, a YAML file, or the name of a shipped recipe.

    Raises:
        ValueError: the recipe, the data, or the launcher is wrong. Raised before the model is built.
        TrainingStopped: the guard stopped the run. The last checkpoint is good.
        CheckpointError: a checkpoint could not be read or written.
        Preempted: the run was asked to stop, and saved a checkpoint. Call `train` again to resume.
        RestartNeeded: memory ran out. Call `train` again to continue with smaller micro-batches.
        ExitedEarly: code of the task called `sys.exit()`.
    """
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe)
    elif isinstance(recipe, Mapping):
        recipe = make_recipe(recipe, "train()")
    with StopRequest() as stop:
        return train_run(prepare_run(recipe, extensions=Extensions(door=Door("call train() again")), stop=stop))


def train_run(run: RunContext) -> RunResult:
    """Train a prepared run to its end, and write its evaluation, weights, summary, and report."""
    with run.resources, run.stop, exits_are_errors():
        if run.finished is not None:
            model = report_finished(run, run.finished)
            return RunResult(run.plan.output_dir, dict(run.finished) if run.accelerator.is_main_process else {}, model)
        run.watch_for_hangs()
        continue_unless_stopped(run)
        evaluate_untrained(run)
        with run.memory.phase("train"), garbage_collected_at_steps():
            run_steps(run)
        summary, model = finish_run(run)
        return RunResult(run.plan.output_dir, summary, model)


def _quarter(length: float) -> int:
    """Return a quarter of the run's length, at least 1; return 1 for a length that the recipe rejects."""
    is_length = isinstance(length, int | float) and 0 < length <= LARGEST_COUNT
    return max(1, int(length // 4)) if is_length else 1


@exits_are_errors()
def fit(
    model: nn.Module,
    train_data: "Dataset[Any]",
    *,
    loss: Callable[[nn.Module, Any], Tensor],
    output_dir: str | Path,
    eval_data: "Dataset[Any] | None" = None,
    metrics: Callable[[nn.Module, Any], dict[str, Tensor]] | None = None,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    count_targets: Callable[[Any], int] | None = None,
    loss_is_per_batch: bool = False,
    num_epochs: float | None = None,
    max_steps: int | None = None,
    batch_size: int = 32,
    learning_rate: float = 3e-4,
    resume: Literal["auto", "always", "never"] = "auto",
    callbacks: Sequence["Callback"] = (),
    **sections: Mapping[str, Any],
) -> RunResult:
    """Train any `nn.Module` on a map-style data set, with the same guards, data order, and checkpoints as other runs.

    Call `fit` again to resume from the newest valid checkpoint of `output_dir`, or to get the finished model. If data,
    loss, metrics, model, or settings have changed, `fit` reports the change and trains a new run. The old run moves to
    `previous-N`. Initial weights are not compared. Under `accelerate launch` or torchrun, the same program trains on
    all processes. The module is trained in place. If it is sharded, `result.model` has its weights. Parts that you have
    set to `eval()` stay so (docs/tasks.md). Before the first step, `loss` and `metrics` are tried on a few samples.

    Args:
        model: model on the CPU, in fp32.
        train_data: samples by index. `collate` makes a batch of them.
        loss: `loss(model, batch)` returns one number per sample (1-dim), or their mean (0-dim). With `count_targets`,
            it returns the sum over all targets, or one number per target.
        output_dir: run folder.
        eval_data: samples for evaluation, four times during training and at the end. None: no evaluation.
        metrics: `metrics(model, batch)` returns further numbers by name, each shaped like the loss. They are
            averaged over `eval_data`.
        collate: function that makes a batch of samples. None: as torch's DataLoader.
        count_targets: `count_targets(batch)` returns the number of targets in a batch on the host, for example of
            tokens with a label. The loss of a step is then the mean over all its targets. None: a target per sample.
        loss_is_per_batch: whether a loss that is not a mean over samples is accepted although a step is cut into
            micro-batches or over processes. Its value then depends on the cut.
        num_epochs: passes over the data. Default: 3 if `max_steps` is not given.
        max_steps: optimizer steps, instead of `num_epochs`.
        batch_size: samples per step, over all processes.
        learning_rate: peak of the schedule (warmup and cosine, unless `schedule` sets another).
        callbacks: objects of your classes derived from `accel_train.Callback`.
        resume: auto: resume if nothing has changed. always: resume whatever has changed. never: train a new run.
        sections: sections of a recipe: `optimizer={"name": "muon"}, precision={"mixed_precision": "bf16"}, seed=1`.

    Raises:
        ValueError: a setting or the data is wrong. Raised before the first step.
        TrainingStopped, CheckpointError, Preempted: as in `accel_train.train`.
    """
    length: dict[str, Any] = (
        {"max_steps": max_steps} if max_steps is not None else {"num_epochs": 3 if num_epochs is None else num_epochs}
    )
    if max_steps is not None and num_epochs is not None:
        raise ValueError(f"max_steps={max_steps} and num_epochs={num_epochs} are both given; give one of them")
    own: dict[str, Any] = {
        "task": _TASK,
        "output_dir": str(output_dir),
        "batch": {"global_batch_size": batch_size},
        "optimizer": {"learning_rate": learning_rate},
        "schedule": length,
        "evaluate": {"every_epochs" if max_steps is None else "every_steps": _quarter(*length.values())},
    }
    resumes = {"auto": {"resume": "unchanged"}, "always": {"accept_changes": True}, "never": {"resume": "never"}}
    if resume not in resumes:
        raise ValueError(f"resume={resume!r}: must be one of {', '.join(resumes)}")
    own["checkpoint"] = resumes[resume]
    for name, section in sections.items():
        own[name] = {**own[name], **section} if isinstance(section, Mapping) and name in own else section
    recipe = make_recipe(own, "fit()", arguments=[])
    module = with_plain_names(model)
    if any(each.is_meta for each in chain(module.parameters(), module.buffers())):
        raise SettingError("the model has tensors on the meta device, without values", "Build it on the CPU", "model")
    functions = {"loss": loss, "metrics": metrics, "collate": collate, "count_targets": count_targets}
    task = load_class("task", _TASK, "accel_train.task.Task")(
        module, train_data, eval_data, functions, loss_is_per_batch=loss_is_per_batch
    )
    with StopRequest() as stop, task.remembered():
        result = train_run(prepare_run(recipe, task, Extensions(door=_FIT, callbacks=tuple(callbacks)), stop))
    return replace(result, model=model) if result.model is module else result
