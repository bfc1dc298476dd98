"""The README says what is so: its task can be trained, its recipe is the demo's, and what it links to is there."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from accel_train import Recipe
from accel_train.data.builtin.example import write_example
from benchmarks import one_nan
from benchmarks.common import child_environment, run_child
from tests.docs.test_pages import merged
from tests.support.runs import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_fit_of_the_readme_trains(empty_folder: Path) -> None:
    (source,) = (block for block in code_blocks("python") if "import fit" in block)
    inputs = torch.randn(64, 4)
    labels = (inputs.sum(dim=1) > 0).long()
    data, model = TensorDataset(inputs, labels), torch.nn.Linear(4, 2)
    before = torch.nn.functional.cross_entropy(model(inputs), labels).item()
    names: dict[str, Any] = {"nn": torch.nn, "model": model, "train_data": data, "test_data": data}
    exec(source, names)
    result = names["result"]
    assert result.model is model
    assert result.metrics["loss"] < before
    assert result.metrics["accuracy"] == pytest.approx((model(inputs).argmax(1) == labels).float().mean().item())


@pytest.mark.slow
def test_finetune_of_the_readme_trains_on_the_example_and_predicts(empty_folder: Path) -> None:
    write_example()
    (source,) = (block for block in code_blocks("python") if "import finetune" in block)
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["result"].metrics["accuracy"] > 0.88
    (row,) = names["result"].predict(["Return the height of the window."])
    assert row["label"] == "tkinter"


def test_readme_and_guarantees_show_what_both_trainers_do_with_one_nan(tmp_path: Path) -> None:
    environment = {**child_environment(1), "CUDA_VISIBLE_DEVICES": ""}
    ours, theirs = (
        run_child(
            "benchmarks.one_nan",
            ["--child", name, str(tmp_path / name)],
            environment=environment,
            timeout_seconds=300,
        ).result
        for name in one_nan.TRAINERS
    )
    assert (ours["nan_weights"], theirs["nan_weights"]) == (0, theirs["weights"])
    assert [float(loss) == 0 for loss in ours["losses"]] == [False] * 24
    assert sum(math.isnan(float(loss)) for loss in ours["losses"]) == 3
    assert sum(float(loss) == 0 for loss in theirs["losses"]) == 21
    skips = [event for event in ours["events"] if event["event"] == "skip"]
    assert len(skips) == 3
    page = (REPOSITORY / "docs" / "guarantees.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| the step with the NaN"))
    assert all(f"sample {one_nan.BAD_SAMPLE}" in text for text in (row, skips[0]["message"]))
    (row,) = (line for line in page.splitlines() if line.startswith("| log of 24 steps"))
    assert re.findall(r"\d+", row) == ["24", "3", "21", "21", "0"]
    assert " 3 of 24 steps " in README


def test_recipe_of_the_readme_is_the_demos_shortened() -> None:
    demo = yaml.safe_load((REPOSITORY / "recipes" / "gpt_tiny.yaml").read_text())
    assert merged(demo, yaml.safe_load(code_blocks("yaml")[0])) == demo


def test_every_recipe_of_the_package_is_valid_and_says_how_it_is_run() -> None:
    for path in (REPOSITORY / "recipes").glob("*.yaml"):
        Recipe.from_yaml(str(path))
        head = path.read_text().split("task:")[0]
        assert [word for word in (path.name, "Hardware", "Time", "Expected") if word not in head] == [], path.name


def test_readme_stays_short_and_links_to_each_page_once() -> None:
    assert len(README.splitlines()) <= 150
    pages = [f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")]
    assert [page for page in pages if README.count(f"]({page})") != 1] == []
