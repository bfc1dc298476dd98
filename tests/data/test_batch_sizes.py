"""Batch sizes multiply out, contradictions are refused with numbers that work, and learning rates say their formula."""

import itertools
import math
from dataclasses import FrozenInstanceError

import pytest

from accel_train.batching import BatchSizes, resolve_batch, scale_learning_rate
from accel_train.recipe import Batch
from accel_train.recipe_optimizer import LRScaling


def sizes(world_size: int, **keys: int) -> tuple[int, int, int]:
    """(global, per device, accumulation) of a recipe with these keys."""
    resolved = resolve_batch(Batch(**keys), world_size)
    return resolved.global_batch_size, resolved.per_device_batch_size, resolved.gradient_accumulation_steps


def refusal(world_size: int, **keys: int) -> str:
    with pytest.raises(ValueError, match="batch_size") as error:
        resolve_batch(Batch(**keys), world_size)
    return str(error.value)


@pytest.mark.parametrize(
    ("per_device", "accumulation", "world_size"), list(itertools.product([1, 3, 8], [1, 2, 5], [1, 2, 3]))
)
def test_any_two_sizes_give_the_third(per_device: int, accumulation: int, world_size: int) -> None:
    total = per_device * accumulation * world_size
    keys = {
        "global_batch_size": total,
        "per_device_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
    }
    assert sizes(world_size, **keys) == (total, per_device, accumulation)
    for left_out in keys:
        two = {key: value for key, value in keys.items() if key != left_out}
        assert sizes(world_size, **two) == (total, per_device, accumulation)


def test_one_size_alone_means_no_accumulation() -> None:
    assert sizes(4, global_batch_size=64) == (64, 16, 1)
    assert sizes(4, per_device_batch_size=16) == (64, 16, 1)


def test_without_sizes_the_global_batch_is_32_and_said_to_be_the_default() -> None:
    assert sizes(4) == (32, 8, 1)
    assert resolve_batch(Batch(), 4).reason == ("32 = 8 per device x 1 accumulation x 4 processes; 32 is the default")


def test_accumulation_alone_divides_the_default_global_batch() -> None:
    assert sizes(2, gradient_accumulation_steps=4) == (32, 4, 4)
    assert "32 is the default" in resolve_batch(Batch(gradient_accumulation_steps=4), 2).reason


def test_the_reason_is_the_product_with_its_numbers() -> None:
    resolved = resolve_batch(Batch(global_batch_size=32, per_device_batch_size=8), 2)
    assert resolved.reason == "32 = 8 per device x 2 accumulation x 2 processes"
    assert resolve_batch(Batch(per_device_batch_size=8), 1).reason == "8 = 8 per device x 1 accumulation x 1 process"


def test_evaluation_takes_twice_the_training_size_unless_it_is_said() -> None:
    assert resolve_batch(Batch(per_device_batch_size=8), 2).per_device_eval_batch_size == 16
    assert (
        resolve_batch(Batch(per_device_batch_size=8, per_device_eval_batch_size=3), 2).per_device_eval_batch_size == 3
    )


def test_three_sizes_that_disagree_are_refused_with_their_product() -> None:
    message = refusal(4, global_batch_size=32, per_device_batch_size=8, gradient_accumulation_steps=2)
    assert message == (
        "global_batch_size=32 is not per_device_batch_size 8 x gradient_accumulation_steps 2 x 4 processes = 64; "
        "set global_batch_size to 64, or leave one of the three out"
    )


def test_an_indivisible_global_batch_is_refused_with_the_nearest_that_divide() -> None:
    assert refusal(2, global_batch_size=50, per_device_batch_size=8) == (
        "global_batch_size=50 is not divisible by 2 processes x per_device_batch_size 8 = 16; "
        "try 48 or 64, or per_device_batch_size 5 or 25"
    )
    assert refusal(3, global_batch_size=32) == (
        "global_batch_size=32 is not divisible by 3 processes; try 30 or 33, or run on 1, 2, 4, 8, 16 or 32 processes"
    )
    assert refusal(3).startswith("global_batch_size=32 (the default) is not divisible by 3 processes; try 30 or 33")
    assert refusal(2, global_batch_size=50, gradient_accumulation_steps=4) == (
        "global_batch_size=50 is not divisible by 2 processes x gradient_accumulation_steps 4 = 8; "
        "try 48 or 56, or gradient_accumulation_steps 1 or 5"
    )


def test_a_global_batch_smaller_than_one_micro_batch_each_is_refused() -> None:
    assert "; try 16, or per_device_batch_size 3" in refusal(2, global_batch_size=6, per_device_batch_size=8)
    assert "; try 8, or run on 1, 2 or 4 processes" in refusal(8, global_batch_size=4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [1, 31, 50, 97])
@pytest.mark.parametrize("per_device", [2, 8])
def test_the_sizes_a_refusal_suggests_are_accepted(world_size: int, total: int, per_device: int) -> None:
    if total % (world_size * per_device) == 0:
        return
    message = refusal(world_size, global_batch_size=total, per_device_batch_size=per_device)
    suggested = message.split("; try ")[1].split(", or per_device_batch_size ")
    for size in suggested[0].split(" or "):
        assert sizes(world_size, global_batch_size=int(size), per_device_batch_size=per_device)[0] == int(size)
    for size in suggested[1].split(" or ") if len(suggested) > 1 else []:
        assert sizes(world_size, global_batch_size=total, per_device_batch_size=int(size))[0] == total


def test_resolved_sizes_cannot_be_changed() -> None:
    resolved = resolve_batch(Batch(), 1)
    with pytest.raises(FrozenInstanceError):
        resolved.global_batch_size = 64  # type: ignore[misc]


def batch_of(world_size: int, per_device: int, accumulation: int) -> BatchSizes:
    return resolve_batch(Batch(per_device_batch_size=per_device, gradient_accumulation_steps=accumulation), world_size)


def test_linear_scaling_multiplies_by_the_global_batch_over_the_base() -> None:
    choice = scale_learning_rate(0.1, LRScaling(rule="linear", base_batch_size=256), batch_of(8, 64, 2))
    assert choice.value == pytest.approx(0.4)
    assert choice.reason == "linear: 0.1 x (64 per device x 2 accumulation x 8 processes) / 256 = 0.4"


def test_sqrt_scaling_multiplies_by_the_root_of_that() -> None:
    choice = scale_learning_rate(3e-4, LRScaling(rule="sqrt", base_batch_size=256), batch_of(2, 16, 1))
    assert choice.value == pytest.approx(3e-4 * math.sqrt(32 / 256))
    assert choice.reason == "sqrt: 0.0003 x sqrt((16 per device x 1 accumulation x 2 processes) / 256) = 0.000106066"


def test_without_scaling_the_learning_rate_is_the_one_written() -> None:
    choice = scale_learning_rate(3e-4, LRScaling(), batch_of(2, 16, 1))
    assert choice.value == 3e-4
    assert choice.reason == (
        "none: 0.0003 as written, not scaled with the global batch of 32 (16 per device x 1 accumulation x 2 processes)"
    )


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_scaling_sees_only_the_global_batch(rule: str) -> None:
    scaling = LRScaling.model_validate({"rule": rule, "base_batch_size": 32})
    values = [
        scale_learning_rate(1.0, scaling, batch_of(*split)).value for split in [(1, 64, 1), (4, 16, 1), (2, 4, 8)]
    ]
    assert values == [values[0]] * 3
    assert scale_learning_rate(0.5, scaling, batch_of(2, 16, 1)).value == 0.5
