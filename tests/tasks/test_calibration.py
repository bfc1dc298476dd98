"""The scores of an n-grams model are calibrated by one temperature, and nothing else of the run changes."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from accel_train import Recipe, train
from accel_train.cli.main import main
from accel_train.core.json_io import load_json
from accel_train.data.order import DataOrder
from accel_train.report.evaluation import describe_evaluation
from accel_train.report.run import load_run
from accel_train.task import Training
from accel_train.tasks.text_classification import calibration
from accel_train.tasks.text_classification.calibration import fit_temperature, read_features, trained_on
from tests.support.runs import (
    environment,
    events,
    metrics,
    run_forked_command,
    summary_of,
    write_jsonl,
    write_yaml,
)
from tests.support.text_tasks import batch_of, load, predict
from tests.support.wording import assert_golden

WORDS = ["ash", "birch", "cedar", "elm", "fir", "larch", "maple", "oak", "pine", "rowan", "willow", "yew"]
CONFIG = {"model_type": "ngrams", "num_buckets": 4096, "max_characters": 3, "log_counts": True}


def write_texts(path: Path, count: int = 400, noise: float = 0.25, kinds: int = 2) -> Path:
    """Texts whose label is told by one word, but for a share of them that have any label."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        words = draw.choices(WORDS, k=6)
        label = WORDS.index(words[0]) % kinds if draw.random() > noise else draw.randrange(kinds)
        rows.append({"text": " ".join([f"first{words[0]}", *words]), "label": f"kind {label}"})
    return write_jsonl(path, rows)


def recipe_for(folder: Path, **sections: Any) -> Recipe:
    data = {"train": str(write_texts(folder / "rows.jsonl")), "eval_fraction": 0.3, **sections.pop("data", {})}
    recipe = {
        "task": "text-classification",
        "output_dir": str(folder / "run"),
        "model": {"config": CONFIG},
        "tokenizer": "bytes",
        "batch": {"global_batch_size": 16},
        "optimizer": {"name": "sgd", "learning_rate": 10.0, "weight_decay": 0.0, "max_grad_norm": 0.0},
        "schedule": {"type": "linear", "num_epochs": 20, "warmup_ratio": 0.1},
        "evaluate": {"every_epochs": 5},
        **sections,
        "data": data,
    }
    return Recipe.model_validate(recipe)


def count_of(data: Any) -> int:
    return len(data.train)


def fitted(recipe: Recipe, steps: int) -> tuple[float, str]:
    task, data, model = load(recipe)
    training = Training(DataOrder(count_of(data), 16, 0), lambda step: 1.0, steps)
    return fit_temperature(model, data, recipe, training, task._loss_sum)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    return Path(train(recipe_for(folder)).output_dir)


def temperature_of(run: Path) -> float:
    return float(load_json(run / "model" / "config.json")["logit_temperature"])


def test_scores_are_shares_of_right_labels_and_were_too_high_before(run: Path, tmp_path: Path) -> None:
    rows = predict(run, tmp_path / "out.jsonl", run.parent / "rows.jsonl")
    held_out = summary_of(run)["eval"]
    assert temperature_of(run) > 1.5
    assert held_out["loss"] < 0.8 * held_out["uncalibrated_loss"]
    scores = np.array([row["score"] for row in rows])
    assert len(rows) == 400
    data = load(recipe_for(run.parent))[1]
    model = AutoModelForSequenceClassification.from_pretrained(run / "model", trust_remote_code=True)
    with torch.no_grad():
        batch = batch_of(data)[0]
        logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
        score, label = logits.softmax(1).max(1)
        before = (logits * temperature_of(run)).softmax(1).amax(1)
    accuracy = float((label == batch["labels"]).double().mean())
    assert accuracy == pytest.approx(held_out["accuracy"])
    assert abs(float(score.mean()) - accuracy) < 0.06
    assert float(before.mean()) - accuracy > 0.1
    assert set(np.round(score.double().numpy(), 4)) <= set(np.round(scores, 4))


def test_the_loss_before_is_the_loss_of_the_logits_times_the_temperature(run: Path) -> None:
    data = load(recipe_for(run.parent))[1]
    model = AutoModelForSequenceClassification.from_pretrained(run / "model", trust_remote_code=True)
    batch = batch_of(data)[0]
    with torch.no_grad():
        logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits.double()
    found = summary_of(run)["eval"]
    for name, factor in (("loss", 1.0), ("uncalibrated_loss", temperature_of(run))):
        expected = torch.nn.functional.cross_entropy(logits * factor, batch["labels"])
        assert found[name] == pytest.approx(float(expected), rel=1e-5)
    blocks = describe_evaluation([load_run(run)])
    assert "Loss before calibration" in str(blocks)


def test_training_does_not_see_the_temperature(run: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(run / "model", trust_remote_code=True)
    ids = torch.arange(97, 110)[None]
    trained = model.train()(input_ids=ids).logits
    torch.testing.assert_close(trained, model.eval()(input_ids=ids).logits * temperature_of(run))


def test_labels_and_metrics_of_labels_stay(run: Path) -> None:
    last = metrics(run, "eval")[-1]
    for name in ("accuracy", "f1_macro", "mcc"):
        assert summary_of(run)["eval"][name] == last[name]
    assert summary_of(run)["eval"]["uncalibrated_loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_a_finished_run_that_is_started_again_returns_the_calibrated_model(run: Path) -> None:
    model: Any = train(recipe_for(run.parent)).model
    assert model.config.logit_temperature == temperature_of(run)
    assert len(events(run, "calibration")) == 1


def test_evaluate_gives_the_numbers_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]["metrics"]
    for name in ("loss", "uncalibrated_loss", "accuracy"):
        assert found[name] == pytest.approx(summary_of(run)["eval"][name], rel=1e-6)


@pytest.mark.parametrize("optimizer, grouped", [("sgd", False), ("sgd", True), ("adamw", True)])
def test_the_model_of_a_fold_is_trained_as_the_model_of_the_run(optimizer: str, grouped: bool, tmp_path: Path) -> None:
    recipe = recipe_for(
        tmp_path,
        data={"group_by_length": grouped},
        loss={"label_smoothing": 0.1},
        optimizer={"name": optimizer, "learning_rate": 0.1, "weight_decay": 0.0},
        schedule={"type": "linear", "num_epochs": 5},
        evaluate={},
    )
    trained: Any = train(recipe).model
    task, data, _ = load(recipe)
    steps = summary_of(tmp_path / "run")["steps"]
    order = DataOrder(count_of(data), 16, recipe.seed, lengths=data.lengths if grouped else None)
    training = Training(order, lambda step: 0.1 * (1 - step / steps), steps)
    samples: Any = data.train
    every = [samples[number] for number in range(len(samples))]
    texts = read_features(trained, data, every)
    labels = torch.tensor([int(each.label) for each in every])
    own = trained_on(trained, 4096, texts, labels, np.arange(len(every)), recipe, training, task._loss_sum)
    torch.testing.assert_close(own.table.weight, trained.table.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.bias, trained.bias, rtol=1e-4, atol=1e-5)


def test_equal_texts_are_in_one_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"{WORDS[number % 12]} {number % 120}", "label": str(number % 7 // 4)} for number in range(360)]
    recipe = recipe_for(tmp_path, data={"train": str(write_jsonl(tmp_path / "twice.jsonl", rows)), "eval_fraction": 0})
    seen: list[tuple[set[str], set[str]]] = []
    original = calibration.trained_on

    def spy(model: Any, count: int, texts: Sequence[Any], labels: Any, numbers: Any, *rest: Any) -> Any:
        there = {str(texts[number].rows.tolist()) for number in numbers}
        others = {str(texts[number].rows.tolist()) for number in set(range(len(texts))) - set(numbers.tolist())}
        seen.append((there, others))
        return original(model, count, texts, labels, numbers, *rest)

    monkeypatch.setattr(calibration, "trained_on", spy)
    fitted(recipe, steps=10)
    assert len(seen) > 1
    assert all(others and not there & others for there, others in seen)


@pytest.mark.parametrize("kind", ["pairs", "several labels"])
def test_pairs_and_several_labels_are_calibrated_too(kind: str, tmp_path: Path) -> None:
    rows = list(map(json.loads, write_texts(tmp_path / "rows.jsonl", noise=0.4).read_text().splitlines()))
    data: dict[str, Any] = {}
    model: dict[str, Any] = {"config": CONFIG}
    if kind == "pairs":
        rows = [{**row, "other": " ".join(row["text"].split()[2:4])} for row in rows]
        data, model = {"text_columns": ["text", "other"]}, {"config": {**CONFIG, "type_vocab_size": 2}}
    else:
        rows = [{**row, "label": [row["label"], *(["pine"] if "pine" in row["text"] else [])]} for row in rows]
    data["train"] = str(write_jsonl(tmp_path / "other.jsonl", rows))
    run = Path(train(recipe_for(tmp_path, data=data, model=model)).output_dir)
    assert temperature_of(run) > 1.2
    assert summary_of(run)["eval"]["loss"] < summary_of(run)["eval"]["uncalibrated_loss"]


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"eval_fraction": 0.8}},
        {"optimizer": {"ema_decay": 0.9}},
        {"data": {"group_column": "text"}},
        {"data": {"text_columns": ["{label} {text}"]}},
    ],
    ids=["few texts", "averages", "groups", "no mistake"],
)
def test_a_run_says_why_there_is_no_temperature(sections: dict[str, Any], tmp_path: Path) -> None:
    run = Path(train(recipe_for(tmp_path, schedule={"num_epochs": 5}, **sections)).output_dir)
    (event,) = events(run, "calibration")
    assert_golden(event["message"])
    assert temperature_of(run) == 1
    assert "uncalibrated_loss" not in summary_of(run)["eval"]


def test_a_model_that_goes_on_from_a_calibrated_one_has_no_temperature(run: Path, tmp_path: Path) -> None:
    begun = {"pretrained": str(run / "model"), "trust_remote_code": True}
    recipe = recipe_for(tmp_path, model=begun, schedule={"max_steps": 2})
    after = Path(train(recipe).output_dir)
    assert temperature_of(after) == 1
    assert_golden(events(after, "calibration")[0]["message"])


def test_an_error_while_calibrating_costs_the_temperature_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left\nfor this")

    monkeypatch.setattr(calibration, "trained_on", fails)
    run = Path(train(recipe_for(tmp_path, schedule={"max_steps": 3})).output_dir)
    assert_golden(events(run, "calibration")[0]["message"])
    assert temperature_of(run) == 1


def test_a_regression_and_another_model_have_no_calibration(tmp_path: Path) -> None:
    rows = [{"text": " ".join(WORDS[number % 5 : 9]), "label": number / 7} for number in range(150)]
    data = {"train": str(write_jsonl(tmp_path / "numbers.jsonl", rows))}
    optimizer = {"name": "sgd", "learning_rate": 0.1}
    run = Path(train(recipe_for(tmp_path, data=data, optimizer=optimizer, schedule={"max_steps": 3})).output_dir)
    assert not events(run, "calibration")
    assert temperature_of(run) == 1


def test_a_run_without_held_out_texts_is_calibrated(tmp_path: Path) -> None:
    run = Path(train(recipe_for(tmp_path, data={"eval_fraction": 0.0}, evaluate={})).output_dir)
    assert temperature_of(run) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_have_the_temperature_of_one(
    strategy: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    recipe = recipe_for(tmp_path, parallel={"strategy": strategy}).model_dump(mode="json", exclude_unset=True)
    done = run_forked_command(["run", str(write_yaml(tmp_path / "recipe.yaml", recipe))], 2)
    assert done.returncode == 0, done.stderr
    assert temperature_of(tmp_path / "run") == pytest.approx(temperature_of(run), rel=1e-3)
    assert summary_of(tmp_path / "run")["eval"]["loss"] == pytest.approx(summary_of(run)["eval"]["loss"], rel=1e-4)
