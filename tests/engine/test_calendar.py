"""The step schedule is a function of the step."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_train.data.order import DataOrder
from accel_train.engine.run import Calendar
from tests.support.runs import tiny_recipe

STEPS = range(1, 41)


def due(calendar: Calendar, step: int) -> tuple[bool, ...]:
    return (
        calendar.evaluation_due(step),
        calendar.checkpoint_due(step),
        calendar.drift_check_due(step),
        calendar.pause_due(step),
    )


@pytest.mark.parametrize(
    ("evaluate", "evaluated"),
    [
        ({"every_steps": 7}, [7, 14, 21, 28, 35]),
        ({"every_epochs": 1.0}, [4, 8, 11, 15, 18, 22, 25, 29, 33, 36]),
        ({"every_epochs": 0.0}, []),
    ],
)
def test_what_is_due_after_a_step_does_not_depend_on_the_steps_asked_before(
    tmp_path: Path, evaluate: dict[str, Any], evaluated: list[int]
) -> None:
    sections = {"evaluate": evaluate, "checkpoint": {"every_steps": 9}, "guard": {"drift_check_steps": 6}}
    plan: Any = SimpleNamespace(
        recipe=tiny_recipe(tmp_path, **sections),
        max_steps=40,
        order=DataOrder(25, 7, 0, True),
        can_evaluate=True,
        extensions=SimpleNamespace(requests=None),
    )
    alone = {step: due(Calendar(plan, compares_weights=True), step) for step in STEPS}
    assert [step for step in STEPS if alone[step][0]] == evaluated
    assert [step for step in STEPS if alone[step][1]] == [9, 18, 27, 36, 40]
    assert all(alone[step][2] for step in (6, 9, 12, *evaluated, 40))
    calendar, asked = Calendar(plan, compares_weights=True), [*STEPS, *STEPS]
    random.Random(0).shuffle(asked)
    assert all(due(calendar, step) == alone[step] for step in asked)
