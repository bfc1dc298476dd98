"""A plan takes the times of saves and restarts that the run in its folder has measured, and says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from accel_train.core.json_io import utc_event
from accel_train.observe.run_folder import RunFolder
from accel_train.plan.failures import RESTART_SECONDS, SavingCost, lost_share
from accel_train.plan.format import format_plan
from accel_train.plan.measured import Measured, measured_in, with_measured
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.loader import load_recipe


def write_launches(folder: Path, *launches: dict[str, Any], saves: tuple[float, ...] = ()) -> None:
    with RunFolder(folder) as run:
        for seconds in saves:
            run.append_event(utc_event("checkpoint", 1, "saved", None, {"seconds": seconds}))
    lines = [{"step": 9, "steps": 9, "saves": 0, "world_size": 2, **launch} for launch in launches]
    (folder / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def launch(started: float, seconds: float, **accounts: Any) -> dict[str, Any]:
    facts = {name: accounts.pop(name) for name in ("saves", "steps", "world_size") if name in accounts}
    return {"started": started, "seconds": seconds, "accounts": accounts, **facts}


def test_restarts_are_the_median_of_down_time_and_all_until_the_first_step(tmp_path: Path) -> None:
    write_launches(
        tmp_path,
        launch(0, 100, start_up=50, productive_steps=50),  # no restart: it is the first
        launch(110, 40, imports=3, start_up=4, compile=2, first_step=1, productive_steps=30, saving=6, saves=3),  # 20 s
        launch(151, 20, start_up=3, productive_steps=17),  # 4 s
        launch(172, 5, start_up=5, steps=0),  # it never came to a step
        launch(277, 10, start_up=1, productive_steps=9, saving=2, saves=1),  # 101 s
        launch(288, 90, start_up=80, world_size=4),  # on other processes
        saves=(0.5, 0.25, 3.0),
    )
    found = measured_in(tmp_path, 2)
    assert found == Measured(tmp_path, 20, 3, 2, None, 4)  # whose saves the events are is not known
    write_launches(tmp_path, launch(0, 9, saving=6, saves=3), saves=(0.5, 0.25, 3.0))
    assert measured_in(tmp_path, 2) == Measured(tmp_path, None, 0, 2, 0.5, 3)
    assert measured_in(tmp_path, 8) is None
    assert measured_in(tmp_path / "nothing", 2) is None


@pytest.mark.parametrize(("in_background", "stall", "total"), [(True, 2.0, 5.0), (False, 2.0, 2.0)])
def test_measured_times_take_the_place_of_estimated_ones(in_background: bool, stall: float, total: float) -> None:
    cost = SavingCost(10**9, 1, 0.1, 1.0, in_background)
    assert with_measured(cost, None) == cost
    measured = with_measured(cost, Measured(Path("run"), None, 0, 2.0, 3.0, 4))
    assert (measured.stall_seconds, measured.total_seconds) == (stall, total)


def test_the_plan_says_what_is_measured_and_what_is_assumed() -> None:
    def plan() -> str:
        flags = ("--checkpoint.every_steps", "5", "--output_dir", "run")
        return format_plan(resolve_plan(load_recipe("r.yaml", arguments=flags), 2, "H100"))

    before = plan()
    assert "assumed: from a failure to the next step" in before
    assert "measured" not in before
    write_launches(
        Path("run"), launch(0, 100, saving=3, saves=2), launch(130, 9, start_up=5, first_step=1), saves=(0.75,)
    )
    after = plan()
    assert "750.00 ms  measured in run" in after
    assert "1.50 s  measured: the mean of 2 saves in run" in after
    assert "36.00 s  measured: from the end of a launch to the next step, the median of 1 restart in run" in after
    assert "restarts of 36s in it" in after


def test_a_shorter_restart_loses_less() -> None:
    assert lost_share(100, 1, 1e5, 60) < lost_share(100, 1, 1e5, RESTART_SECONDS)
