"""Every setting can be explained, and its example is one that a recipe takes."""

import shlex
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from accel_train.recipe.explain import example_of, explain, explained
from accel_train.recipe.loader import load_recipe, shipped_recipes
from accel_train.recipe.names import is_section, recipe_names
from accel_train.recipe.tasks import TASKS, optional_settings, tasks_with
from tests.support.wording import assert_golden, raises_golden

SETTINGS = [name for name, info in recipe_names().items() if not is_section(info)]


def test_every_setting_and_section_is_explained_in_lines_that_fit() -> None:
    for name in ("", *recipe_names()):
        said = explain(name, 80)
        assert not name or name in said
        assert [
            line for line in said.splitlines() if len(line) > 80 and " " in line.removeprefix("  example").strip()
        ] == []


def test_an_explanation_says_type_default_meaning_and_an_example_in_both_forms() -> None:
    assert_golden(explain("optimizer.lr_scaling.rule"))


def test_a_section_shows_its_settings_and_a_name_below_a_free_one_the_free_one() -> None:
    assert "optimizer.learning_rate: 0.0003" in explain("optimizer")
    assert explain("model.config.n_layer") == explain("model.config")
    with raises_golden():
        explain("learning_rat")


def test_examples_are_of_the_type_that_the_setting_takes() -> None:
    """A flag is read leniently, a line of YAML is not: `zero_stage: '1'` is text."""
    refused = []
    for name in SETTINGS:
        info, value = recipe_names()[name], example_of(name)
        assert isinstance(info, FieldInfo)
        kind: Any = Annotated[info.annotation, info]
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError:
            if value is not None:
                refused.append(f"{name}: {value!r}")
    assert refused == []


def test_examples_are_taken_as_flags() -> None:
    """Alone: what a setting excludes or needs beside it is another matter."""
    path = shipped_recipes()["text_classification"].path
    refused = []
    for name in SETTINGS:
        written = [line.strip() for line in explain(name, 500).splitlines() if line.strip().startswith(f"--{name} ")]
        for flag, _, value in (line.partition(" ") for line in written):
            try:
                load_recipe(path, arguments=[flag, *shlex.split(value)])
            except ValueError as error:
                if f"{name}=" in str(error) and "must be" in str(error):
                    refused.append(str(error))
    assert refused == []


def test_every_setting_has_an_example_that_says_something() -> None:
    assert [name for name in SETTINGS if example_of(name) in (None, "", (), [], {})] == []


def test_the_tasks_of_a_setting_follow_from_the_tasks_and_its_text_does_not_repeat_them() -> None:
    of_tasks = [each for each in explained("") if each.tasks]
    assert {*optional_settings()} <= {each.name for each in of_tasks}
    for each in of_tasks:
        assert each.tasks == tasks_with(each.name)
        assert not any(each.meaning.startswith(f"{task}:") for task in TASKS), each.name
        if not is_section(recipe_names()[each.name]):
            assert all(task in explain(each.name, 500) for task in each.tasks)


def test_the_explanation_of_task_says_what_each_task_learns() -> None:
    said = explain("task", 200)
    assert [task for task, spec in TASKS.items() if f"{task:24}{spec.learns}" not in said] == []
