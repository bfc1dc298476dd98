"""Each task has its own settings of `data`, and another task's setting is an error before anything is read."""

from itertools import chain
from typing import Any

import pytest

from accel_train.core.errors import RecipeProblems, SettingError
from accel_train.recipe.data import Data
from accel_train.recipe.explain import example_of, explain, explained
from accel_train.recipe.loader import make_recipe
from accel_train.recipe.names import is_section, recipe_names
from accel_train.recipe.tasks import TASKS, TaskSpec, optional_settings, refuse_unreported, refuse_unused
from accel_train.task import Task

SETTINGS = [name for name in recipe_names() if name.startswith("data.") and name.count(".") == 1]


def recipe_of(task: str, *, other: dict[str, Any] | None = None, **data: Any) -> Any:
    tree = {
        "task": task,
        "output_dir": "run",
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"train": "x", **data},
        "schedule": {"max_steps": 1},
        **(other or {}),
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


OTHER = {
    "evaluate.metrics": ["no_metric"],
    "evaluate.num_examples": 5,
    "loss.chunked": True,
    "loss.class_weights": "balanced",
    "loss.router_aux": True,
    "model.pad_vocab_to_multiple_of": 8,
    "tokenizer": "other",
}
"""Values of settings whose example is a default, asks for nothing, or belongs to another setting."""


def with_setting(task: str, name: str) -> Any:
    section, _, field = name.rpartition(".")
    value = OTHER.get(name) or (
        {"num_beams": 3} if is_section(recipe_names()[name]) else example_of(name) or 7  # 7: a number, where 0 is shown
    )
    model = {"config": {"model_type": "gpt2"}} if section == "model" else {}
    return recipe_of(task, other={section: {**model, field: value}} if section else {field: value})


def test_17_settings_or_more_depend_on_the_task() -> None:
    assert len(optional_settings()) >= 17
    assert {"tokenizer", "evaluate.metrics", "evaluate.generation", "loss.z_loss"} <= optional_settings()


@pytest.mark.parametrize("name", sorted(optional_settings()))
def test_a_setting_that_a_task_does_not_read_is_refused_and_names_the_tasks_that_do(name: str) -> None:
    users = [task for task, spec in TASKS.items() if name in spec.uses]
    assert users
    assert len(users) < len(TASKS)
    for task, spec in TASKS.items():
        recipe = with_setting(task, name)
        if task in users:
            refuse_unused(recipe, spec)
            continue
        with pytest.raises(SettingError) as refused:
            refuse_unused(recipe, spec)
        assert refused.value.settings == (name,)
        assert all(user in refused.value.problem for user in users)
    own = with_setting("my_module:MyTask", name)
    with pytest.raises(SettingError) as refused:
        refuse_unused(own, Task.spec)
    assert name in refused.value.remedy
    refuse_unused(own, TaskSpec(uses=frozenset((name,))))


def test_metrics_that_a_task_reports_anyway_may_be_named() -> None:
    for task, spec in TASKS.items():
        refuse_unused(recipe_of(task, other={"evaluate": {"metrics": list(spec.metrics)}}), spec)


@pytest.mark.parametrize("task", TASKS)
def test_a_metric_that_no_evaluation_of_the_task_reports_cannot_choose_the_best_model(task: str) -> None:
    spec = TASKS[task]
    others = {name for other in TASKS.values() for name in other.metrics} - {*spec.metrics}
    for name in ("loss", "eval_loss", "num_targets", *spec.metrics):
        refuse_unreported(recipe_of(task, other={"evaluate": {"metric_for_best_model": name}}), spec)
    for name in (*others, f"{spec.metrics[0]}x"):
        evaluate = {"metric_for_best_model": name}
        with pytest.raises(SettingError) as refused:
            refuse_unreported(recipe_of(task, other={"evaluate": evaluate}), spec)
        assert refused.value.settings == ("evaluate.metric_for_best_model",)
        refuse_unreported(recipe_of(task, other={"evaluate": {**evaluate, "metrics": [name]}}), spec)
        refuse_unreported(recipe_of(task, other={"evaluate": {**evaluate, "allow_hub_metrics": True}}), spec)
    assert spec.metrics[0] in refused.value.remedy


def test_greater_is_better_decides_on_the_metric_for_the_best_model_alone() -> None:
    own = recipe_of("a:B", other={"evaluate": {"metric_for_best_model": "eval_cost", "greater_is_better": False}})
    assert own.evaluate.best_metric == "cost"
    assert own.evaluate.is_lower_better("cost")
    assert not own.evaluate.is_lower_better("accuracy")
    assert not recipe_of("a:B").evaluate.is_lower_better("cost")
