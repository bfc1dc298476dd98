"""What a step has to learn from: a batch without targets is skipped, data without any stops the run, and no count is
negative.
"""

from pathlib import Path
from typing import Any

import pytest

from accel_train import Recipe
from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.core.errors import DataError
from accel_train.runtime.exit import exit_code
from accel_train.training.setup import prepare_run
from accel_train.training.train import train_run
from tests.support.processes import run_forked
from tests.support.runs import Settings, events, losses, metrics, recipe_dict, steps_of, summary_of, write_recipe_file
from tests.support.tasks.number_faults import Uncounted
from tests.support.wording import raises_golden

TASK = "tests.support.tasks.number_faults:Uncounted"


def recipe_for(folder: Path, num_samples: int = 64, max_steps: int = 12, **options: Any) -> Settings:
    sections: Settings = {
        "task": TASK,
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.5},
        "schedule": {"max_steps": max_steps},
        "data": {"shuffle": False},
        "options": {"num_samples": num_samples, **options},
    }
    return recipe_dict(folder, windows=False, **sections)


def weights_after(recipe: dict[str, Any]) -> dict[str, Any]:
    run = prepare_run(Recipe.model_validate(recipe), Uncounted())
    train_run(run)
    return {name: weight.detach().clone() for name, weight in run.strategy.inner.model.named_parameters()}


@pytest.mark.parametrize("targets", [-3, 2.5, "many"])
def test_a_batch_whose_num_targets_is_no_count_stops_before_a_step(tmp_path: Path, targets: Any) -> None:
    with raises_golden(DataError) as caught:
        weights_after(recipe_for(tmp_path, targets=targets))
    assert exit_code(caught.value) == 2
    assert not losses(tmp_path / "run")


@pytest.mark.parametrize("classes", [False, True])
def test_a_step_without_a_target_changes_no_weight_and_is_named(tmp_path: Path, classes: bool) -> None:
    """The third step reads samples 16 to 23; with it the weights are those of the run that ends
    before it, to the bit.
    """
    before = weights_after(recipe_for(tmp_path / "before", max_steps=2, classes=classes))
    after = weights_after(recipe_for(tmp_path / "after", max_steps=3, ignored=list(range(16, 24)), classes=classes))
    assert all(before[name].equal(after[name]) for name in before)
    [skipped] = events(tmp_path / "after" / "run", "skip")
    assert skipped["step"] == 3
    assert "has a target" in skipped["message"]


def assert_third_step_leaves_no_trace(folder: Path, processes: int, recipe: Settings, num_targets: int) -> None:
    """Weights, running statistics, moments, step counts, and averages of steps 2 and 3 are the same bits; step 4's
    are not.
    """
    run = Path(recipe.pop("output_dir"))
    recipe["checkpoint"] = {"every_steps": 1, "keep": 9}
    preload = ["deepspeed"] if recipe.get("parallel", {}).get("strategy") == "deepspeed" else []
    words = ["run", str(write_recipe_file(folder, windows=False, **recipe))]
    forked = run_forked(words, processes, folder=folder / "processes", preload=preload)
    forked.expect(0)
    kinds = ("model", "optimizer", *(("average",) if recipe["optimizer"].get("ema_decay") else ()))
    second, third, fourth = (
        {
            f"{kind}:{name}": stored.read(name).numpy().tobytes()
            for kind in kinds
            if (stored := CheckpointReader(run / "checkpoints" / f"step-{step:08d}", kind)).shapes
            for name in stored.shapes
        }
        for step in (2, 3, 4)
    )
    assert second == third
    assert second.keys() == fourth.keys()
    assert second != fourth
    assert steps_of(run, "skip") == [3]
    assert summary_of(run)["skipped_steps"] == 1
    found = {line["step"]: line for line in metrics(run)}
    assert (found[3]["skipped"], found[3]["loss"], found[3]["num_targets"]) == (True, "NaN", num_targets)
    assert all(0.1 < found[step]["loss"] < 5 for step in (1, 2, 4))


def with_sections(recipe: Settings, sections: Settings) -> Settings:
    return {**recipe, **{name: {**recipe.get(name, {}), **section} for name, section in sections.items()}}


@pytest.mark.parametrize(
    ("processes", "sections"),
    [
        (1, {"optimizer": {"name": "muon"}}),
        (1, {"optimizer": {"name": "adafactor", "options": {}}}),
        (1, {"precision": {"mixed_precision": "bf16"}, "optimizer": {"ema_decay": 0.9}}),
        (2, {"optimizer": {"ema_decay": 0.9}}),
        (2, {"parallel": {"strategy": "fsdp2"}, "optimizer": {"name": "lion"}}),
        (2, {"parallel": {"strategy": "deepspeed", "zero_stage": 2}}),
    ],
    ids=["muon", "adafactor", "bf16 and average", "ddp and average", "fsdp2 and lion", "zero"],
)
def test_ignored_labels_of_a_cross_entropy_leave_no_trace_in_any_layout(
    tmp_path: Path, processes: int, sections: Settings
) -> None:
    recipe = recipe_for(tmp_path, max_steps=4, ignored=list(range(16, 24)), classes=True)
    assert_third_step_leaves_no_trace(tmp_path, processes, with_sections(recipe, sections), num_targets=0)


@pytest.mark.parametrize(
    ("processes", "sections"),
    [
        (1, {}),
        (2, {"optimizer": {"ema_decay": 0.9}}),
        (2, {"batch": {"gradient_accumulation_steps": 2}}),
        (2, {"parallel": {"strategy": "fsdp2"}}),
        (2, {"parallel": {"strategy": "deepspeed", "zero_stage": 2}}),
    ],
    ids=["alone", "ddp and average", "accumulation", "fsdp2", "zero"],
)
def test_a_loss_that_is_not_finite_on_one_process_and_has_gradients_of_zero_leaves_no_trace(
    tmp_path: Path, processes: int, sections: Settings
) -> None:
    ignored, parts = list(range(16 + 8 * (processes - 1) // 2, 24)), 1 + ("batch" in sections)
    options = {"ignored": ignored, "classes": True, "of_mean": True, "targets": 8 // processes // parts}
    recipe = recipe_for(tmp_path, max_steps=4, **options)
    assert_third_step_leaves_no_trace(tmp_path, processes, with_sections(recipe, sections), num_targets=8)


def test_a_line_over_several_steps_averages_those_with_targets(tmp_path: Path) -> None:
    """Of the steps 1 to 4, the third has none; by lines of one step the mean of the others is known."""
    ignored = list(range(16, 24))
    for name, every_steps in (("each", 1), ("four", 4)):
        recipe = recipe_for(tmp_path / name, max_steps=4, ignored=ignored, classes=True)
        weights_after({**recipe, "log": {"every_steps": every_steps, "progress": False}})
    each = losses(tmp_path / "each" / "run")
    assert losses(tmp_path / "four" / "run")[4] == pytest.approx((each[1] + each[2] + each[4]) / 3, rel=1e-6)


def test_a_run_that_was_killed_between_steps_without_targets_is_stopped_at_its_end(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, max_steps=3, ignored=list(range(64)), classes=True)
    recipe["checkpoint"] = {"every_steps": 1}
    for _ in range(2):
        run = prepare_run(Recipe.model_validate(recipe), Uncounted())
        run.guard._most_without_targets = 9  # as of a guard that has forgotten the steps before a kill
        with raises_golden(DataError) as caught:
            train_run(run)
        assert exit_code(caught.value) == 2
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize(
    ("num_samples", "max_steps"),
    [(64, 12), (16, 12), (64, 3)],
    ids=["more in a row than may be skipped", "an epoch", "the whole run"],
)
def test_data_without_any_target_stops_the_run(tmp_path: Path, num_samples: int, max_steps: int, classes: bool) -> None:
    recipe = recipe_for(tmp_path, num_samples, max_steps, ignored=list(range(num_samples)), classes=classes)
    with raises_golden(DataError) as caught:
        weights_after(recipe)
    assert exit_code(caught.value) == 2
    assert not (tmp_path / "run" / "model").exists()


def test_evaluation_data_without_any_target_has_no_loss(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, evaluates=True)
    run = prepare_run(Recipe.model_validate(recipe), task := Uncounted())
    task.ignored = set(range(64))
    from accel_train.training.model_selection import evaluate_run

    with run.resources, raises_golden(DataError):
        evaluate_run(run)


def test_targets_on_one_process_are_enough_for_a_step_and_none_on_any_stops_all(tmp_path: Path) -> None:
    """Of two processes; samples of even number are read by the first one, or a whole half of each batch."""
    for name, ignored, codes in (
        ("half", [index for index in range(64) if index % 8 < 4], [0, 0]),
        ("all", list(range(64)), [2, 2]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        sections = {key: value for key, value in recipe_for(folder, ignored=ignored).items() if key != "output_dir"}
        recipe = write_recipe_file(folder, windows=False, **sections)
        forked = run_forked(["run", str(recipe)], 2, folder=folder / "processes")
        assert forked.wait() == codes, forked.stderr(0)
        assert bool(events(folder / "run", "skip")) == (name == "all")
        told = forked.stderr(0) + forked.stderr(1)
        assert told.count("error: ") == (name == "all"), told
