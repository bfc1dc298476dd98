"""A changed recipe is refused with what changed and who set it, or accepted by the user."""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_train import Recipe, train
from accel_train.checkpoint.fingerprint import Change, identity_changes
from accel_train.checkpoint.resume import read_state, set_aside
from accel_train.checkpoint.rollback_log import ROLLBACKS
from accel_train.checkpoint.store import facts_of
from accel_train.cli.main import main
from accel_train.core.errors import CheckpointError
from tests.support.runs import (
    Capture,
    answers,
    checkpoint,
    events,
    forget,
    losses,
    metrics,
    recipe_dict,
    tiny_recipe,
    write_corpus,
)
from tests.support.wording import assert_golden

RUN = {"task": "causal-lm", "schedule": {"max_steps": 4}, "model": {"pad_vocab_to_multiple_of": 8}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, trained from `recipe.yaml`; for tests that do not train in it."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_dict(folder, **RUN)))
    train(Recipe.from_yaml(str(folder / "recipe.yaml")))
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to train in: another folder with the same run and the same data."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_dict(tmp_path, **RUN)))
    return tmp_path


def line_of(folder: Path, setting: str) -> str:
    lines = (folder / "recipe.yaml").read_text().splitlines()
    return f"{folder / 'recipe.yaml'}:{1 + next(i for i, line in enumerate(lines) if f'{setting}:' in line)}"


def without_numbers_of_lines(text: str) -> str:
    return re.sub(r"yaml:\d+", "yaml:#", text)


def refused(folder: Path, capsys: Capture, *flags: str) -> list[str]:
    capsys.readouterr()
    assert main(["run", str(folder / "recipe.yaml"), *flags]) == 2
    return [line.removeprefix("error: ").strip() for line in capsys.readouterr().err.splitlines() if "error: " in line]


def test_the_first_line_of_a_resume_says_how_many_steps_its_loss_is_the_mean_of(corpus: Path) -> None:

    def train_to(name: str, every_steps: int, **sections: Any) -> list[dict[str, Any]]:
        log = {"every_steps": every_steps, "progress": False}
        sections |= {"schedule": {"max_steps": 8}, "checkpoint": {"every_steps": 6, "keep": 9}}
        train(tiny_recipe(corpus, output_dir=str(corpus / name), log=log, **RUN | sections))
        return metrics(corpus / name)

    each = [line["loss"] for line in train_to("each", 1)]
    assert [line["step_loss"] for line in metrics(corpus / "each")] == each
    by_four = [(line["loss"], line["step_loss"]) for line in train_to("four", 4)]
    assert by_four == [(pytest.approx(sum(each[:4]) / 4), each[3]), (pytest.approx(sum(each[4:]) / 4), each[7])]
    forget(corpus / "four", 8)
    again = train_to("four", 4)
    assert [(x["step"], x["loss"], x["num_averaged_steps"]) for x in again] == [
        (4, pytest.approx(sum(each[:4]) / 4), 4),
        (8, pytest.approx(sum(each[6:]) / 2), 2),
    ]


@pytest.mark.parametrize(
    "setting, was, value",
    [
        ("batch.global_batch_size", 8, 4),
        ("schedule.max_steps", 4, 9),
        ("seed", 1, 2),
        ("model.config.n_layer", 2, 1),
        ("data.sequence_length", 32, 16),
    ],
)
def test_a_changed_value_is_refused_in_a_line_that_says_who_set_it_then_and_now(
    trained: Path, capsys: Capture, setting: str, was: int, value: int
) -> None:
    said = refused(trained, capsys, f"--{setting}", str(value))
    where = line_of(trained, setting.rpartition(".")[2])
    assert "step-00000004" in said[0]
    assert f"{setting} was {was} ({where}), now {value} (--{setting})" in said
    assert "another output_dir" in said[-1]
    assert "--checkpoint.resume never" in said[-1]
    assert "--accept-changes" in said[-1]


def test_changed_data_is_refused_and_its_files_are_named(copied: Path, capsys: Capture) -> None:
    corpus = copied / "corpus.jsonl"
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[:-1]))
    said = refused(copied, capsys)
    assert len(said) == 3
    assert said[1].startswith("data.fingerprint was ")
    assert said[1].count("data.train") == 2
    assert line_of(copied, "train") in said[1]


def test_a_value_that_follows_from_another_setting_names_that_one(trained: Path, capsys: Capture) -> None:
    said = refused(trained, capsys, "--schedule.num_epochs", "2")
    changed = next(line for line in said if line.startswith("schedule.max_steps was 4"))
    assert_golden(without_numbers_of_lines(changed))


def test_accepted_changes_go_on_and_are_an_event(copied: Path) -> None:
    flags = ("--accept-changes", "--schedule.max_steps", "6", "--seed=2")
    assert main(["run", str(copied / "recipe.yaml"), *flags]) == 0
    assert list(losses(copied / "run")) == [1, 2, 3, 4, 5, 6]
    (event,) = events(copied / "run", "changes_accepted")
    assert event["step"] == 4
    assert event["settings"] == ["schedule.max_steps", "seed"]
    assert event["changes"][1].endswith("now 2 (--seed)")
    assert main(["run", str(copied / "recipe.yaml"), *flags[1:]]) == 0, "the run is now that of the changed recipe"
    assert len(events(copied / "run", "changes_accepted")) == 1


def test_another_optimizer_begins_anew_and_an_average_with_the_weights_of_the_checkpoint(copied: Path) -> None:
    recipe, flags = str(copied / "recipe.yaml"), ("--accept-changes", "--schedule.max_steps")
    last = copied / "run/checkpoints/step-00000004/model.safetensors"
    weights = load_file(last)
    assert main(["run", recipe, *flags, "5", "--optimizer.name", "sgd", "--optimizer.ema_decay", "0.99"]) == 0
    averages = load_file(copied / "run/checkpoints/step-00000005/average.safetensors")
    for name, average in averages.items():
        torch.testing.assert_close(average, weights[name], rtol=0, atol=2e-3)
    assert main(["run", recipe, *flags, "6"]) == 0, "state of SGD is none of AdamW's"
    told = [event["message"] for event in events(copied / "run", "changes_accepted")]
    assert all("; the optimizer" in message for message in told)
    steps = {float(value) for name, value in checkpoint(copied / "run", 6).items() if "step." in name}
    assert steps == {1.0}


def test_a_changed_setting_of_the_training_is_a_line_and_an_event_and_the_run_is_resumed(
    trained: Path, copied: Path, capsys: Capture
) -> None:
    flags = ("--accept-changes", "--schedule.max_steps", "6")
    changed = ("--optimizer.learning_rate", "0.001", "--optimizer.betas", "[0.8, 0.9]", "--evaluate.max_samples=2")
    assert main(["run", str(copied / "recipe.yaml"), *flags, *changed]) == 0
    found = events(copied / "run", "settings_changed")
    where = line_of(copied, "learning_rate").replace(str(copied), str(trained))  # where the checkpoint was written
    said = f"optimizer.learning_rate was 0.003 ({where}), now 0.001 (--optimizer.learning_rate), from step 5 on"
    changed_names = ["evaluate.max_samples", "optimizer.betas", "optimizer.learning_rate"]
    assert [event["setting"] for event in found] == changed_names
    assert found[2]["message"] == said
    assert (found[2]["step"], found[2]["was"], found[2]["now"]) == (4, 0.003, 0.001)
    assert f"step 4: {said}\n" in capsys.readouterr().out
    assert losses(copied / "run")[5] > 0
    assert main(["run", str(copied / "recipe.yaml"), "--schedule.max_steps=8", *flags[:1], *changed]) == 0
    assert len(events(copied / "run", "settings_changed")) == 3, "the checkpoint is now of the changed settings"


def test_a_finished_run_with_a_changed_setting_says_that_it_is_not_trained_and_keeps_its_recipe(
    copied: Path, capsys: Capture
) -> None:
    before = (copied / "run" / "recipe.resolved.yaml").read_text()
    assert main(["run", str(copied / "recipe.yaml"), "--optimizer.learning_rate", "0.001"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "optimizer.learning_rate" in line]
    assert_golden(without_numbers_of_lines(line))
    assert (copied / "run" / "recipe.resolved.yaml").read_text() == before
    assert events(copied / "run", "settings_changed") == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": 10**9}, "step=1000000000, but the checkpoint belongs to step 4 (of 2)"),
        ({"step": "4"}, "step='4': Input should be a valid integer"),
        ({"num_targets_seen": -1}, "num_targets_seen=-1 is out of range"),
        ({"losses": ["nan"]}, "losses.0='nan': Input should be a valid number"),
        ({"rollbacks": [{"number": 1}]}, "rollbacks.0.at_step="),
        ({"unknown": 1}, "unknown is unknown"),
    ],
)
def test_a_state_that_no_run_can_have_is_refused(last: Path, changed: dict[str, Any], said: str) -> None:
    trainer = json.loads((last / "trainer.json").read_text())
    (last / "trainer.json").write_text(json.dumps({**trainer, "state": {**trainer["state"], **changed}}))
    with pytest.raises(CheckpointError) as refused:
        read_state(last)
    assert str(refused.value).startswith(f"{last / 'trainer.json'}: ")
    assert f": {said}" in str(refused.value)


@pytest.fixture
def last(copied: Path) -> Path:
    """The one checkpoint of the copied run."""
    [folder] = (copied / "run" / "checkpoints").iterdir()
    return folder


@pytest.mark.parametrize(
    ("name", "key", "change", "said"),
    [
        ("trainer", "state", None, "trainer.json: "),
        ("model", "transformer.ln_f.bias", Tensor.double, "transformer.ln_f.bias is stored as torch.float64"),
        ("optimizer", "exp_avg.transformer.ln_f.bias", lambda each: each[:4].clone(), "has shape (4,)"),
    ],
)
def test_a_checkpoint_that_is_not_of_the_model_or_of_no_run_is_refused_in_a_line(
    copied: Path, last: Path, capsys: Capture, name: str, key: str, change: Any, said: str
) -> None:
    path = last / (f"{name}.json" if change is None else f"{name}.safetensors")
    if change is None:
        path.write_text(path.read_text().replace('"num_targets_seen": ', '"num_targets_seen": -'))
    else:
        tensors = load_file(path)
        save_file({**tensors, key: change(tensors[key])}, path)
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["files"][path.name] = facts_of(path)
    (last / "manifest.json").write_text(json.dumps(manifest))
    assert main(["run", str(copied / "recipe.yaml")]) == 4
    [line] = answers(capsys.readouterr().err)
    assert line.startswith(f"error: {last}")
    assert said in line


def test_a_run_goes_on_with_its_loss_computed_in_another_way(copied: Path) -> None:
    assert main(["run", str(copied / "recipe.yaml"), "--loss.chunked", "true"]) == 0


def test_an_unchanged_recipe_from_another_file_is_the_same_run(copied: Path) -> None:
    assert main(["run", str(copied / "run" / "recipe.resolved.yaml")]) == 0
    assert events(copied / "run", "changes_accepted") == []


@pytest.mark.parametrize(
    "was, now, expected",
    [
        ({"a": 1}, {"a": 1}, []),
        ({"model": {"n": 1, "m": 2}}, {"model": {"n": 3, "m": 2}}, ["model.n was 1, now 3"]),
        ({"model": {"config": {"n": 1}}}, {"model": {"config": {}}}, ["model.config.n was 1, now not set"]),
        ({"model": {"lora": None}}, {"model": {"lora": {"rank": 8}}}, ["model.lora was null, now {rank: 8}"]),
        ({}, {"loss": {"z_loss": 0.0}}, []),
        ({}, {"loss": {"z_loss": 0.5}}, ["loss was {z_loss: 0.0}, now {z_loss: 0.5}"]),
        ({"loss": {}}, {"loss": {"z_loss": 0.5}}, ["loss.z_loss was 0.0, now 0.5"]),
        ({"loss": {"gone": 1}}, {"loss": {}}, ["loss.gone was 1, now not set"]),
    ],
)
def test_what_differs_is_named_down_to_the_setting(
    tmp_path: Path, was: Mapping[str, Any], now: Mapping[str, Any], expected: list[str]
) -> None:
    recipe = tiny_recipe(tmp_path, **RUN)
    assert [str(change) for change in identity_changes(was, {}, now, {}, recipe)] == expected


def test_a_secret_in_a_changed_value_is_not_told() -> None:
    told = str(Change("data.train", "s3://me:hunter2@host/a", "r.yaml:1", "b", "--data.train"))
    assert "hunter2" not in told
    assert "REDACTED" in told


@pytest.mark.parametrize("killed_after", range(4))
def test_starting_anew_after_a_kill_while_the_old_run_was_set_aside_finds_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / ROLLBACKS).write_text("[]")
    (tmp_path / "metrics.jsonl").write_text("")
    rename, done = Path.rename, iter(range(100))

    def rename_or_die(path: Path, target: Path) -> Path:
        if next(done) == killed_after:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(Path, "rename", rename_or_die)
        set_aside(tmp_path)
    set_aside(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith("previous-")] == []
