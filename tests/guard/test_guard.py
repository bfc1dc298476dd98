"""The guard's policy: what is counted, what is far too large, when the run goes back, and when the budget is spent."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from accel_train.core.state import Rollback, StepResult, TrainState
from accel_train.guard.guard import (
    INCIDENT_GAP_STEPS,
    LARGEST,
    LASTING_SPIKE_STEPS,
    Decision,
    Guard,
    Limits,
    Window,
    is_skipped_by_rollback,
    learning_rate_factor,
    plan_rollback,
)
from accel_train.recipe import schema
from tests.support.wording import assert_golden


def result(
    step: int, *, loss: float = 1.0, norm: float = 1.0, skipped: bool = False, loss_scale: float | None = None
) -> StepResult:
    return StepResult(step, loss, norm, 100, skipped, loss_scale, False)


def broken(step: int, *, loss: float = 1.0, loss_scale: float | None = None) -> StepResult:
    return result(step, loss=loss, norm=math.nan, skipped=True, loss_scale=loss_scale)


def new_guard(section: schema.Guard | None = None, *, max_grad_norm: float = 1.0, warmup_steps: int = 0) -> Guard:
    return Guard(section or schema.Guard(), TrainState(), max_grad_norm=max_grad_norm, warmup_steps=warmup_steps)


def decide_all(results: list[StepResult], section: schema.Guard) -> tuple[list[str], TrainState]:
    guard = new_guard(section)
    return [guard.decide(each).action for each in results], guard.state


def settled(section: schema.Guard | None = None, *, steps: int = 200, max_grad_norm: float = 1.0) -> Guard:
    """A guard that has seen ordinary steps: losses of 2 +- 0.1, norms of about 1.0, a fifth up and down."""
    guard = new_guard(section, max_grad_norm=max_grad_norm)
    draw = random.Random(0)
    for step in range(1, steps + 1):
        decision = guard.decide(result(step, loss=draw.gauss(2, 0.1), norm=math.exp(draw.gauss(0, 0.2))))
        assert decision == Decision("continue")
    return guard


# --- skips -------------------------------------------------------------------------------------------------------


def test_finite_steps_go_on_and_leave_no_mark_but_in_the_window() -> None:
    actions, state = decide_all([result(step) for step in range(1, 6)], schema.Guard())
    assert actions == ["continue"] * 5
    assert state == TrainState(losses=[1.0] * 5, grad_norms=[0.0] * 5, num_unmeasured=5)


def test_skips_in_a_row_within_the_budget_are_noted_and_one_more_goes_back() -> None:
    steps = [broken(step, loss=math.nan) for step in range(1, 5)]
    assert decide_all(steps, schema.Guard(max_consecutive_skips=3))[0] == ["skip", "skip", "skip", "roll_back"]


def test_where_rollbacks_are_spent_or_not_allowed_it_stops() -> None:
    steps = [broken(step, loss=math.nan) for step in range(1, 5)]
    assert decide_all(steps, schema.Guard(max_consecutive_skips=3, max_rollbacks=0))[0][-1] == "stop"
    guard = new_guard(schema.Guard(max_consecutive_skips=0, max_rollbacks=2))
    guard.state.rollbacks = [Rollback(number, 9, 5, 6, 9) for number in (1, 2)]
    decision = guard.decide(broken(20))
    assert decision.action == "stop"
    assert "after 2 rollbacks" in decision.reason


def test_a_good_step_ends_a_row_of_skips() -> None:
    steps = [broken(step, loss=math.nan) if step % 4 else result(step) for step in range(1, 13)]
    actions, state = decide_all(steps, schema.Guard(max_consecutive_skips=3))
    assert set(actions) == {"skip", "continue"}
    assert state.num_skipped_steps == 9


@pytest.mark.parametrize("gap, stops", [(40, True), (60, False)])
def test_skips_spread_over_1000_steps_have_a_budget_of_their_own(gap: int, stops: bool) -> None:
    steps = [broken(step) if step % gap == 0 else result(step) for step in range(1, 3001)]
    actions, state = decide_all(steps, schema.Guard(max_skips_per_1000_steps=20))
    assert ("stop" in actions) == stops
    assert len(state.recent_skips) <= 26


def test_first_skip_stops_where_the_recipe_says_so() -> None:
    decision = new_guard(schema.Guard(on_nonfinite="stop")).decide(broken(7, loss=math.inf))
    assert decision.action == "stop"
    assert "step 7" in decision.reason
    assert "loss=inf" in decision.reason


def test_fp16_overflow_above_the_floor_is_the_scales_search_and_not_counted() -> None:
    steps = [broken(step, loss_scale=2.0 ** (20 - step)) for step in range(1, 20)]
    actions, state = decide_all(steps, schema.Guard(max_consecutive_skips=1))
    assert actions == ["overflow"] * 19
    assert state.consecutive_skips == 0


def test_fp16_overflow_at_the_floor_and_a_nan_loss_at_any_scale_are_counted() -> None:
    at_floor = [broken(step, loss_scale=1.0) for step in range(1, 4)]
    assert decide_all(at_floor, schema.Guard(max_consecutive_skips=2))[0] == ["skip", "skip", "roll_back"]
    nan_loss = [broken(step, loss=math.nan, loss_scale=1024.0) for step in range(1, 4)]
    assert decide_all(nan_loss, schema.Guard(max_consecutive_skips=2))[0] == ["skip", "skip", "roll_back"]


def test_processes_that_disagree_go_back_at_once() -> None:
    decision = new_guard().decide(StepResult(5, 1.0, 1.0, 100, True, None, False, agreed=False))
    assert decision.action == "roll_back"
    assert "different" in decision.reason


def test_an_incident_is_looked_into_once() -> None:
    guard = new_guard(schema.Guard(max_consecutive_skips=50))
    bad = (3, 4, 9, 9 + INCIDENT_GAP_STEPS, 60)
    looked_into = [
        step for step in range(1, 70) if guard.decide(broken(step) if step in bad else result(step)).needs_diagnosis
    ]
    assert looked_into == [3, 9 + INCIDENT_GAP_STEPS, 60]


def test_an_incident_just_before_the_last_one_is_another_because_the_run_went_back() -> None:
    guard = new_guard(schema.Guard(max_consecutive_skips=50))
    assert [guard.decide(broken(step)).needs_diagnosis for step in (9, 8)] == [True, True]


@pytest.mark.parametrize("epoch_steps", [2, 4, 5, 50])
def test_an_epoch_without_targets_is_too_many_whatever_may_be_skipped(epoch_steps: int) -> None:
    section = schema.Guard(max_consecutive_skips=20)
    guard = Guard(section, TrainState(), max_grad_norm=1.0, warmup_steps=0, epoch_steps=epoch_steps)
    actions = [guard.decide(result(step)._replace(num_targets=0)).action for step in range(1, 60)]
    assert actions.index("stop") == min(20, epoch_steps - 1)


def test_a_bad_step_ends_a_row_of_steps_without_targets() -> None:
    guard = new_guard(schema.Guard(max_consecutive_skips=50))
    empty = result(1)._replace(num_targets=0)
    actions = [guard.decide(empty).action for _ in range(guard._most_without_targets)]
    guard.decide(broken(2))
    actions += [guard.decide(empty).action for _ in range(guard._most_without_targets)]
    assert set(actions) == {"skip"}
    assert guard.decide(empty).action == "stop"


# --- spikes ------------------------------------------------------------------------------------------------------


def test_limit_of_a_window_is_that_of_a_normal_distribution_and_outliers_do_not_move_it() -> None:
    draw = random.Random(1)
    window = Window([draw.gauss(5, 2) for _ in range(1000)], 1000, 6.0, 1e-6, relative=False)
    window.measure()
    assert window.limit == pytest.approx(5 + 6 * 2, rel=0.1)
    before = window.limit
    window.values += [1e9] * 20
    window.measure()
    assert window.limit == pytest.approx(before, rel=0.1)


def test_limit_of_eight_values_is_from_the_lower_median_and_the_seventh() -> None:
    window = Window([5.0, 1.0, 3.0, 8.0, 2.0, 7.0, 4.0, 6.0], 8, 2.0, 0.01, relative=False)
    window.measure()
    assert window.limit == 4.0 + 2.0 * (7.0 - 4.0)


def test_the_alarm_of_positive_losses_is_that_of_their_logarithms() -> None:
    draw = random.Random(3)
    small = [0.05 * math.exp(draw.gauss(0, 0.5)) for _ in range(1000)]
    window = Window(list(small), 1000, 6.0, 0.02, relative=True)
    window.measure()
    assert window.alarm == pytest.approx(0.05 * math.exp(6 * 0.5), rel=0.2)
    assert window.limit == pytest.approx(0.05 + 6 * 0.05 * (math.exp(0.5) - 1), rel=0.2)
    # A language model's losses vary by percents, and both limits are nearly equal.
    window.values[:] = [draw.gauss(3.0, 0.03) for _ in range(1000)]
    window.measure()
    assert window.alarm == pytest.approx(3.0 * 1.02**6, rel=0.01)
    # A loss that can be negative has no logarithm.
    window.values[:] = [draw.gauss(0.0, 2.0) for _ in range(1000)]
    window.measure()
    assert window.alarm == window.limit == pytest.approx(12.0, rel=0.1)


def test_a_high_loss_below_the_alarm_says_nothing_but_counts_towards_a_lasting_spike() -> None:
    draw = random.Random(4)
    guard = new_guard(schema.Guard())
    for step in range(1, 200):
        guard.decide(result(step, loss=0.05 * math.exp(draw.gauss(0, 0.5))))
    kinds = [guard.decide(result(200 + number, loss=0.5)).action for number in range(LASTING_SPIKE_STEPS)]
    assert kinds == ["high"] * (LASTING_SPIKE_STEPS - 1) + ["roll_back"]
    assert guard.state.first_bad_step == 200
    assert guard.state.last_incident == 200 + LASTING_SPIKE_STEPS - 1


def test_a_window_is_measured_by_its_newest_values_and_not_by_those_that_are_newer_than_the_measure() -> None:
    draw = random.Random(2)
    seen = [draw.choice([1.0, 2.0, 3.5, draw.random()]) for _ in range(100)]
    window = Window(list(seen), 16, 1.0, 1e-6, relative=False)
    window.measure(num_newer=3)
    assert window.values == seen[-19:]
    ordered = sorted(seen[-19:-3])
    assert window.limit == max(ordered[math.ceil(15 * 0.8413)], ordered[7] + 1e-6)
    assert ordered[7] == statistics.median_low(ordered)


def test_limits_stay_for_an_eighth_of_a_window() -> None:
    guard = settled(max_grad_norm=0.0, steps=192)
    limits = {192: guard.limits}
    for step in range(193, 225):
        guard.decide(result(step, loss=2.0, norm=0.5))
        limits[step] = guard.limits
    assert [step for step in range(193, 225) if limits[step] != limits[step - 1]] == [208, 224]


def test_limits_are_the_recipes_alone_until_half_a_window_has_been_accepted_after_the_warmup() -> None:
    guard = new_guard(schema.Guard(spike_window_steps=20), max_grad_norm=5.0, warmup_steps=30)
    limits = []
    for step in range(1, 45):
        guard.decide(result(step))
        limits.append(guard.limits)
    assert limits[:39] == [Limits(5.0)] * 39
    assert limits[39].clip == pytest.approx(math.exp(6 * 0.2))


@pytest.mark.parametrize(
    ("on_spike", "clips_at", "skips_above"), [("off", 10.0, LARGEST), ("clip", 3.3, LARGEST), ("skip", 10.0, 3.3)]
)
def test_policy_decides_what_the_device_does_with_a_spike(on_spike: str, clips_at: float, skips_above: float) -> None:
    limits = settled(schema.Guard.model_validate({"on_spike": on_spike}), max_grad_norm=10.0).limits
    assert limits.clip == pytest.approx(clips_at, rel=0.25)
    assert limits.skip == pytest.approx(skips_above, rel=0.25)


def test_clip_of_the_recipe_stays_where_it_is_lower_and_is_taken_where_there_was_none() -> None:
    assert settled(max_grad_norm=1.0).limits == Limits(1.0)
    assert settled(max_grad_norm=0.0).limits.clip == pytest.approx(3.3, rel=0.25)


def test_a_clipped_spike_is_told_of_and_moves_the_limit_no_further_than_the_limit() -> None:
    guard = settled(max_grad_norm=0.0)
    before = guard.limits.clip
    decision = guard.decide(result(201, loss=2.0, norm=1000.0))
    assert (decision.action, decision.needs_diagnosis) == ("spike", False)
    assert_golden(decision.reason.replace(f"{before:.4g}", "LIMIT"))
    assert max(guard.state.grad_norms) <= math.log(before) + 1e-9
    assert guard.state.grad_norms[-1] == pytest.approx(math.log(before))
    assert guard.decide(result(202, loss=2.0)).action == "continue"


def test_a_low_loss_or_a_small_gradient_is_no_spike() -> None:
    assert settled().decide(result(201, loss=0.01, norm=1e-6)) == Decision("continue")


def test_spikes_that_were_skipped_leave_no_mark_in_the_window_and_go_back_when_the_loss_is_up_too() -> None:
    guard = settled(schema.Guard(on_spike="skip", max_consecutive_skips=3))
    windows = (list(guard.state.losses), list(guard.state.grad_norms))
    actions = [guard.decide(result(201 + n, loss=9.0, norm=50.0, skipped=True)).action for n in range(4)]
    assert actions == ["skip", "skip", "skip", "roll_back"]
    assert (guard.state.losses, guard.state.grad_norms) == windows
    assert guard.state.first_bad_step == 201


def test_gradients_that_have_grown_with_the_loss_as_before_are_measured_anew() -> None:
    guard = settled(schema.Guard(on_spike="skip", max_consecutive_skips=3))
    actions = [guard.decide(result(201 + n, loss=2.0, norm=50.0, skipped=True)).action for n in range(4)]
    assert actions == ["skip", "skip", "skip", "spike"]
    assert guard.limits == Limits(1.0)
    assert guard.decide(result(205, loss=2.0, norm=50.0)).action == "continue"


def test_a_loss_that_stays_up_goes_back_to_before_it_rose() -> None:
    guard = settled()
    actions = [guard.decide(result(201 + n, loss=6.0)).action for n in range(LASTING_SPIKE_STEPS)]
    assert actions == ["spike"] * (LASTING_SPIKE_STEPS - 1) + ["roll_back"]
    assert guard.state.first_bad_step == 201


def test_a_loss_that_comes_down_again_in_time_does_not() -> None:
    guard = settled()
    steps = [result(201 + n, loss=6.0 if n % LASTING_SPIKE_STEPS else 2.0) for n in range(60)]
    assert "roll_back" not in {guard.decide(each).action for each in steps}


def test_policy_rollback_goes_back_at_the_first_spike() -> None:
    assert settled(schema.Guard(on_spike="rollback")).decide(result(201, norm=50.0, skipped=True)).action == "roll_back"


def test_a_policy_that_watches_nothing_sees_no_spike() -> None:
    guard = settled(schema.Guard(on_spike="off"))
    assert {guard.decide(result(201 + n, loss=90.0, norm=900.0)).action for n in range(30)} == {"continue"}


@pytest.mark.parametrize("steps", [200, 203, 207])
def test_a_guard_made_from_saved_counters_judges_as_the_one_that_was_saved(steps: int) -> None:
    before = settled(max_grad_norm=0.0, steps=steps)
    saved = asdict(before.state)
    after = Guard(schema.Guard(), TrainState(**saved), max_grad_norm=0.0, warmup_steps=0)
    assert after.limits == before.limits
    draw = random.Random(3)
    for step in range(steps + 1, steps + 40):
        told = result(step, loss=draw.choice([2.0, 2.1, 6.0]), norm=draw.choice([0.9, 1.1, 50.0]))
        assert after.decide(told) == before.decide(told)
        assert after.limits == before.limits
    assert asdict(after.state) == asdict(before.state)


# --- rollbacks ---------------------------------------------------------------------------------------------------


def planned(guard: schema.Guard | None = None, *, rollbacks: Sequence[Rollback] = (), **where: int) -> Rollback:
    state = TrainState(first_bad_step=where.pop("onset"), rollbacks=list(rollbacks))
    return plan_rollback(guard or schema.Guard(), state, max_steps=5000, steps_per_epoch=1000.0, **where)


def test_window_that_is_passed_over_covers_all_bad_steps_and_half_a_window_on_both_sides() -> None:
    rollback = planned(onset=1000, at_step=1005, to_step=800)
    assert (rollback.skip_first, rollback.skip_last) == (950, 1055)  # a tenth of an epoch of 1000 steps
    assert (rollback.learning_rate_factor, rollback.lowered_until) == (1.0, 0)
    near = planned(onset=1000, at_step=1005, to_step=980)
    assert (near.skip_first, near.skip_last) == (981, 1055)
    long = planned(schema.Guard(rollback_skip_steps=4), onset=1000, at_step=1009, to_step=800)
    assert (long.skip_first, long.skip_last) == (998, 1011)


@pytest.mark.parametrize(
    "max_steps, steps_per_epoch, width", [(100_000, 50_000.0, 200), (100_000, 500.0, 50), (600, 6000.0, 12)]
)
def test_window_of_auto_is_a_small_part_of_the_epoch_and_of_the_run(
    max_steps: int, steps_per_epoch: float, width: int
) -> None:
    state = TrainState(first_bad_step=500)
    where = {"at_step": 505, "to_step": 300, "max_steps": max_steps, "steps_per_epoch": steps_per_epoch}
    rollback = plan_rollback(schema.Guard(), state, **where)  # type: ignore[arg-type]
    assert rollback.skip_last - rollback.skip_first + 1 == 6 + width


def test_last_step_of_a_run_is_never_passed_over() -> None:
    assert planned(onset=4990, at_step=5000, to_step=4000).skip_last == 4999


def test_second_rollback_in_one_region_lowers_the_learning_rate_and_one_further_on_does_not() -> None:
    first = planned(onset=1000, at_step=1005, to_step=800)
    assert (first.learning_rate_factor, learning_rate_factor(1010, [first])) == (1.0, 1.0)
    again = planned(onset=1060, at_step=1065, to_step=800, rollbacks=[first])
    assert (again.number, again.learning_rate_factor) == (2, 0.5)
    both = [first, again]
    assert [learning_rate_factor(step, both) for step in (800, 801, again.lowered_until, again.lowered_until + 1)] == [
        1.0,
        0.5,
        0.5,
        1.0,
    ]
    further = planned(onset=3000, at_step=3005, to_step=2800, rollbacks=both)
    assert further.learning_rate_factor == 1.0


def test_steps_of_every_rollback_are_passed_over() -> None:
    rollbacks = [Rollback(1, 20, 5, 10, 20), Rollback(2, 40, 30, 35, 40)]
    assert [step for step in range(1, 50) if is_skipped_by_rollback(step, rollbacks)] == [
        *range(10, 21),
        *range(35, 41),
    ]
