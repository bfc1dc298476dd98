"""The recipes that download: each runs offline as its file says, once the libraries have small
copies of what it names.
"""

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from accel_train.cli.main import main
from accel_train.core.json_io import read_json
from tests.support import runs
from tests.support.downloads import (
    TINY_RESNET,
    save_bert,
    save_modernbert,
    save_resnet,
    write_images,
    write_model,
    write_pairs,
)
from tests.support.runs import REPOSITORY

RECIPES = REPOSITORY / "recipes"
BOTH = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
SMALL_BATCHES = ("--batch.global_batch_size", "16", "--batch.per_device_batch_size", "4", "--data.num_workers", "1")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME after the downloads."""
    folder = tmp_path_factory.mktemp("home")
    write_pairs(folder)
    for name, save in (
        ("google-bert/bert-base-cased", save_bert),
        ("answerdotai/ModernBERT-base", save_modernbert),
        ("microsoft/resnet-50", save_resnet),
    ):
        write_model(folder, name, save)
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the test's folder, with HF_HOME as it is read when these libraries are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")


def run(recipe: str, *flags: str, processes: int = 1) -> dict[str, Any]:
    """Run a recipe of the package in this folder, into its folder `run`; returns its summary."""
    path, asked = RECIPES / recipe, [*flags, "--output_dir", "run"]
    if processes == 1:
        assert main(["run", str(path), *asked]) == 0
    else:
        command = runs.command(path, *asked, processes=processes)
        done = runs.ran(command)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return runs.summary_of(Path("run"))


@BOTH
def test_mrpc_is_fine_tuned_with_nothing_changed(processes: int) -> None:
    summary = run("glue_mrpc.yaml", processes=processes)
    assert (summary["world_size"], summary["steps"]) == (processes, 13)  # 5 epochs of 80 pairs in batches of 32
    evaluations = runs.metrics(Path("run"), "eval")
    assert len(evaluations) >= 5
    assert all(0 <= record["f1_binary"] <= 1 for record in evaluations)
    assert summary["eval"]["f1_binary"] == pytest.approx(max(record["f1_binary"] for record in evaluations))
    model = AutoModelForSequenceClassification.from_pretrained("run/model")
    assert model.config.id2label == {0: "not_equivalent", 1: "equivalent"}
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings


@BOTH
def test_resnet_50_is_trained_on_a_folder_of_images(processes: int) -> None:
    write_images(Path("imagenet"), {"train": 8, "val": 4})
    sizes = ("--model.config", json.dumps(TINY_RESNET), *SMALL_BATCHES, "--schedule.num_epochs", "3")
    summary = run("image_folder_resnet50.yaml", *sizes, processes=processes)
    assert (summary["world_size"], summary["steps"]) == (processes, 5)  # 3 epochs of 24 images
    assert f"4 per device x {4 // processes} accumulation x {processes} process" in summary["choices"]["batch"]
    details = read_json(Path("run/evaluation.json"))["details"]
    assert set(details["test_time_augmentation"]) == {"without", "with"}
    model = AutoModelForImageClassification.from_pretrained("run/model")
    assert model.config.id2label == {0: "n01440764", 1: "n01443537", 2: "n01484850"}


def flags_of(recipe: str, first: str) -> list[str]:
    """The flags that the head of a recipe names from `first` on; comment signs and line breaks left out."""
    head = (RECIPES / recipe).read_text().partition("\ntask:")[0]
    words = " ".join(line.removeprefix("#").strip() for line in head.splitlines())
    words = words[words.index(first) :].split()
    flags: list[str] = []
    while words and words[0].startswith("--"):
        flags += [words.pop(0), words.pop(0).strip("'")]
    return flags


def test_a_pretrained_resnet_is_fine_tuned_by_the_flags_of_the_recipes_head() -> None:
    write_images(Path("imagenet"), {"train": 4, "val": 2})
    flags = flags_of("image_folder_resnet50.yaml", "--model.config null")
    assert "microsoft/resnet-50" in flags
    summary = run("image_folder_resnet50.yaml", *flags, *SMALL_BATCHES, "--schedule.num_epochs", "1")
    assert any("classifier.1.weight" in note for note in summary["data"]["notes"])
    settings = read_json(Path("run/model/preprocessor_config.json"))
    assert settings["size"] == {"shortest_edge": 256}  # 224 / 0.875, as the pretrained model was evaluated
    assert settings["resample"] == 3


def test_a_pretrained_modernbert_reads_a_table_by_the_flags_of_the_recipes_head() -> None:
    runs.write_lines(
        "reviews.csv", "review,stars", *(f"class Reader {number} path,{number % 3}" for number in range(60))
    )
    own = flags_of("text_classification.yaml", "--data.train reviews.csv")
    assert own[2:4] == ["--data.text_columns", "[review]"]
    pretrained = flags_of("text_classification.yaml", "--model.config null")
    assert "answerdotai/ModernBERT-base" in pretrained
    summary = run("text_classification.yaml", *own, *pretrained, "--schedule.num_epochs", "1")
    notes = [note for note in summary["data"]["notes"] if note.startswith("tokenizer: ")]
    assert any("answerdotai/ModernBERT-base" in note for note in notes)
    model = AutoModelForSequenceClassification.from_pretrained("run/model")
    assert (model.config.model_type, model.config.num_labels) == ("modernbert", 3)
