"""`Trainer.hyperparameter_search`: a run folder and a new model of `model_init` for each trial of Optuna."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.integrations.integration_utils import run_hp_search_optuna
from transformers.trainer_utils import default_compute_objective, default_hp_space_optuna

if TYPE_CHECKING:
    from accel_train.hf import Trainer


def hyperparameter_search(
    trainer: "Trainer",
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], float] | None = None,
    n_trials: int = 20,
    direction: str | list[str] = "minimize",
    backend: Any = None,
    hp_name: Callable[[Any], str] | None = None,
    **kwargs: Any,
) -> Any:
    """Train once per trial, in `output_dir/run-N`, and return the best trial as transformers' `BestRun`.

    Args:
        hp_space: function from a trial to values of TrainingArguments by name. None: transformers' default space.
        compute_objective: function from an evaluation's metrics to the objective. None: the loss, or the sum of the
            metrics.
        direction: minimize or maximize, or a list for several objectives.
        kwargs: arguments of `optuna.create_study` (sampler, pruner, ...), and timeout, n_jobs, catch.

    Raises:
        ValueError: `model_init` is missing, Optuna is not installed, or another backend is named.
    """
    name = getattr(backend, "value", backend)
    if name not in (None, "optuna"):
        raise ValueError(f"hyperparameter_search(backend={name!r}): only optuna; leave it out")
    if find_spec("optuna") is None:
        raise ValueError(
            "hyperparameter_search needs the package optuna; install it: pip install 'accel-train[optuna]'"
        )
    if trainer.model_init is None:
        raise ValueError("hyperparameter_search needs a model_init: each trial begins with a new model")
    trainer.hp_space, trainer.hp_name = hp_space or default_hp_space_optuna, hp_name
    trainer.compute_objective = compute_objective or default_compute_objective
    try:
        return run_hp_search_optuna(trainer, n_trials, direction, **kwargs)
    finally:
        trainer.hp_space = None


@contextmanager
def trial_arguments(trainer: "Trainer", trial: Any) -> Iterator[None]:
    """Give the trainer the arguments of a trial inside the block: the trial's values and a separate run folder.

    Raises:
        ValueError: a value does not belong to an argument, or no search is running.
    """
    if trial is None:
        yield
        return
    if trainer.hp_space is None:
        raise ValueError("train(trial=...) belongs to hyperparameter_search; call that")
    kept, args = trainer.args, copy.copy(trainer.args)
    for name, value in trainer.hp_space(trial).items():
        if not hasattr(args, name):
            raise ValueError(f"hyperparameter_search: hp_space gives {name!r}, which is no field of the arguments")
        before = getattr(args, name)
        setattr(args, name, value if before is None else type(before)(value))
    name = f"run-{trial.number}" if trainer.hp_name is None else trainer.hp_name(trial)
    args.output_dir = str(Path(args.output_dir) / name)
    trainer.args, trainer.trial = args, trial
    try:
        yield
    finally:
        trainer.args, trainer.trial = kept, None


def report_to_search(trainer: "Trainer", metrics: dict[str, Any]) -> None:
    """Report an evaluation within a trial to the search.

    Raises:
        optuna.TrialPruned: the search stops the trial early.
    """
    if trainer.trial is None:
        return
    trainer.objective = trainer.compute_objective(dict(metrics))
    # Only the main process has a study.
    study = getattr(trainer.trial, "study", None)
    if study is not None and len(study.directions) == 1:
        trainer.trial.report(trainer.objective, trainer.state.global_step)
        if trainer.args.world_size == 1 and trainer.trial.should_prune():
            import optuna

            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            raise optuna.TrialPruned


def call_model_init(trainer: "Trainer", trial: Any = None) -> nn.Module:
    """Return a new model of `model_init`, called with the trial of a search if it takes one.

    Both `model_init(trial)` and `model_init(trial=None)` take a trial.

    Raises:
        ValueError: `model_init` returned None.
    """
    init: Any = trainer.model_init
    takes_trial = any(each.default in (None, each.empty) for each in inspect.signature(init).parameters.values())
    model: Any = init(trial) if takes_trial else init()
    if model is None:
        raise ValueError("model_init returned None; it has to return a model")
    return model
