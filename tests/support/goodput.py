"""The time of a run's launches, held against what the file system says of it."""

from itertools import pairwise
from pathlib import Path

from accel_train.observe.goodput import LAUNCHES_FILE, goodput_of, read_launches

TICK_SECONDS = 0.02
"""The kernel knows when a process began to a hundredth of a second."""


def assert_accounts_add_up(run_folder: Path, began: float) -> None:
    """The accounts of all launches are the wall clock from the first start to the last end, within 0.1 %.

    `began` is a time (since 1970) just before the first launch; the last end is when the file was last written.
    """
    launches, last_end = read_launches(run_folder), (run_folder / LAUNCHES_FILE).stat().st_mtime
    assert launches[0]["started"] >= began - TICK_SECONDS
    wall = last_end - launches[0]["started"]
    assert abs(sum(goodput_of(launches)["accounts"].values()) - wall) <= max(0.001 * wall, TICK_SECONDS)
    for launch, after in pairwise(launches):
        assert launch["started"] + launch["seconds"] <= after["started"] + TICK_SECONDS, "two launches at once"
