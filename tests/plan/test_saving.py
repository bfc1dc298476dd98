"""A plan says how often to save: by Young's formula, from what saves cost in the run's folder, or else from an
estimate.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from accel_train.core.json_io import utc_event
from accel_train.core.state import Choice
from accel_train.observe.run_folder import RunFolder
from accel_train.plan.format import format_plan
from accel_train.plan.place import Hardware, choose_layout
from accel_train.plan.plan import resolve_plan
from accel_train.plan.saving import SavingCost, save_interval, saving_cost
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Checkpoint
from tests.support.plan_recipe import rows_of
from tests.support.wording import assert_golden


def write_launches(folder: Path, *launches: dict[str, Any], saves: tuple[float, ...] = ()) -> None:
    with RunFolder(folder) as run:
        for seconds in saves:
            run.append_event(utc_event("checkpoint", 1, "saved", None, {"seconds": seconds}))
    lines = [
        {"started": 0, "seconds": 9, "step": 9, "steps": 9, "saves": 0, "world_size": 2, **one} for one in launches
    ]
    (folder / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def cost_in(folder: Path, world_size: int = 2, *, in_background: bool = True) -> SavingCost:
    section = Checkpoint(in_background=in_background)
    return saving_cost(section, choose_layout(Parallel(), world_size, "cuda"), 10**10, folder)


def test_a_save_costs_what_the_launches_on_as_many_processes_have_measured(tmp_path: Path) -> None:
    estimate = SavingCost(Choice(1.0, "estimated"), 11.0)
    assert cost_in(tmp_path) == estimate
    one = {"accounts": {"saving": 6.0}, "saves": 3}
    write_launches(tmp_path, one, saves=(0.5, 0.25, 3.0))
    measured = Choice(2.0, f"the mean of 3 in {tmp_path}")
    assert cost_in(tmp_path) == SavingCost(measured, 2.5)
    assert cost_in(tmp_path, in_background=False) == SavingCost(measured, 2.0)
    assert cost_in(tmp_path, world_size=8) == estimate
    write_launches(tmp_path, one, {"accounts": {"saving": 80.0}, "saves": 1, "world_size": 4})
    assert cost_in(tmp_path) == SavingCost(measured, 12.0)  # it is not known whose saves the events are


def test_processes_write_their_shards_at_once_and_the_training_waits_for_a_copy_alone(tmp_path: Path) -> None:
    def cost(parallel: Parallel, world_size: int, num_bytes: int, *, in_background: bool) -> tuple[float, float]:
        layout = choose_layout(parallel, world_size, "cuda")
        found = saving_cost(Checkpoint(in_background=in_background), layout, num_bytes, tmp_path)
        return found.stall_seconds.value, found.total_seconds

    assert cost(Parallel(), 1024, 10**11, in_background=False) == (110.0, 110.0)
    assert cost(Parallel(strategy="fsdp2"), 64, 64 * 10**9, in_background=True) == pytest.approx((0.1, 0.1 + 64 / 20))


def test_the_interval_is_youngs_for_the_stated_or_published_time_between_failures() -> None:
    cost = SavingCost(Choice(2.0, "estimated"), 12.0)
    assert save_interval(cost, 8, 50.0).seconds == math.sqrt(2 * 2.0 * 50 * 3600)
    published = save_interval(cost, 1024, None)
    assert published.mtbf_seconds.value == pytest.approx(7.9 * 3600)
    assert published.seconds == pytest.approx(math.sqrt(2 * 2.0 * 7.9 * 3600))
    assert save_interval(cost, 8, 0.001).seconds == 12.0  # the next save cannot begin before


def test_the_plan_says_how_often_to_save_and_why_in_one_line() -> None:
    def line(**hardware: Any) -> str:
        recipe = load_recipe("r.yaml", arguments=("--checkpoint.every_steps", "5", "--output_dir", "run"))
        plan = resolve_plan(recipe, 2, "H100", Hardware(**hardware))
        return rows_of(format_plan(plan), "save every")

    assert_golden(line(), "estimated")
    write_launches(Path("run"), {"accounts": {"saving": 3.0}, "saves": 2}, saves=(0.75,))
    found = line(mtbf_hours=2)
    assert_golden(found, "measured")
    assert "(2m 27s)" in found  # sqrt(2 x 1.5 s x 7,200 s)
