"""What a step has to learn from: a batch without targets is skipped, data without any stops the run, and no count is negative."""

from pathlib import Path
from typing import Any

import pytest

from accel_train import Recipe
from accel_train.core.errors import DataError
from accel_train.runtime.exit import exit_code
from accel_train.training.setup import prepare_run
from accel_train.training.train import train_run
from tests.support.processes import run_forked
from tests.support.runs import events, losses, recipe_dict, write_recipe_file
from tests.support.tasks.number_faults import Uncounted

TASK = "tests.support.tasks.number_faults:Uncounted"


def recipe_for(folder: Path, num_samples: int = 64, max_steps: int = 12, **options: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "task": TASK,
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.5},
        "schedule": {"max_steps": max_steps},
        "data": {"shuffle": False},
        "options": {"num_samples": num_samples, **options},
    }
    return recipe_dict(folder, **sections)


def weights_after(recipe: dict[str, Any]) -> dict[str, Any]:
    run = prepare_run(Recipe.model_validate(recipe), Uncounted())
    train_run(run)
    return {name: weight.detach().clone() for name, weight in run.strategy.inner.model.named_parameters()}


@pytest.mark.parametrize("targets", [-3, 2.5, "many"])
def test_a_batch_whose_num_targets_is_no_count_stops_before_a_step(tmp_path: Path, targets: Any) -> None:
    with pytest.raises(DataError, match=rf"num_targets of a batch is .*{targets}.*at least 0; let `collate`") as caught:
        weights_after(recipe_for(tmp_path, targets=targets))
    assert exit_code(caught.value) == 2
    assert not losses(tmp_path / "run")


def test_a_step_without_a_target_changes_no_weight_and_is_named(tmp_path: Path) -> None:
    """The third step reads samples 16 to 23; with it the weights are those of the run that ends before it, to the bit."""
    before = weights_after(recipe_for(tmp_path / "before", max_steps=2))
    after = weights_after(recipe_for(tmp_path / "after", max_steps=3, ignored=list(range(16, 24))))
    assert all(before[name].equal(after[name]) for name in before)
    [skipped] = events(tmp_path / "after" / "run", "skip")
    assert skipped["message"] == "step 3: no sample of the global batch has a target, so the update was not applied"


@pytest.mark.parametrize(
    ("num_samples", "max_steps", "step"),
    [(64, 12, 6), (16, 12, 2), (64, 3, 3)],
    ids=["more in a row than may be skipped", "an epoch", "the whole run"],
)
def test_data_without_any_target_stops_the_run(tmp_path: Path, num_samples: int, max_steps: int, step: int) -> None:
    recipe = recipe_for(tmp_path, num_samples, max_steps, ignored=list(range(num_samples)))
    with pytest.raises(
        DataError, match=rf"step {step}: no sample .*: {step} in a row\. The labels .*check the data"
    ) as caught:
        weights_after(recipe)
    assert exit_code(caught.value) == 2
    assert not (tmp_path / "run" / "model").exists()


def test_evaluation_data_without_any_target_has_no_loss(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, evaluates=True)
    run = prepare_run(Recipe.model_validate(recipe), task := Uncounted())
    task.ignored = set(range(64))
    from accel_train.training.model_selection import evaluate_run

    with run.resources, pytest.raises(DataError, match="none of the 64 evaluation samples has a target"):
        evaluate_run(run)


def test_targets_on_one_process_are_enough_for_a_step_and_none_on_any_stops_all(tmp_path: Path) -> None:
    """Of two processes; samples of even number are read by the first one, or a whole half of each batch."""
    for name, ignored, codes in (
        ("half", [index for index in range(64) if index % 8 < 4], [0, 0]),
        ("all", list(range(64)), [2, 2]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        recipe = write_recipe_file(
            folder, **{key: value for key, value in recipe_for(folder, ignored=ignored).items() if key != "output_dir"}
        )
        forked = run_forked(["run", str(recipe)], 2, folder=folder / "processes")
        assert forked.wait() == codes, forked.stderr(0)
        assert bool(events(folder / "run", "skip")) == (name == "all")
        told = forked.stderr(0) + forked.stderr(1)
        assert told.count("error: ") == (name == "all"), told
