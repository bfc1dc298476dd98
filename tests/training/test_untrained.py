"""The evaluation of the initial weights: a baseline that changes nothing of the run, and outlives a kill."""

from pathlib import Path
from typing import Any

import pytest

from accel_train import Recipe, train
from accel_train.checkpoint.store import folder_of, read_trainer
from accel_train.core.errors import SettingError
from tests.support.comparisons import assert_same_bits
from tests.support.runs import (
    events,
    losses,
    metrics,
    model_of,
    recipe_dict,
    run,
    summary_of,
    tiny_recipe,
    write_recipe_file,
)

AT_START = {"at_start": True, "every_steps": 4}


def trained(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """Train; return the summary."""
    recipe = recipe_dict(folder, output_dir=str(folder / name), **sections)
    summary: dict[str, Any] = train(Recipe.model_validate(recipe)).summary
    return summary


def test_the_baseline_is_the_evaluation_of_weights_that_are_never_updated(corpus: Path) -> None:
    found = trained(corpus, "run", evaluate={**AT_START, "max_samples": 2})
    [line] = metrics(corpus / "run", "eval_untrained")
    still = trained(corpus, "still", optimizer={"learning_rate": 1e-30, "weight_decay": 0.0}, schedule={"max_steps": 1})
    assert line["step"] == 0
    assert found["baselines"]["untrained_loss"] == line["loss"] == still["eval"]["loss"]
    assert line["num_targets"] == still["eval"]["num_targets"]
    assert "untrained_loss" not in still["baselines"]


def test_the_run_is_the_same_to_the_bit_and_the_initial_weights_are_never_the_best(corpus: Path) -> None:
    rising = {"optimizer": {"learning_rate": 1.0}, "batch": {"global_batch_size": 4}}
    weights, summaries = [], []
    for name, section in (("with", AT_START), ("without", {"every_steps": 4})):
        summaries.append(trained(corpus, name, evaluate={**section, "early_stopping_patience": 2}, **rising))
        weights.append(model_of(corpus / name))
    assert losses(corpus / "with") == losses(corpus / "without")
    assert_same_bits(weights[0], weights[1])
    assert summaries[0]["best_step"] == summaries[1]["best_step"] > 0
    assert summaries[0]["best_metric"] > summaries[0]["baselines"]["untrained_loss"]
    assert "untrained" in summaries[0]["not_beaten"]["sentence"]


@pytest.mark.parametrize("every", [2, 0], ids=["checkpoint", "no checkpoint"])
def test_a_killed_run_keeps_its_baseline_or_measures_it_again(corpus: Path, every: int) -> None:
    kill = {"options": {"kill_at": {"step": 5, "rank": 0}}, "checkpoint": {"every_steps": every}}
    path = write_recipe_file(corpus, evaluate=AT_START, **kill)
    run(path, expect=-9)
    before = metrics(corpus / "run", "eval")[0]
    run(write_recipe_file(corpus, evaluate=AT_START, checkpoint={"every_steps": every}))
    assert [line["step"] for line in metrics(corpus / "run", "eval")] == [0, 4, 8, 12]
    after = metrics(corpus / "run", "eval")[0]
    summary = summary_of(corpus / "run")
    assert summary["baselines"]["untrained_loss"] == before["loss"] == after["loss"]
    assert (after["seconds"] == before["seconds"]) is (every > 0)


@pytest.mark.parametrize("changed", [{"data": {"split_seed": 7}}, {"loss": {"label_smoothing": 0.1}}])
def test_numbers_of_other_data_or_another_loss_do_not_count_after_an_accepted_change(
    corpus: Path, changed: dict[str, Any]
) -> None:
    path = write_recipe_file(
        corpus, evaluate={"at_start": True, "every_steps": 2}, options={"term_at": {"step": 5, "rank": 0}}
    )
    run(path, expect=75)
    state = read_trainer(folder_of(corpus / "run" / "checkpoints", 6))["state"]
    assert state["untrained"]
    assert state["best_step"] is not None
    run(write_recipe_file(corpus, evaluate={"at_start": True, "every_steps": 8}, **changed), "--accept-changes")
    summary = summary_of(corpus / "run")
    assert "untrained_loss" not in summary["baselines"]
    assert summary["best_step"] in (8, 12)
    [event] = events(corpus / "run", "changes_accepted")
    assert "no longer count" in event["message"]


def test_without_data_to_evaluate_the_setting_is_refused(corpus: Path) -> None:
    recipe = tiny_recipe(corpus, data={"eval_fraction": 0.0}, evaluate={"at_start": True})
    with pytest.raises(SettingError) as caught:
        train(recipe)
    assert caught.value.settings == ("evaluate.at_start",)
