"""Batch sizes multiply out, and contradictions are refused with numbers that work."""

import itertools
from dataclasses import FrozenInstanceError

import pytest

from accel_train.data.batch_sizes import resolve_batch
from accel_train.recipe.schema import Batch
from tests.support.runs import refused
from tests.support.wording import assert_golden


def sizes(world_size: int, **keys: int) -> tuple[int, int, int]:
    """(global, per device, accumulation) of a recipe with these keys."""
    resolved = resolve_batch(Batch(**keys), world_size)
    return resolved.global_batch_size, resolved.per_device_batch_size, resolved.gradient_accumulation_steps


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
    assert_golden(resolve_batch(Batch(), 4).reason)


def test_accumulation_alone_divides_the_default_global_batch() -> None:
    assert sizes(2, gradient_accumulation_steps=4) == (32, 4, 4)
    assert "32 is the default" in resolve_batch(Batch(gradient_accumulation_steps=4), 2).reason


def test_the_reason_is_the_product_with_its_numbers() -> None:
    several = resolve_batch(Batch(global_batch_size=32, per_device_batch_size=8), 2)
    alone = resolve_batch(Batch(per_device_batch_size=8), 1)
    assert_golden(f"{several.reason}\n{alone.reason}")


def test_evaluation_takes_twice_the_training_size_unless_it_is_said() -> None:
    assert resolve_batch(Batch(per_device_batch_size=8), 2).per_device_eval_batch_size == 16
    assert (
        resolve_batch(Batch(per_device_batch_size=8, per_device_eval_batch_size=3), 2).per_device_eval_batch_size == 3
    )


@pytest.mark.parametrize(
    ("processes", "sizes", "named"),
    [
        (
            4,
            {"global_batch_size": 32, "per_device_batch_size": 8, "gradient_accumulation_steps": 2},
            "=32|8 x|2 x 4 processes = 64|global_batch_size to 64",
        ),
        (2, {"global_batch_size": 50, "per_device_batch_size": 8}, "8 = 16|48 or 64|per_device_batch_size 5 or 25"),
        (3, {"global_batch_size": 32}, "=32|3 processes|30 or 33|1, 2, 4, 8, 16 or 32"),
        (3, {}, "=32 (the default)|3 processes|30 or 33"),
        (
            2,
            {"global_batch_size": 50, "gradient_accumulation_steps": 4},
            "4 = 8|48 or 56|gradient_accumulation_steps 1 or 5",
        ),
        (2, {"global_batch_size": 6, "per_device_batch_size": 8}, "=6|try 16|per_device_batch_size 3"),
        (8, {"global_batch_size": 4}, "=4|try 8|1, 2 or 4 processes"),
    ],
)
def test_sizes_that_do_not_multiply_out_are_refused_with_numbers_that_do(
    processes: int, sizes: dict[str, int], named: str
) -> None:
    refused(resolve_batch, Batch(**sizes), processes, named=f"global_batch_size|{named}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [1, 31, 50, 97])
@pytest.mark.parametrize("per_device", [2, 8])
def test_the_sizes_a_refusal_suggests_are_accepted(world_size: int, total: int, per_device: int) -> None:
    if total % (world_size * per_device) == 0:
        return
    sizes_of_recipe = Batch(global_batch_size=total, per_device_batch_size=per_device)
    message = refused(resolve_batch, sizes_of_recipe, world_size, named="; try ")
    suggested = str(message).split("; try ")[1].split(", or per_device_batch_size ")
    for size in suggested[0].split(" or "):
        assert sizes(world_size, global_batch_size=int(size), per_device_batch_size=per_device)[0] == int(size)
    for size in suggested[1].split(" or ") if len(suggested) > 1 else []:
        assert sizes(world_size, global_batch_size=total, per_device_batch_size=int(size))[0] == total


def test_resolved_sizes_cannot_be_changed() -> None:
    resolved = resolve_batch(Batch(), 1)
    with pytest.raises(FrozenInstanceError):
        resolved.global_batch_size = 64  # type: ignore[misc]
