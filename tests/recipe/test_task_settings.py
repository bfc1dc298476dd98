"""Each task has its own settings of `data`, and another task's setting is an error before anything is read."""

from itertools import chain
from typing import Any

import pytest

from accel_train.core.errors import RecipeProblems
from accel_train.recipe.data import Data
from accel_train.recipe.explain import example_of, explain, explained
from accel_train.recipe.loader import make_recipe
from accel_train.recipe.names import is_section, recipe_names
from accel_train.recipe.tasks import TASKS

SETTINGS = [name for name in recipe_names() if name.startswith("data.") and name.count(".") == 1]


def recipe_of(task: str, **data: Any) -> Any:
    tree = {
        "task": task,
        "output_dir": "run",
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"train": "x", **data},
        "schedule": {"max_steps": 1},
    }
    return make_recipe(tree, "recipe")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_its_own_settings_and_refuses_those_of_other_tasks_by_their_names(task: str) -> None:
    for name in SETTINGS:
        field = name.removeprefix("data.")
        owners = [other for other, entry in TASKS.items() if field in entry.data.model_fields]
        value = {} if is_section(recipe_names()[name]) else example_of(name)
        if task in owners:
            assert hasattr(recipe_of(task, **{field: value}).data, field)
            continue
        with pytest.raises(RecipeProblems) as refused:
            recipe_of(task, **{field: value})
        (problem,) = refused.value.args
        assert name in problem
        assert all(owner in problem for owner in owners)


def test_at_most_25_settings_are_shared_and_explain_lists_the_tasks_of_the_others() -> None:
    shared = {each.name for each in explained("data") if not each.tasks}
    assert shared == {"data", *(f"data.{field}" for field in Data.model_fields)}
    assert len(shared) <= 25
    assert explained("data.doc_stride")[0].tasks == ("question-answering",)
    of_tasks = set(chain.from_iterable(each.tasks for each in explained("data")))
    assert of_tasks == set(TASKS)
    assert "question-answering" in explain("data.doc_stride")


def test_a_setting_of_a_task_has_the_same_type_and_default_in_every_task() -> None:
    for field in {field for entry in TASKS.values() for field in entry.data.model_fields}:
        infos = [entry.data.model_fields[field] for entry in TASKS.values() if field in entry.data.model_fields]
        assert len({(str(info.annotation), repr(info.default)) for info in infos}) == 1, field
