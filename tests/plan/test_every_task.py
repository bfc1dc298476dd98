"""A plan knows the memory, the time, and the traffic of every built-in task."""

from pathlib import Path

import pytest
import torch
from torch import nn

from accel_train.plan.place import choose_layout
from accel_train.plan.plan import resolve_plan
from accel_train.plan.traffic import buffer_collectives
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Recipe
from tests.support.detectors import DETECTORS
from tests.support.every_task import CASES, recipe_of
from tests.support.runs import Settings

LAYOUTS: dict[str, tuple[int, Settings]] = {
    "ddp": (8, {}),
    "fsdp2": (8, {"strategy": "fsdp2"}),
    "hsdp": (8, {"strategy": "fsdp2", "dp_shard_size": 4}),
}


def assert_known(recipe: Settings, world_size: int) -> None:
    plan = resolve_plan(Recipe.model_validate(recipe), world_size, gpu="H100")
    assert [part.name for part in plan.memory if part.num_bytes is None] == []
    assert plan.scale.step is not None


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if each == "object-detection" else pytest.mark.slow) for each in CASES]
)
def test_nothing_is_unknown_for_a_built_in_task_under_any_strategy(tmp_path: Path, case: str) -> None:
    for name, (world_size, parallel) in LAYOUTS.items():
        assert_known(recipe_of(case, tmp_path / name, parallel=parallel, batch={"global_batch_size": 16}), world_size)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "detr" else pytest.mark.slow) for each in DETECTORS]
)
def test_nothing_is_unknown_for_a_detector_that_checks_its_own_numbers(tmp_path: Path, name: str) -> None:
    assert_known(recipe_of("object-detection", tmp_path, model={"config": DETECTORS[name]}), 1)


def test_buffers_are_sent_once_a_step_all_under_ddp_and_those_of_norms_under_fsdp2() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(4), nn.InstanceNorm2d(2))
    model.register_buffer("table", torch.zeros(5))
    of_norms, counters = 4 * 2 * (8 + 4), 8 * 2
    for parallel, expected in (({}, of_norms + 4 * 5), ({"strategy": "fsdp2"}, of_norms)):
        found = buffer_collectives(model, choose_layout(Parallel(**parallel), 8, "cuda"))
        assert {each.purpose: each.num_bytes for each in found} == {
            "buffers, float32": expected, "buffers, int64": counters
        }  # fmt: skip
        assert all(each.kind == "broadcast" and each.per_step and each.ring.size == 8 for each in found)
    assert buffer_collectives(model, choose_layout(Parallel(), 1, "cuda")) == ()
    assert buffer_collectives(nn.Linear(2, 2), choose_layout(Parallel(), 8, "cuda")) == ()
