"""A package that a task needs is missed before anything is read, by the extra that brings it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.cli.main import main
from accel_train.core import errors
from accel_train.core.errors import SettingError
from accel_train.recipe.loader import make_recipe
from accel_train.recipe.tasks import TASKS, TaskSpec, check_extra
from accel_train.tasks.module import ModuleTask
from accel_train.training.setup import prepare_run
from tests.support.runs import Capture, Settings
from tests.support.wording import raises_golden

WITH_EXTRA = [task for task, spec in TASKS.items() if spec.extra]


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch, not_launched: None) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)


def tree_of(task: str, **sections: Any) -> Settings:
    """A recipe whose data does not exist."""
    given: Settings = {"task": task, "output_dir": "run", "data": {"train": "nowhere.csv"}}
    config = {} if ":" in task else {"model": {"config": {"model_type": "t5"}}}
    return {**given, **config, "schedule": {"max_steps": 1}, **sections}


@pytest.mark.parametrize("task", WITH_EXTRA)
def test_a_missing_package_is_an_error_before_the_data_is_looked_for(task: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as missing:
        check_extra(make_recipe(tree_of(task), "recipe"), TASKS[task])
    assert missing.value.settings == ("task",)
    assert all(name in missing.value.problem for name in TASKS[task].packages)
    assert f"'accel-train[{TASKS[task].extra}]'" in missing.value.remedy


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("task", WITH_EXTRA)
def test_a_command_says_so_before_torch(command: str, task: str, empty_folder: Path, capsys: Capture) -> None:
    Path("r.yaml").write_text(yaml.safe_dump(tree_of(task)))
    assert main([command, "r.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"accel-train[{TASKS[task].extra}]" in line


@pytest.mark.parametrize(
    "sections",
    [{"evaluate": {"generation": {"max_samples": 0}}}, {"data": {"train": "nowhere.csv", "eval_fraction": 0}}],
)
def test_what_scores_generated_texts_is_not_needed_where_none_is_generated(sections: Settings) -> None:
    check_extra(make_recipe(tree_of("seq2seq", **sections), "recipe"), TASKS["seq2seq"])


class Needy(ModuleTask):
    """A task of a program, with a package of its own."""

    spec = TaskSpec(packages=("package_of_mine",))

    def data(self) -> Any:
        raise AssertionError("read")

    def model(self) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...


@pytest.mark.parametrize("gives_object", [False, True])
def test_the_task_of_a_program_has_its_packages_checked_by_name_and_as_an_object(
    gives_object: bool, tmp_path: Path
) -> None:
    recipe = make_recipe({**tree_of(f"{__name__}:Needy"), "output_dir": str(tmp_path / "run")}, "recipe")
    with raises_golden(SettingError):
        prepare_run(recipe, task=Needy() if gives_object else None)
