"""`accel-train prepare`: a run after it finds everything in caches, and tokenizes and downloads nothing."""

import json
import re
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pytest
import yaml
from PIL import Image

from accel_train.cli.main import main
from accel_train.data import hub
from accel_train.data.text import corpus
from tests.support.downloads import save_bert, write_model, write_pairs
from tests.support.hub import serve_hub, use_hub
from tests.support.runs import REPOSITORY, Capture
from tests.support.wording import assert_golden

TINY = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 8}
RECIPE = {
    "task": "causal-lm",
    "output_dir": "out",
    "model": {"config": TINY},
    "data": {"train": "text.txt", "eval_fraction": 0.2, "cache_dir": "cache", "sequence_length": 8},
    "batch": {"global_batch_size": 4},
    "schedule": {"max_steps": 2},
    "log": {"progress": False},
}


@pytest.fixture(autouse=True)
def folder(empty_folder: Path) -> Path:
    Path("text.txt").write_text("one two three " * 60)
    Path("r.yaml").write_text(yaml.safe_dump(RECIPE))
    return empty_folder


def prepared(capsys: Capture, recipe: str = "r.yaml") -> dict[str, Any]:
    """The parts of `prepare --json`, by name."""
    assert main(["prepare", recipe, "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["result"]["parts"]
    return {part["name"]: part for part in parts}


def test_a_run_after_prepare_does_not_tokenize(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(capsys)["tokens"]
    assert not Path("out").exists()
    files = [path for path in Path(first["path"]).rglob("*") if path.is_file()]
    assert (first["was_there"], first["bytes"]) == (False, sum(len(path.read_bytes()) for path in files))

    def refuse(*_: object) -> None:
        raise AssertionError("the text is tokenized again")

    monkeypatch.setattr(corpus, "build_shards", refuse)
    assert prepared(capsys)["tokens"]["was_there"]
    assert main(["prepare", "r.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert_golden(re.sub(r"[\d.]+ s\b", "# s", lines[-1]))
    assert len(lines) <= 5
    assert main(["run", "r.yaml"]) == 0
    assert Path("out/summary.json").exists()


def test_a_run_after_prepare_downloads_nothing(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bert(repository := folder / "bert")
    capsys.readouterr()
    Path("rows.csv").write_text("text,label\n" + "".join(f"the court {row},{row % 2}\n" for row in range(40)))
    data = {"train": "rows.csv", "eval_fraction": 0.2, "max_length": 16}
    model = {"pretrained": "someone/bert"}
    recipe = {**RECIPE, "task": "text-classification", "model": model, "data": data}
    Path("bert.yaml").write_text(yaml.safe_dump(recipe))
    with serve_hub({"someone/bert": repository}) as (endpoint, asked):
        use_hub(monkeypatch, endpoint, folder / "home")
        found = prepared(capsys, "bert.yaml")
        assert "GET /someone/bert/resolve/main/model.safetensors" in asked
        weights = found["weights"]
        assert (weights["was_there"], weights["bytes"]) == (False, (repository / "model.safetensors").stat().st_size)
        assert weights["path"].startswith(str(folder / "home"))
        assert_golden(found["samples"]["about"])
        time.sleep(0.01)
        assert prepared(capsys, "bert.yaml")["weights"]["was_there"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub._go_offline_without_hub.cache_clear()
    num_asked = len(asked)
    assert main(["run", "bert.yaml"]) == 0
    assert len(asked) == num_asked


def test_a_data_set_of_the_hub_is_found_where_datasets_keeps_it(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    write_pairs(folder)
    write_model(folder, "google-bert/bert-base-cased", save_bert)
    capsys.readouterr()
    found = prepared(capsys, str(REPOSITORY / "recipes" / "glue_mrpc.yaml"))
    arrows = [path for path in folder.rglob("glue-*.arrow") if "test" not in path.name]
    assert len(arrows) == 2
    assert found["data sets"]["bytes"] == sum(len(path.read_bytes()) for path in arrows)
    assert all(part["was_there"] for part in found.values())


def test_images_are_read_in_place(capsys: Capture) -> None:
    for number in range(8):
        path = Path(f"images/{'ab'[number % 2]}/{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number * 9, np.uint8)).save(path)
    config = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}
    data = {"train": "images", "eval_fraction": 0.25, "image_size": 8}
    recipe = {**RECIPE, "task": "image-classification", "model": {"config": config}, "data": data}
    Path("images.yaml").write_text(yaml.safe_dump(recipe))
    found = prepared(capsys, "images.yaml")["samples"]
    assert_golden(found["about"])
    assert (found["path"], found["bytes"]) == (None, 0)


@pytest.mark.parametrize("flags", [["--data.train", "gone.txt"], ["--model.config.n_embed", "8"], ["--model.x", "1"]])
def test_a_wrong_recipe_gives_one_error_and_writes_nothing(flags: list[str], capsys: Capture) -> None:
    assert main(["prepare", "r.yaml", *flags]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert not Path("out").exists()
    assert not Path("cache").exists()
