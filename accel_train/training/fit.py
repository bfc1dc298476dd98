"""Train a program's own module: `fit(model, train_data, loss=...)`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from accel_train.core.format import LARGEST_COUNT
from accel_train.recipe.loader import make_recipe
from accel_train.runtime.exit import exits_are_errors
from accel_train.runtime.private import with_plain_names
from accel_train.runtime.signals import StopRequest
from accel_train.task import load_class
from accel_train.training.setup import prepare_run
from accel_train.training.train import RunResult, train_run

if TYPE_CHECKING:
    from torch.utils.data import Dataset

_TASK = "accel_train.tasks.module:FittedModule"


@exits_are_errors()
def _quarter(length: float) -> int:
    """Return a quarter of the run's length, at least 1; return 1 for a length that the recipe rejects."""
    is_length = isinstance(length, int | float) and 0 < length <= LARGEST_COUNT
    return max(1, int(length // 4)) if is_length else 1


def fit(
    model: nn.Module,
    train_data: "Dataset[Any]",
    *,
    loss: Callable[[nn.Module, Any], Tensor],
    output_dir: str | Path,
    eval_data: "Dataset[Any] | None" = None,
    metrics: Callable[[nn.Module, Any], dict[str, Tensor]] | None = None,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    num_epochs: float | None = None,
    max_steps: int | None = None,
    batch_size: int = 32,
    learning_rate: float = 3e-4,
    resume: Literal["auto", "always", "never"] = "auto",
    **sections: Mapping[str, Any],
) -> RunResult:
    """Train any `nn.Module` on a map-style data set, with the same guards, data order, and checkpoints as other runs.

    Call `fit` again to resume from the newest valid checkpoint of `output_dir`, or to get the finished model. If data,
    loss, metrics, model, or settings have changed, `fit` reports the change and trains a new run. The old run moves to
    `previous-N`. Initial weights are not compared. Under `accelerate launch` or torchrun, the same program trains on
    all processes. The module is trained in place. If it is sharded, `result.model` has its weights.

    Args:
        model: model on the CPU, in fp32.
        train_data: samples by index. `collate` makes a batch of them.
        loss: `loss(model, batch)` returns one number per sample (1-dim), or their mean (0-dim).
        output_dir: run folder.
        eval_data: samples for evaluation, four times during training and at the end. None: no evaluation.
        metrics: `metrics(model, batch)` returns further numbers by name, each shaped like the loss. They are
            averaged over `eval_data`.
        collate: function that makes a batch of samples. None: as torch's DataLoader.
        num_epochs: passes over the data. Default: 3 if `max_steps` is not given.
        max_steps: optimizer steps, instead of `num_epochs`.
        batch_size: samples per step, over all processes.
        learning_rate: peak of the schedule (warmup and cosine, unless `schedule` sets another).
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
        "evaluate": {
            "every_epochs" if max_steps is None else "every_steps": _quarter(*length.values()),
        },
    }
    resumes = {"auto": {"resume": "unchanged"}, "always": {"accept_changes": True}, "never": {"resume": "never"}}
    if resume not in resumes:
        raise ValueError(f"resume={resume!r}: must be one of {', '.join(resumes)}")
    own["checkpoint"] = resumes[resume]
    for name, section in sections.items():
        own[name] = {**own[name], **section} if isinstance(section, Mapping) and name in own else section
    recipe = make_recipe(own, "fit()", arguments=[])
    module = with_plain_names(model)
    task = load_class("task", _TASK, "accel_train.task.Task")(
        module, train_data, eval_data, {"loss": loss, "metrics": metrics, "collate": collate}
    )
    with StopRequest() as stop, task.remembered():
        result = train_run(prepare_run(recipe, task, stop=stop))
    return replace(result, model=model) if result.model is module else result
