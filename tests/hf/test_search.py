"""hyperparameter_search: a run for each trial, the best one returned."""

from pathlib import Path
from typing import Any

import optuna
import pytest

from accel_train.core.json_io import load_object
from tests.support.hf_models import Plain, made, plain_rows, refused


def searcher(folder: Path, **args: Any) -> Any:
    given = {"eval_dataset": plain_rows(16, seed=3), "model_init": Plain, "max_steps": 2, "learning_rate": 1e-2, **args}
    return made(folder, None, plain_rows(24), **given)


def test_each_trial_is_a_run_of_its_own_and_the_best_one_is_returned(tmp_path: Path) -> None:
    trainer = searcher(tmp_path)
    rates = {"learning_rate": [1e-6, 0.5, 1e-3]}
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates["learning_rate"])},
        n_trials=3,
        sampler=optuna.samplers.GridSampler(rates, seed=0),
        hp_name=lambda trial: f"rate-{trial.params['learning_rate']}",
    )
    assert best.hyperparameters == {"learning_rate": 1e-3}
    for rate in rates["learning_rate"]:
        summary = load_object(tmp_path / f"rate-{rate}" / "summary.json")
        assert summary["status"] == "finished"
    assert trainer.args.learning_rate == 1e-2
    assert trainer.args.output_dir == str(tmp_path)


def test_a_trial_that_is_not_worth_going_on_is_pruned(tmp_path: Path) -> None:
    trainer = searcher(tmp_path, eval_strategy="steps", eval_steps=1)
    pruner = optuna.pruners.ThresholdPruner(upper=0.0)
    study_like = {"pruner": pruner, "storage": f"sqlite:///{tmp_path}/study.db", "study_name": "one"}
    with pytest.raises(ValueError, match="Record"):  # a best trial does not exist
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0.1, 0.2)}, n_trials=1, **study_like
        )
    study = optuna.load_study(study_name="one", storage=study_like["storage"])
    assert [trial.state.name for trial in study.trials] == ["PRUNED"]


def test_what_cannot_be_searched_is_refused_by_name(tmp_path: Path) -> None:
    for setting, given in (
        ("backend", {"backend": "ray"}),
        ("lerning_rate", {"hp_space": lambda _: {"lerning_rate": 1}}),
    ):
        refused(lambda given=given: searcher(tmp_path).hyperparameter_search(n_trials=1, **given), setting)
    refused(made(tmp_path, Plain()).hyperparameter_search, "model_init")
    refused(lambda: searcher(tmp_path).train(trial=object()), "trial")
