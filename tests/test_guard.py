"""The guard's policy: what is counted, what is not, and when the budget is spent."""

import math

import pytest

from accel_train.guard import judge
from accel_train.recipe import Guard
from accel_train.state import StepResult, TrainState


def result(step: int, *, loss: float = 1.0, skipped: bool = False, loss_scale: float | None = None) -> StepResult:
    return StepResult(step, loss, math.nan if skipped else 1.0, 100, skipped, loss_scale, False)


def judge_all(results: list[StepResult], guard: Guard) -> tuple[list[str], TrainState]:
    state = TrainState()
    return [judge(each, state, guard).action for each in results], state


def test_finite_steps_go_on_and_are_forgotten() -> None:
    actions, state = judge_all([result(step) for step in range(1, 6)], Guard())
    assert actions == ["go_on"] * 5
    assert state == TrainState()


def test_skips_in_a_row_within_the_budget_are_noted_and_one_more_stops() -> None:
    actions, _ = judge_all(
        [result(step, loss=math.nan, skipped=True) for step in range(1, 5)], Guard(max_consecutive_skips=3)
    )
    assert actions == ["skip", "skip", "skip", "stop"]


def test_a_good_step_ends_a_row_of_skips() -> None:
    steps = [result(step, loss=math.nan, skipped=step % 4 != 0) for step in range(1, 13)]
    actions, state = judge_all(steps, Guard(max_consecutive_skips=3))
    assert "stop" not in actions
    assert state.num_skipped_steps == 9


@pytest.mark.parametrize("gap, stops", [(40, True), (60, False)])
def test_skips_spread_over_1000_steps_have_a_budget_of_their_own(gap: int, stops: bool) -> None:
    steps = [result(step, skipped=step % gap == 0) for step in range(1, 3001)]
    actions, state = judge_all(steps, Guard(max_skips_per_1000_steps=20))
    assert ("stop" in actions) == stops
    assert len(state.recent_skips) <= 26


def test_first_skip_stops_where_the_recipe_says_so() -> None:
    verdict = judge(result(7, loss=math.inf, skipped=True), TrainState(), Guard(on_nonfinite="stop"))
    assert verdict.action == "stop"
    assert "step 7" in verdict.reason
    assert "loss=inf" in verdict.reason


def test_fp16_overflow_above_the_floor_is_the_scales_search_and_not_counted() -> None:
    steps = [result(step, skipped=True, loss_scale=2.0 ** (20 - step)) for step in range(1, 20)]
    actions, state = judge_all(steps, Guard(max_consecutive_skips=1))
    assert actions == ["overflow"] * 19
    assert state.consecutive_skips == 0


def test_fp16_overflow_at_the_floor_and_a_nan_loss_at_any_scale_are_counted() -> None:
    at_floor = [result(step, skipped=True, loss_scale=1.0) for step in range(1, 4)]
    assert judge_all(at_floor, Guard(max_consecutive_skips=2))[0] == ["skip", "skip", "stop"]
    nan_loss = [result(step, loss=math.nan, skipped=True, loss_scale=1024.0) for step in range(1, 4)]
    assert judge_all(nan_loss, Guard(max_consecutive_skips=2))[0] == ["skip", "skip", "stop"]
