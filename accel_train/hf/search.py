"""`Trainer.hyperparameter_search`: a run folder and a new model of `model_init` for each trial of Optuna."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.integrations.integration_utils import run_hp_search_optuna

from accel_train.core.errors import check_packages
from accel_train.hf.argument_table import argument_error, name_of

if TYPE_CHECKING:
    from accel_train.hf import Trainer


def search(trainer: "Trainer", backend: Any, n_trials: int, direction: str | list[str], study: dict[str, Any]) -> Any:
    """Train once per trial, in `output_dir/run-N`, and return the best trial as transformers' `BestRun`.

    Raises:
        SettingError: `model_init` is missing, Optuna is not installed, or another backend is named.
    """
    try:
        name = name_of(backend)
        if name not in ("None", "optuna"):
            raise argument_error("only optuna is supported", "Remove it.", backend=name)
        check_packages(["optuna"], "optuna", "hyperparameter_search")
        if trainer.model_init is None:
            raise argument_error("a search needs it", "Each trial starts with a new model.", "model_init")
        return run_hp_search_optuna(trainer, n_trials, direction, **study)
    finally:
        trainer.hp_space = None


@contextmanager
def trial_arguments(trainer: "Trainer", trial: Any) -> Iterator[None]:
    """Give the trainer the arguments of a trial inside the block: the trial's values and a separate run folder.

    Raises:
        SettingError: a value does not belong to an argument, or no search is running.
    """
    if trial is None:
        yield
        return
    if trainer.hp_space is None:
        raise argument_error("only for a search", "Call hyperparameter_search.", "trial")
    kept, args = trainer.args, copy.copy(trainer.args)
    for name, value in trainer.hp_space(trial).items():
        if not hasattr(args, name):
            raise argument_error("not a field of the arguments", "Correct hp_space.", name)
        before = getattr(args, name)
        setattr(args, name, value if before is None else type(before)(value))
    name = f"run-{trial.number}" if trainer.hp_name is None else trainer.hp_name(trial)
    args.output_dir = str(Path(args.output_dir) / name)
    trainer.args, trainer.trial = args, trial
    try:
        yield
    finally:
        trainer.args, trainer.trial = kept, None


def report_to_search(trainer: "Trainer", metrics: Mapping[str, float]) -> None:
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


def new_model(init: Any, trial: Any) -> nn.Module:
    """Return a new model of `model_init`, called with the trial of a search if it takes one.

    Both `model_init(trial)` and `model_init(trial=None)` take a trial.

    Raises:
        SettingError: `model_init` returned None.
    """
    takes_trial = any(each.default in (None, each.empty) for each in inspect.signature(init).parameters.values())
    model: nn.Module | None = init(trial) if takes_trial else init()
    if model is None:
        raise argument_error("returned None", "Return a model.", "model_init")
    return model
