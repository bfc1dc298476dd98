"""Recipes that come with the package: found by name, listed with what they need, copied to be edited."""

import re
from pathlib import Path

import pytest
import yaml

from accel_train.cli.main import main
from accel_train.recipe.loader import load_recipe, shipped_recipes
from tests.support.runs import REPOSITORY, Capture
from tests.support.wording import assert_golden

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_all_recipes_of_the_repository_are_in_the_package_with_a_sentence_and_what_they_need() -> None:
    assert list(shipped_recipes()) == sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.yaml"))
    for recipe in shipped_recipes().values():
        assert recipe.about.endswith((".", "`.")), recipe.about
        assert {"Hardware", "Time", "Data", "Expected"} <= set(recipe.notes), recipe.path


def test_a_recipe_of_the_package_is_read_by_its_name_unless_there_is_such_a_file() -> None:
    assert load_recipe("gpt_tiny").output_dir == "runs/gpt-tiny"
    own = Path("gpt_tiny")
    own.write_text(
        "{output_dir: mine, model: {config: {model_type: gpt2}}, data: {train: t}, schedule: {max_steps: 1}}"
    )
    assert load_recipe("gpt_tiny").output_dir == "mine"


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_keeps_its_data_settings_when_a_custom_task_takes_the_place_of_its_own(name: str) -> None:
    path = shipped_recipes()[name].path
    given = yaml.safe_load(path.read_text())
    Path("own.yaml").write_text(yaml.safe_dump({**given, "task": "mine:Task"}))
    recipe = load_recipe("own.yaml")
    assert recipe.task == "mine:Task"
    for field, value in given["data"].items():
        kept = getattr(recipe.data, field)
        assert kept == (tuple(value) if isinstance(value, list) and isinstance(kept, tuple) else value)


def test_a_mistyped_name_gets_the_nearest(capsys: Capture) -> None:
    for command in ("plan", "init"):
        assert main([command, "gpt_tny"]) == 2
        assert_golden(capsys.readouterr().err, command)


def test_recipes_lists_names_that_run_takes(capsys: Capture) -> None:
    assert main(["recipes"]) == 0
    said = capsys.readouterr().out
    names = [line for line in said.split("\n\n")[0].splitlines() if not line.startswith(" ")]
    assert names == list(shipped_recipes())
    assert_golden(_entries(said)["image_classification"])


def test_init_copies_a_recipe_that_names_its_own_path_and_replaces_no_file(capsys: Capture) -> None:
    assert main(["init", "sft_lora", "mine.yaml"]) == 0
    text = Path("mine.yaml").read_text()
    assert "accel-train run mine.yaml" in text
    assert "recipes/" not in text
    assert load_recipe("mine.yaml") == load_recipe("sft_lora")
    assert main(["init", "gpt_tiny", "mine.yaml"]) == 2
    assert_golden(capsys.readouterr().err)
    assert Path("mine.yaml").read_text() == text


def test_the_list_of_recipes_says_the_data_of_each_and_cuts_no_parenthesis(capsys: Capture) -> None:
    assert main(["recipes"]) == 0
    entries = {name: " ".join(text.split()) for name, text in _entries(capsys.readouterr().out).items()}
    assert entries.keys() == shipped_recipes().keys()
    for name, text in entries.items():
        assert text.count("(") == text.count(")"), name
        on_the_hub = "HuggingFaceFW" in shipped_recipes()[name].path.read_text()
        assert not (on_the_hub and "your own" in text), name


def _entries(printed: str) -> dict[str, str]:
    return {found[1]: found[2] for found in re.finditer(r"^(\w+)\n((?:    .*\n)+)", printed, re.MULTILINE)}
