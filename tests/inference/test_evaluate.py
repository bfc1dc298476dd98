"""`accel-train evaluate`: the numbers a run ended with, on other data too, on any number of processes."""

import fcntl
import io
import os
import pty
import shutil
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from accel_train.cli.main import main
from accel_train.core.json_io import load_object
from accel_train.core.metric_names import label as label_of
from accel_train.inference.evaluate import short_name
from accel_train.inference.finished_run import DataNotFound, changes_of, counted, open_run
from accel_train.metrics.baselines import format_scores
from accel_train.task import Facts
from accel_train.tasks.causal_lm import task as causal_lm
from tests.inference.conftest import Cli
from tests.support import runs as runs
from tests.support.wording import assert_golden, raises_golden

DIGITS: dict[str, Any] = {
    "task": "image-classification",
    "output_dir": "digits",
    "model": {
        "config": {
            "model_type": "resnet",
            "num_channels": 1,
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
        }
    },
    "data": {"train": "digits", "eval_fraction": 0.1, "image_size": 16, "num_workers": 0},
    "batch": {"global_batch_size": 32},
    "optimizer": {"learning_rate": 1e-2, "ema_decay": 0.9},
    "schedule": {"max_steps": 20},
    "evaluate": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
    "log": {"progress": False},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, `digits` and `text`, and their data."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("digits.yaml").write_text(yaml.safe_dump(DIGITS))
        assert main(["run", "digits.yaml"]) == 0
        runs.write_corpus(folder)
        text = runs.write_recipe_file(
            folder, task="causal-lm", output_dir=str(folder / "text"), tokenizer={"train_bpe": {"vocab_size": 300}}
        )
        assert main(["run", str(text), "--schedule.max_steps", "3"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that folder."""
    monkeypatch.chdir(finished)


def test_documents_that_see_each_other_are_refused(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    left = Path("text/evaluation.json").read_text()
    cli("evaluate text --data.mask_documents true")
    Path("text/evaluation.json").write_text(left)

    def causal(model: Any, batch: Any, *, compiled: bool) -> Any:
        length = batch["input_ids"].shape[1]
        return torch.ones(1, 1, length, length, dtype=torch.bool).tril()

    monkeypatch.setattr(causal_lm, "document_mask", causal)
    # A kept proof belongs to the code as it was.
    assert "data.mask_documents" in cli("evaluate text --data.mask_documents true --data.cache_dir other", code=2)


@pytest.mark.parametrize("name", ["digits", "text"])
def test_on_its_own_data_a_run_prints_the_very_numbers_it_ended_with(name: str, cli: Cli) -> None:
    left = Path(name, "evaluation.json").read_text()
    Path(name, "evaluation.json").unlink()
    printed = cli("evaluate", name)
    summary = load_object(Path(name, "summary.json"))
    assert printed.startswith(format_scores(summary["eval"], summary["baselines"]))
    assert name == "text" or "f1-score" in printed
    assert Path(name, "evaluation.json").read_text() == left


def test_two_processes_give_the_numbers_of_one_to_the_last_digit() -> None:
    alone = Path("digits/evaluation.json").read_text()
    Path("digits/evaluation.json").unlink()
    done = runs.run_forked_command(["evaluate", "digits"], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Path("digits/evaluation.json").read_text() == alone
    assert done.stdout.count("macro avg") == 1  # one process speaks


def test_a_language_model_is_evaluated_on_another_text_with_its_own_tokenizer(
    cli: Cli,
) -> None:
    Path("other.txt").write_text("step1 loss2 token3 " * 300)
    own = Path("text/evaluation.json").read_text()
    cli("evaluate text --data other.txt")
    written = load_object(Path("text/evaluation-other.json"))
    assert written["data"] == "other.txt"
    assert 0 < written["metrics"]["loss"] < 10
    assert Path("text/evaluation.json").read_text() == own


def test_other_images_keep_the_classes_of_the_model_whatever_they_hold(cli: Cli) -> None:
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    for label in (7, 3):  # two of ten classes, in another order than their ids
        for number, image in enumerate(found.images[found.target == label][:5]):
            path = Path("two", str(label), f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 255 / 16).astype(np.uint8)).save(path)
    cli("evaluate digits two")
    details = load_object(Path("digits/evaluation-two.json"))["details"]["classification"]
    assert details["label_names"] == [str(digit) for digit in range(10)]
    assert [sum(row) for row in details["confusion_matrix"]] == [0, 0, 0, 5, 0, 0, 0, 5, 0, 0]


def test_settings_of_data_and_evaluation_are_taken(cli: Cli) -> None:
    metrics = cli.result("evaluate digits --evaluate.metrics [auroc] --batch.per_device_eval_batch_size 7")["metrics"]
    plain = cli.result("evaluate digits")["metrics"]
    assert metrics.pop("auroc") > 0
    assert metrics == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        "nowhere",
        "cache",
        "unfinished",
        "digits --data 0123456789.csv",
        "digits --optimizer.learning_rate 1",
        "digits --data.train x",
        "digits --data.image_sise 8",
        "digits --dada x",
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(arguments: str, cli: Cli) -> None:
    Path("unfinished").mkdir(exist_ok=True)
    Path("unfinished/recipe.resolved.yaml").write_text(Path("digits/recipe.resolved.yaml").read_text())
    assert_golden(cli.refusal(f"evaluate {arguments}"))
    assert cli.out == ""


def test_a_run_that_held_out_nothing_asks_for_data(cli: Cli) -> None:
    recipe = Path("text/recipe.resolved.yaml")
    before = recipe.read_text()
    recipe.write_text(before.replace("eval_fraction: 0.1", "eval_fraction: 0.0"))
    try:
        assert_golden(cli.refusal("evaluate text"))
    finally:
        recipe.write_text(before)


def test_numbers_of_test_time_augmentation_are_printed_by_the_run_and_by_evaluate(
    cli: Cli,
) -> None:
    flags = "--schedule.max_steps 2 --evaluate.test_time_augmentation.horizontal_flip true"
    for words in (f"run digits.yaml --output_dir augmented {flags}", "evaluate augmented"):
        printed = cli(words)
        found = load_object(Path("augmented/evaluation.json"))["details"]["test_time_augmentation"]
        assert_golden(next(line for line in printed.splitlines() if "test-time" in line))
        for name, value in found["with"].items():
            start = f"  {label_of(name):24}"
            [line] = [line for line in printed.splitlines() if line.startswith(start) and "without" in line]
            assert line[26:].split() == [f"{value:.4f}", "(without:", f"{found['without'][name]:.4f})"]


def test_a_run_that_was_moved_is_used_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)
    runs.write_corpus(home)
    data = {"train": "corpus.jsonl", "cache_dir": "cache"}
    recipe = runs.write_recipe_file(home, task="causal-lm", output_dir="run", data=data, schedule={"max_steps": 1})
    cli("run", recipe.name)
    ended_with = load_object(Path("run/summary.json"))["eval"]["loss"]
    Path("run").rename(away / "moved")
    monkeypatch.chdir(away)
    cli("evaluate moved")
    assert load_object(Path("moved/evaluation.json"))["metrics"]["loss"] == ended_with
    assert not (away / "cache").exists()
    cli("generate moved --max-new-tokens 1")
    (home / "corpus.jsonl").rename(away / "corpus.jsonl")
    cli("evaluate moved")
    (away / "corpus.jsonl").unlink()
    error = cli.refusal("evaluate moved")
    with raises_golden(DataNotFound) as caught:
        open_run(Path("moved"))
    assert error == f"error: {caught.value}"
    cli("generate moved --max-new-tokens 1")


def test_a_model_that_is_not_the_trained_one_is_refused(cli: Cli) -> None:
    # A foreign weight file is noticed before any number is printed, also if its change was accepted.
    shutil.copytree("digits", "foreign")
    weights = Path("foreign/model/model.safetensors")
    tensors = load_file(weights)
    tensors["classifier.1.weight"] = tensors["classifier.1.weight"][:7].contiguous()
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "foreign/model/model.safetensors" in cli("evaluate foreign", code=2)
    cli("verify foreign --accept-weights")
    assert_golden(cli.refusal("evaluate foreign"))


@pytest.mark.parametrize(
    "data, name",
    [("tables/test.csv", "tables-test-csv"), ("user/set", "user-set"), ("parts/*.csv", "parts-csv"), ("*", "data")],
)
def test_other_data_names_its_file(data: str, name: str) -> None:
    assert short_name(data) == name
    assert short_name(__file__) == "test_evaluate"


def test_batches_are_counted_on_a_bar_in_a_terminal_and_told_of_once_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert list(counted(iter("abcd"), 4, "evaluating")) == list("abcd")
        shown = os.read(reader, 10_000).decode()
    os.close(reader)
    assert "evaluating:   0%" in shown
    assert "0/4" in shown
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    assert list(counted(iter("abcd"), 4, "evaluating")) == list("abcd")
    assert log.getvalue() == "evaluating ...\n"
    monkeypatch.setenv("RANK", "1")
    assert list(counted(iter("abcd"), 4, "evaluating")) == list("abcd")
    assert log.getvalue() == "evaluating ...\n"


def test_data_that_has_changed_since_the_training_is_said_and_with_other_classes_refused(tmp_path: Path) -> None:
    trained = Facts(num_train=8, num_eval=2, label_names=["cat", "dog"])
    assert changes_of(trained, trained, tmp_path) == []
    assert changes_of(Facts(), trained, tmp_path) == []
    (note,) = changes_of(trained, trained.model_copy(update={"num_eval": 1}), tmp_path)
    assert_golden(note, "numbers")
    with raises_golden(case="classes"):
        changes_of(trained, trained.model_copy(update={"label_names": ["ant", "dog"]}), tmp_path)
