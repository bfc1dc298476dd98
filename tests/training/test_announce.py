"""The first lines of a run: warnings that apply to it, with a remedy that applies as well."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel_train.task import Facts
from accel_train.training.output import few_held_out
from accel_train.training.train import train
from tests.support.runs import Capture, Settings, events, summary_of, tiny_recipe


def test_few_held_out_samples_are_warned_of_with_what_can_be_done_about_them() -> None:
    labelled = Facts(num_eval=20, num_train_of_label={"a": 90, "b": 90})
    [split] = few_held_out(labelled, None, 0.01)
    assert "5.0%" in split
    assert "data.eval_fraction" in split
    [more] = few_held_out(labelled, None, 0.2)
    assert "eval_fraction" not in more
    [own] = few_held_out(labelled, "test.csv", 0.01)
    assert "data.eval_fraction" not in own, "it is not used with data.eval"
    [regression] = few_held_out(Facts(num_eval=20, problem_type="regression (numbers)"), None, 0.01)
    assert "accuracy" not in regression
    assert few_held_out(labelled.model_copy(update={"num_eval": 100}), None, 0.01) == []
    assert few_held_out(Facts(num_eval=20), None, 0.01) == []


@pytest.mark.parametrize("is_notable", [False, True])
def test_the_screen_has_only_choices_that_differ_from_the_recipe_and_the_log_has_all(
    is_notable: bool, corpus: Path, capsys: Capture
) -> None:
    batch: Settings = {"global_batch_size": 8}
    optimizer: Settings = {"learning_rate": 1e-3}
    if is_notable:
        batch["per_device_batch_size"] = 2
        optimizer["lr_scaling"] = {"rule": "linear", "base_batch_size": 4}
    sections = {"batch": batch, "optimizer": optimizer, "schedule": {"max_steps": 1}}
    folder = train(tiny_recipe(corpus, **sections)).output_dir
    printed = capsys.readouterr().out
    assert ("optimizer.learning_rate" in printed) == is_notable, "0.002 instead of 0.001"
    assert ("0.001 x 8 / 4" in printed) == is_notable
    assert "schedule.warmup_steps" not in printed
    choices = events(folder, "start")[0]["choices"]
    assert {"optimizer.learning_rate", "batch", "schedule.warmup_steps", "precision.mixed_precision"} <= set(choices)
    assert choices == summary_of(folder)["choices"]


def test_a_disk_that_cannot_hold_a_checkpoint_is_said_before_the_first_step(
    corpus: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(corpus, schedule={"max_steps": 1}, checkpoint={"every_steps": 1})
    folder = train(recipe).output_dir
    assert "\ndisk" not in capsys.readouterr().out
    # A fp32 checkpoint, whose header is small, and the final weights.
    written = (folder / "checkpoints", folder / "model")
    taken = sum(file.stat().st_size for part in written for file in part.rglob("*") if file.suffix == ".safetensors")
    for share, is_enough in ((1.1, True), (0.8, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=int(share * taken): SimpleNamespace(free=free))
        train(tiny_recipe(corpus, schedule={"max_steps": 2}, checkpoint={"every_steps": 1, "resume": "never"}))
        said = capsys.readouterr().out
        assert ("\ndisk" in said.partition("step 0:")[0]) == (not is_enough)
