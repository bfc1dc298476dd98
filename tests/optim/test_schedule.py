"""Every schedule is transformers' or torch's own, value by value; run lengths and warmups say where they come from, and
scaled learning rates their formula."""

import math
import sys
import types
import warnings
from inspect import signature
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import optimization

from accel_train.core.errors import SettingError
from accel_train.optim.schedule import Rate, make_schedule, resolve_steps, scale_learning_rate
from accel_train.recipe.optimizer import Optimizer
from accel_train.recipe.schedule import CURVES, Schedule
from tests.support.runs import Settings, refused
from tests.support.wording import assert_golden, raises_golden

MAX_STEPS = [1, 2, 3, 7, 100, 301]


def ours(max_steps: int, warmup_steps: int, **keys: Any) -> list[float]:
    multiplier = make_schedule(Schedule(max_steps=max_steps, **keys), max_steps, warmup_steps)
    return [multiplier(step) for step in range(max_steps)]


def theirs(build: Any, num_steps: int, **keys: Any) -> list[float]:
    """The learning rates of a scheduler of torch or transformers, for a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build(optimizer, **keys)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(num_steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if len(rates) < num_steps:
                scheduler.step()
    return rates


def close(values: list[float]) -> Any:
    """Equal but for the rounding of a product (torch multiplies step by step where we take a power)."""
    return pytest.approx(values, rel=1e-9, abs=1e-12)


def warmups_of(max_steps: int) -> list[int]:
    return sorted({0, min(1, max_steps - 1), max_steps // 10, max_steps - 1})


LENGTHS = [(max_steps, warmup) for max_steps in MAX_STEPS for warmup in warmups_of(max_steps)]
lengths = pytest.mark.parametrize(("max_steps", "warmup_steps"), LENGTHS)


# Our keys, the schedule of transformers, and its keys.
OF_TRANSFORMERS: list[tuple[Settings, Any, Settings]] = [
    ({"type": "constant"}, optimization.get_constant_schedule_with_warmup, {}),
    ({"type": "linear"}, optimization.get_linear_schedule_with_warmup, {}),
    ({"type": "cosine"}, optimization.get_cosine_schedule_with_warmup, {}),
    ({"type": "warmup_cosine"}, optimization.get_cosine_schedule_with_warmup, {}),
    (
        {"type": "cosine", "min_lr_ratio": 0.1},
        optimization.get_cosine_with_min_lr_schedule_with_warmup,
        {"min_lr_rate": 0.1},
    ),
    *(
        ({"type": "cosine_restarts", **keys}, optimization.get_cosine_with_hard_restarts_schedule_with_warmup, keys)
        for keys in ({"num_cycles": 1}, {"num_cycles": 3})
    ),
    *(
        (
            {"type": "polynomial", "power": power, "min_lr_ratio": minimum},
            optimization.get_polynomial_decay_schedule_with_warmup,
            {"lr_end": minimum, "power": power},
        )
        for power in (0.5, 1.0, 2.0)
        for minimum in (0.0, 0.25)
    ),
    ({"type": "inverse_sqrt"}, optimization.get_inverse_sqrt_schedule, {}),
]


@lengths
@pytest.mark.parametrize(("keys", "build", "their_keys"), OF_TRANSFORMERS)
def test_schedule_is_that_of_transformers(
    max_steps: int, warmup_steps: int, keys: Settings, build: Any, their_keys: Settings
) -> None:
    if "num_training_steps" in signature(build).parameters:
        their_keys = {**their_keys, "num_training_steps": max_steps}
    expected = theirs(build, max_steps, num_warmup_steps=warmup_steps, **their_keys)
    rates = ours(max_steps, warmup_steps, **keys)
    assert rates == (close(expected) if keys["type"] == "polynomial" else expected)


@lengths
@pytest.mark.parametrize(
    ("shape", "their_shape"), [("linear", "linear"), ("cosine", "cosine"), ("one_minus_sqrt", "1-sqrt")]
)
@pytest.mark.parametrize("minimum", [0.0, 0.1])
def test_warmup_stable_decay_is_that_of_transformers(
    max_steps: int, warmup_steps: int, shape: str, their_shape: str, minimum: float
) -> None:
    decay_steps = min(max_steps - warmup_steps, max(1, round(max_steps / 5)))
    expected = theirs(
        optimization.get_wsd_schedule,
        max_steps,
        num_warmup_steps=warmup_steps,
        num_decay_steps=decay_steps,
        num_training_steps=max_steps,
        decay_type=their_shape,
        min_lr_ratio=minimum,
    )
    keys = {"type": "warmup_stable_decay", "decay_ratio": 0.2, "decay_shape": shape, "min_lr_ratio": minimum}
    assert ours(max_steps, warmup_steps, **keys) == expected


def after_warmup(max_steps: int, warmup_steps: int, **keys: Any) -> list[float]:
    return ours(max_steps, warmup_steps, **keys)[warmup_steps:]


@lengths
@pytest.mark.parametrize("minimum", [0.0, 0.01])
def test_one_cycle_is_that_of_torch_after_the_warmup(max_steps: int, warmup_steps: int, minimum: float) -> None:
    expected = theirs(
        lr_scheduler.OneCycleLR,
        max_steps - warmup_steps,
        max_lr=1.0,
        total_steps=max_steps - warmup_steps,
        div_factor=1 / 0.04,
        final_div_factor=0.04 / minimum if minimum else math.inf,
        cycle_momentum=False,
    )
    assert after_warmup(max_steps, warmup_steps, type="one_cycle", min_lr_ratio=minimum) == close(expected)


@lengths
@pytest.mark.parametrize("num_cycles", [1, 3])
def test_cyclic_is_that_of_torch_after_the_warmup(max_steps: int, warmup_steps: int, num_cycles: int) -> None:
    curve_steps = max_steps - warmup_steps
    expected = theirs(
        lr_scheduler.CyclicLR,
        curve_steps,
        base_lr=0.1,
        max_lr=1.0,
        step_size_up=curve_steps / num_cycles / 2,
        cycle_momentum=False,
    )
    keys = {"type": "cyclic", "num_cycles": num_cycles, "initial_lr_ratio": 0.1}
    assert after_warmup(max_steps, warmup_steps, **keys) == close(expected)


@lengths
@pytest.mark.parametrize("step_size_steps", [None, 5])
def test_step_is_that_of_torch_after_the_warmup(max_steps: int, warmup_steps: int, step_size_steps: int | None) -> None:
    stair_steps = step_size_steps or math.ceil(max_steps / 3)
    expected = theirs(lr_scheduler.StepLR, max_steps - warmup_steps, step_size=stair_steps, gamma=0.3)
    keys = {"type": "step", "gamma": 0.3, "step_size_steps": step_size_steps}
    values = after_warmup(max_steps, warmup_steps, **keys)
    assert values == pytest.approx(expected, rel=1e-9)


@lengths
def test_exponential_is_that_of_torch_after_the_warmup(max_steps: int, warmup_steps: int) -> None:
    curve_steps = max_steps - warmup_steps
    per_step = 0.01 ** (1 / max(1, curve_steps - 1))
    expected = theirs(lr_scheduler.ExponentialLR, curve_steps, gamma=per_step)
    values = after_warmup(max_steps, warmup_steps, type="exponential", gamma=0.01)
    assert values == close(expected)
    if curve_steps > 1:
        assert values[-1] == pytest.approx(0.01)


@pytest.mark.parametrize("name", sorted(CURVES))
def test_every_schedule_warms_up_in_a_line_from_zero_to_its_first_value(name: str) -> None:
    rates = ours(100, 10, type=name)
    first = 0.04 if name in ("one_cycle", "cyclic") else 1.0
    assert rates[:11] == pytest.approx([first * step / 10 for step in range(11)])


@pytest.mark.parametrize("name", sorted(CURVES))
@pytest.mark.parametrize("max_steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("minimum", [0.0, 0.1])
def test_every_schedule_stays_between_zero_and_the_peak(name: str, max_steps: int, minimum: float) -> None:
    schedule = Schedule(type=name, max_steps=max_steps, min_lr_ratio=minimum)
    for warmup_steps in (0, 1, max_steps):
        multiplier = make_schedule(schedule, max_steps, warmup_steps)
        rates = [multiplier(step) for step in range(max_steps + 3)]
        assert all(0.0 <= rate <= 1.0 for rate in rates)
        assert rates[max_steps:] == [rates[max_steps]] * 3  # past the end, the end


@pytest.mark.parametrize("name", sorted(CURVES.keys() - {"constant", "cyclic"}))
def test_no_decay_falls_below_the_minimum(name: str) -> None:
    keys = {"gamma": 0.001} if name in ("step", "exponential") else {}
    rates = ours(50_000, 100, type=name, min_lr_ratio=0.3, **keys)[100:]
    assert min(rates[10:] if name != "one_cycle" else rates[15_000:]) == pytest.approx(0.3, rel=0.2)
    assert min(rates[15_000:]) >= 0.3


def test_a_function_of_a_module_is_a_curve_after_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    own_curve(monkeypatch, lambda t, span, schedule: 1 - t / (2 * span.curve_steps))
    assert resolve_steps(Schedule(max_steps=500, type="warmup_of_mine:own"), 8, 1).warmup_steps == 0
    assert ours(10, 2, type="curves_of_mine:own") == [0, 0.5, 1, *(1 - t / 16 for t in range(1, 8))]


@pytest.mark.parametrize("wrong", [None, "1", -0.1, math.nan, math.inf, 1j])
def test_a_curve_that_returns_no_factor_is_refused_before_the_first_step(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_curve(monkeypatch, lambda t, span, schedule: wrong if t == span.curve_steps // 2 else 1.0)
    with pytest.raises(SettingError) as refused:
        make_schedule(Schedule(max_steps=9, type="curves_of_mine:own"), 9, 0)
    assert refused.value.settings == ("schedule.type",)


def test_a_curve_that_raises_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    own_curve(monkeypatch, lambda t: 1.0)
    with pytest.raises(SettingError) as refused:
        make_schedule(Schedule(max_steps=9, type="curves_of_mine:own"), 9, 0)
    assert refused.value.settings == ("schedule.type",)


@pytest.mark.parametrize("name", ["curves_of_mine:missing", "no_module_of_mine:own", "math:pi"])
def test_a_curve_that_is_no_function_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own_curve(monkeypatch, lambda t, span, schedule: 1.0)
    refused(make_schedule, Schedule(max_steps=9, type=name), 9, 0, named="schedule.type")


def own_curve(monkeypatch: pytest.MonkeyPatch, curve: Any) -> None:
    module = types.ModuleType("curves_of_mine")
    module.own = curve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "curves_of_mine", module)


def test_epochs_become_steps_rounded_up() -> None:
    plan = resolve_steps(Schedule(num_epochs=3), num_samples=1000, global_batch_size=32)
    assert plan.max_steps == math.ceil(3000 / 32) == 94
    assert_golden(plan.max_steps_reason)
    assert plan.num_epochs == pytest.approx(94 * 32 / 1000)
    assert resolve_steps(Schedule(num_epochs=0.001), 10, 32).max_steps == 1


def test_ratios_count_as_the_decimal_that_was_written() -> None:
    assert 0.07 * 100 > 7
    assert resolve_steps(Schedule(max_steps=100, warmup_ratio=0.07), 10, 1).warmup_steps == 7
    assert resolve_steps(Schedule(num_epochs=0.07), 100, 1).max_steps == 7


@pytest.mark.parametrize(("max_steps", "warmup_steps"), [(1, 0), (2, 1), (100, 1), (101, 2), (5000, 50)])
@pytest.mark.parametrize("name", ["warmup_cosine", "warmup_stable_decay"])
def test_warmup_types_warm_up_over_one_percent_by_default(name: Any, max_steps: int, warmup_steps: int) -> None:
    assert resolve_steps(Schedule(type=name, max_steps=max_steps), 10, 1).warmup_steps == warmup_steps


def test_other_types_warm_up_only_when_asked() -> None:
    assert resolve_steps(Schedule(type="cosine", max_steps=1000), 10, 1).warmup_steps == 0
    assert resolve_steps(Schedule(type="cosine", max_steps=1000, warmup_steps=5), 10, 1).warmup_steps == 5
    assert resolve_steps(Schedule(type="cosine", max_steps=1000, warmup_ratio=0.1), 10, 1).warmup_steps == 100
    assert resolve_steps(Schedule(type="warmup_cosine", max_steps=1000, warmup_steps=0), 10, 1).warmup_steps == 0


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with raises_golden():
        resolve_steps(Schedule(num_epochs=1, warmup_steps=50), num_samples=1000, global_batch_size=32)


def test_no_training_sample_is_refused() -> None:
    with raises_golden():
        resolve_steps(Schedule(max_steps=10), num_samples=0, global_batch_size=32)


def rate_of(learning_rate: float, rule: str, base: int, global_batch_size: int) -> Rate:
    scaling = {"rule": rule, "base_batch_size": base}
    return scale_learning_rate(Optimizer(learning_rate=learning_rate, lr_scaling=scaling), global_batch_size)


def test_linear_scaling_multiplies_by_the_global_batch_over_the_base() -> None:
    rate = rate_of(0.1, "linear", 256, 1024)
    assert (rate.value, rate.factor) == pytest.approx((0.4, 4))
    assert rate.reason == "linear: 0.1 x 1024 / 256 = 0.4"


def test_sqrt_scaling_multiplies_by_the_root_of_that() -> None:
    rate = rate_of(3e-4, "sqrt", 256, 32)
    assert rate.value == pytest.approx(3e-4 * math.sqrt(32 / 256))
    assert rate.reason == "sqrt: 0.0003 x sqrt(32 / 256) = 0.000106066"


def test_without_scaling_the_learning_rate_is_the_one_written() -> None:
    rate = rate_of(3e-4, "none", 256, 32)
    assert (rate.value, rate.factor) == (3e-4, 1)
    assert "not scaled" in rate.reason
