"""Errors carry fields, one place renders their sentence, and both survive pickling."""

import copy

import pytest

from accel_train.core.errors import RecipeProblems, SettingError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SettingError("is blank"), "is blank"),
        (SettingError("is blank", "give a path"), "is blank; give a path"),
        (SettingError("is blank", "Give a path", at="output_dir"), "output_dir: is blank. Give a path"),
    ],
)
def test_a_setting_error_is_rendered_from_its_fields_in_every_process(error: SettingError, told: str) -> None:
    assert str(error) == told
    again = copy.copy(error)  # by the protocol of pickle
    assert (str(again), vars(again)) == (told, vars(error))


def test_problems_of_a_recipe_are_told_a_line_each_and_kept_apart() -> None:
    again = copy.copy(RecipeProblems("seed=-1: too small", "model: missing"))
    assert str(again) == "seed=-1: too small\nmodel: missing"
    assert again.args == ("seed=-1: too small", "model: missing")
