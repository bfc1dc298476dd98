"""The README says what is so: its task can be trained, its recipe is the demo's, and what it links to is there."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from accel_train import Recipe
from accel_train.loop import run_steps
from accel_train.prepare import prepare_run
from accel_train.signals import StopRequest
from runs import losses, recipe_dict, write_corpus

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_task_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = (block for block in code_blocks("python") if "my_module.py" in block)
    (tmp_path / "my_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    write_corpus(tmp_path)
    run = prepare_run(Recipe.model_validate(recipe_dict(tmp_path, task="my_module:Denoise", schedule={"max_steps": 2})))
    with run.resources:
        run_steps(run, StopRequest())
    assert list(losses(tmp_path / "run")) == [1, 2]
    del sys.modules["my_module"]


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


def test_what_the_readme_links_to_is_there_and_it_stays_short() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []
    assert len(README.splitlines()) < 250
