"""The interval between saves, from the time that a save stops training and the run's mean time between failures."""

import math
from pathlib import Path
from statistics import median
from typing import NamedTuple

from accel_train.core.hardware import GB
from accel_train.core.state import Choice
from accel_train.observe.goodput import read_launches
from accel_train.observe.run_folder import EVENTS_FILE, read_events
from accel_train.plan.place import Layout
from accel_train.recipe.schema import Checkpoint

WRITE_BYTES_PER_SECOND = 1 * GB
"""Assumed write speed of one process in bytes per second, including hashing and syncing."""
STORAGE_BYTES_PER_SECOND = 20 * GB
"""Assumed write speed of a shared file system in bytes per second, over all processes that write at once."""
COPY_BYTES_PER_SECOND = 10 * GB
"""Assumed copy speed from a GPU to host memory in bytes per second. Training waits for this copy."""
GPU_HOURS_BETWEEN_FAILURES = 7.9 * 1024
"""GPU hours between failures: 7.9 h on 1,024 A100 (arXiv 2410.21680). Failures grow with the GPUs and with time."""
RATE_SOURCE = "the rate of Meta's research clusters, arXiv 2410.21680; set yours with --mtbf"


class SavingCost(NamedTuple):
    """The cost of one checkpoint in seconds."""

    stall_seconds: Choice[float]
    """Seconds that training waits for the checkpoint."""
    total_seconds: float
    """Seconds until the checkpoint is published. The next one cannot begin before."""


class SaveInterval(NamedTuple):
    """The interval between saves, and the two times that determine it."""

    seconds: float
    """Interval in seconds of training: Young's sqrt(2 d M), but at least the duration of a save.

    Source: Young 1974, CACM 17 (9).
    """
    stall_seconds: Choice[float]
    mtbf_seconds: Choice[float]


def saving_cost(section: Checkpoint, layout: Layout, num_bytes: int, run_folder: Path) -> SavingCost:
    """Return the cost of a checkpoint of `num_bytes`, measured or estimated.

    A measurement comes from launches in `run_folder` with the same number of processes. One process writes a whole
    model. If the model is sharded, each process writes its shards.
    """
    parts = layout.shard_size * layout.tp_size
    writers = layout.world_size if parts > 1 else 1
    stall = num_bytes / parts / COPY_BYTES_PER_SECOND
    write = max(num_bytes / writers / WRITE_BYTES_PER_SECOND, num_bytes / STORAGE_BYTES_PER_SECOND)
    stall += 0.0 if section.in_background else write
    reason = "estimated"
    launches = read_launches(run_folder)
    alike = [launch for launch in launches if launch.get("world_size") == layout.world_size]
    if num_saves := sum(launch["saves"] for launch in alike):
        stall = sum(launch["accounts"].get("saving", 0.0) for launch in alike) / num_saves
        reason = f"the mean of {num_saves} in {run_folder}"
        # Events do not say on how many processes a checkpoint was written.
        write = _median_write(run_folder, write) if len(alike) == len(launches) else write
    return SavingCost(Choice(stall, reason), stall + write if section.in_background else stall)


def save_interval(cost: SavingCost, world_size: int, mtbf_hours: float | None) -> SaveInterval:
    """Return the interval between saves. `mtbf_hours` is the mean time between failures, or None for a published rate.

    Raises:
        ValueError: --mtbf is not above 0.
    """
    if mtbf_hours is None:
        mtbf = Choice(3600 * GPU_HOURS_BETWEEN_FAILURES / world_size, RATE_SOURCE)
    elif mtbf_hours > 0:
        mtbf = Choice(3600 * mtbf_hours, "from --mtbf")
    else:
        raise ValueError(f"--mtbf={mtbf_hours:g}: must be above 0, the hours between two failures of the run")
    young = math.sqrt(2 * cost.stall_seconds.value * mtbf.value)
    return SaveInterval(max(young, cost.total_seconds), cost.stall_seconds, mtbf)


def _median_write(run_folder: Path, otherwise: float) -> float:
    events = read_events(run_folder) if (run_folder / EVENTS_FILE).is_file() else []
    times = [event.get("seconds") for event in events if event["event"] == "checkpoint"]
    written = [seconds for seconds in times if isinstance(seconds, int | float)]
    return median(written) if written else otherwise
