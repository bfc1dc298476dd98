"""Times of saves and restarts that the run of the same folder has measured, in place of assumed ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from accel_train.core.state import JsonRecord
from accel_train.observe.goodput import UNTIL_A_STEP, down_times, read_launches
from accel_train.observe.run_folder import EVENTS_FILE, read_events
from accel_train.plan.failures import SavingCost


@dataclass(frozen=True)
class Measured:
    """Times of earlier launches on as many processes; None, or 0, where there is no such save or restart."""

    run_folder: Path
    restart_seconds: float | None
    """Median time from the end of a launch to the end of the next one's first step."""
    num_restarts: int
    stall_seconds: float | None
    """Mean time that the training stood still for a save."""
    write_seconds: float | None
    """Median time until a checkpoint was published."""
    num_saves: int


def measured_in(run_folder: Path, world_size: int) -> Measured | None:
    """Return what the launches of a run on `world_size` processes have measured; None where there are none."""
    launches = read_launches(run_folder)
    alike = [launch for launch in launches if launch.get("world_size") == world_size]
    num_saves = sum(launch["saves"] for launch in alike)
    saving = sum(launch["accounts"].get("saving", 0.0) for launch in alike)
    written = _write_times(run_folder) if len(alike) == len(launches) else []
    restarts = _restarts(launches, world_size)
    if not restarts and not num_saves:
        return None
    return Measured(
        run_folder,
        median(restarts) if restarts else None,
        len(restarts),
        saving / num_saves if num_saves else None,
        median(written) if written else None,
        num_saves,
    )


def with_measured(cost: SavingCost, measured: Measured | None) -> SavingCost:
    """Return the cost of a checkpoint with the measured times in place of the estimated ones."""
    if measured is None or measured.stall_seconds is None:
        return cost
    if not cost.in_background:
        return replace(cost, copy_seconds=0.0, write_seconds=measured.stall_seconds)
    write = cost.write_seconds if measured.write_seconds is None else measured.write_seconds
    return replace(cost, copy_seconds=measured.stall_seconds, write_seconds=write)


def _restarts(launches: Sequence[JsonRecord], world_size: int) -> list[float]:
    return [
        down + sum(launch["accounts"].get(name, 0.0) for name in UNTIL_A_STEP)
        for down, launch in zip(down_times(launches), launches[1:], strict=True)
        if launch["steps"] and launch.get("world_size") == world_size
    ]


def _write_times(run_folder: Path) -> list[float]:
    events = read_events(run_folder) if (run_folder / EVENTS_FILE).is_file() else []
    times = [event.get("seconds") for event in events if event["event"] == "checkpoint"]
    return [seconds for seconds in times if isinstance(seconds, int | float)]
