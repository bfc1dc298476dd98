"""The README says what is so: its task can be trained, its recipe is the demo's, and what it links to is there."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from accel_train import Recipe, train
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run
from benchmarks import one_nan
from benchmarks.common import child_environment, run_child
from tests.support.runs import REPOSITORY, losses, recipe_dict, write_corpus

README = (REPOSITORY / "README.md").read_text()
TASKS = (REPOSITORY / "docs" / "tasks.md").read_text()
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))]


def code_blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize(("data", "noise"), [({}, 0.1), ({"noise": 0.2}, 0.2)])
def test_the_task_of_the_page_about_tasks_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, float], noise: float
) -> None:
    (source,) = (block for block in code_blocks("python", TASKS) if "noise.py" in block)
    (tmp_path / "noise.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    write_corpus(tmp_path)
    tree = recipe_dict(tmp_path, task="noise:Noise", data=data, schedule={"max_steps": 2})
    run = prepare_run(Recipe.model_validate(tree))
    with run.resources:
        run_steps(run)
    assert list(losses(tmp_path / "run")) == [1, 2]
    assert getattr(run.plan.task, "noise", None) == noise
    del sys.modules["noise"]


def test_module_task_of_the_page_about_tasks_and_the_readmes_fit_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (source,) = (block for block in code_blocks("python", TASKS) if "ModuleTask" in block)
    (tmp_path / "line.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    tree = {
        "task": "line:Line",
        "output_dir": "runs/line",
        "schedule": {"max_steps": 50},
        "optimizer": {"learning_rate": 0.3},
    }
    assert train(Recipe.model_validate(tree)).metrics["loss"] < 0.1
    del sys.modules["line"]

    (source,) = (block for block in code_blocks("python") if "import fit" in block)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    names = {"nn": torch.nn, "model": torch.nn.Linear(4, 2), "train_data": data, "test_data": data}
    exec(source, names)
    assert names["result"].metrics["accuracy"] > 0.5
    assert names["result"].model is names["model"]


def test_task_without_transformers_of_the_page_about_tasks_trains_by_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = (block for block in code_blocks("python", TASKS) if "line_fit.py" in block)
    (recipe,) = (block for block in code_blocks("yaml", TASKS) if "line_fit.yaml" in block)
    (tmp_path / "line_fit.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = prepare_run(Recipe.model_validate(yaml.safe_load(recipe)))
    with run.resources:
        run_steps(run)
    found = list(losses(tmp_path / "runs" / "line-fit").values())
    assert found[-1] < 0.1 * found[0]
    del sys.modules["line_fit"]


def test_table_of_the_readme_shows_what_both_trainers_do_with_one_nan(tmp_path: Path) -> None:
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
    (row,) = (line for line in README.splitlines() if line.startswith("| the step with the NaN"))
    quoted = re.findall('"(.*) [.]{3} (.*)"', row)
    assert quoted
    assert all(part in skips[0]["message"] for part in quoted[0])
    assert f"sample {one_nan.BAD_SAMPLE}" in quoted[0]
    assert "3 steps skipped, 21 losses | 21 losses of 0" in README


def test_recipe_of_the_readme_is_the_demos_shortened() -> None:
    shown = yaml.safe_load(code_blocks("yaml")[0])
    demo = yaml.safe_load((REPOSITORY / "recipes" / "gpt_tiny.yaml").read_text())

    def assert_part(part: object, whole: object, where: str) -> None:
        if isinstance(part, dict):
            assert isinstance(whole, dict), where
            for key, value in part.items():
                assert_part(value, whole[key], f"{where}.{key}")
        else:
            assert part == whole, where

    assert_part(shown, demo, "recipe")


def test_every_recipe_of_the_package_is_valid_and_says_how_it_is_run() -> None:
    recipes = sorted((REPOSITORY / "recipes").glob("*.yaml"))
    assert len(recipes) >= 5
    for path in recipes:
        Recipe.from_yaml(str(path))
        head = path.read_text().split("task:")[0]
        for word in (path.name, "Hardware", "Time", "Expected"):
            assert word in head, f"{path.name} does not say {word}"


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page: str) -> None:
    path = REPOSITORY / page
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_readme_stays_short_and_links_to_each_page_once() -> None:
    assert len(README.splitlines()) <= 120
    pages = [f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")]
    assert [page for page in pages if README.count(f"]({page})") != 1] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    names = re.findall(r"`(?!output_dir)(\w+/[\w/]+(?:\.py|/))`", (REPOSITORY / page).read_text())
    assert page != "docs/architecture.md" or len(names) > 40
    folders = (REPOSITORY / "accel_train", REPOSITORY)
    assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []


def test_the_table_of_files_to_change_names_files_and_functions_that_exist() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    rows = [row for row in page.partition("## Find the file to change")[2].splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 45
    package, tests, lacking = REPOSITORY / "accel_train", REPOSITORY / "tests", []
    for row in rows:
        folder, path = package, package
        for name in re.findall(r"`([^`]+)`", row.split(" | ", 1)[1]):
            if name.endswith((".py", ".js")):
                # A name without a folder lies beside the one before it.
                places = [base / name for base in (package, REPOSITORY, tests, folder)]
                path = next((place for place in places if place.exists()), package)
                folder = path.parent
                lacking += [] if path.is_file() else [(row, name)]
            elif "/" in name:
                lacking += [] if any((base / name).is_dir() for base in (package, REPOSITORY)) else [(row, name)]
            elif name.isidentifier() and path.is_file() and path.suffix == ".py":
                lacking += [] if re.search(rf"^\s*(?:def |class |){name}\b", path.read_text(), re.M) else [(row, name)]
    assert lacking == []
