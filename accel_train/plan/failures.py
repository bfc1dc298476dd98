"""Failures of a run on many GPUs, the cost of a checkpoint, and how often it is then worth saving."""

import math
from dataclasses import dataclass

from accel_train.core.hardware import GB
from accel_train.plan.place import Layout
from accel_train.recipe.reliability import Checkpoint

DAY_SECONDS = 86_400.0
RESTART_SECONDS = 600.0
"""Time from a failure to the next step: noticing, rescheduling, loading, compiling. Assumed."""
WRITE_BYTES_PER_SECOND = 1 * GB
"""Write speed of one process, hashing and syncing included: assumed."""
STORAGE_BYTES_PER_SECOND = 20 * GB
"""Write speed of a shared file system, over all processes that write at once: assumed."""
COPY_BYTES_PER_SECOND = 10 * GB
"""Copy speed from a GPU to host memory, which the training waits for: assumed."""
WRITING_SHARE = 0.1
"""Largest fraction of the time that a best interval spends writing: the file system has others to serve, and the data to read."""


@dataclass(frozen=True)
class FailureRate:
    """A published rate, as GPU-days between two failures: failures grow with GPUs and with time."""

    gpu_days: float
    source: str

    def seconds_between(self, world_size: int) -> float:
        """Mean time between two failures of a run on so many GPUs."""
        return self.gpu_days * DAY_SECONDS / world_size

    def per_week(self, world_size: int) -> float:
        """Failures expected in a week."""
        return 7 * DAY_SECONDS / self.seconds_between(world_size)


FAILURE_RATES = (
    FailureRate(
        54 * 16_384 / 419, "Llama 3: 419 unexpected interruptions in 54 days of 16,384 H100 (arXiv 2407.21783)"
    ),
    FailureRate(7.9 / 24 * 1024, "Meta's research clusters: 7.9 h between failures at 1,024 A100 (arXiv 2410.21680)"),
)
"""Rare failures first."""


def young_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Seconds of training between two saves that lose least: sqrt(2 d M). Young 1974, CACM 17 (9)."""
    return math.sqrt(2 * save_seconds * seconds_between_failures)


def daly_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Return the same to a higher order, good also where saves are not short beside M. Daly 2006, FGCS 22 (3), equation 37.

    sqrt(2 d M) [1 + sqrt(d / 2M) / 3 + (d / 2M) / 9] - d for d < 2 M, else M.
    """
    if save_seconds >= 2 * seconds_between_failures:
        return seconds_between_failures
    ratio = save_seconds / (2 * seconds_between_failures)
    young = young_interval(save_seconds, seconds_between_failures)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def lost_share(
    interval_seconds: float,
    save_seconds: float,
    seconds_between_failures: float,
    restart_seconds: float = RESTART_SECONDS,
) -> float:
    """Return the share of time without progress: saves, and at each failure half an interval and a restart; 1 at most."""
    saves = save_seconds / (interval_seconds + save_seconds)
    return min(1.0, saves + (interval_seconds / 2 + restart_seconds) / seconds_between_failures)


@dataclass(frozen=True)
class SavingCost:
    """One checkpoint of a run."""

    num_bytes: int
    num_writers: int
    copy_seconds: float
    write_seconds: float
    in_background: bool

    @property
    def stall_seconds(self) -> float:
        """Time that the training waits for it."""
        return self.copy_seconds + (0.0 if self.in_background else self.write_seconds)

    @property
    def total_seconds(self) -> float:
        """Until it is published: the next one cannot begin before."""
        return self.copy_seconds + self.write_seconds


def saving_cost(section: Checkpoint, layout: Layout, num_bytes: int) -> SavingCost:
    """Return the cost of a checkpoint: one process writes a whole model, of a sharded one each process its shards."""
    parts = layout.shard_size * layout.tp_size
    writers = layout.world_size if parts > 1 else 1
    held = num_bytes / parts
    slowest = max(num_bytes / writers / WRITE_BYTES_PER_SECOND, num_bytes / STORAGE_BYTES_PER_SECOND)
    return SavingCost(num_bytes, writers, held / COPY_BYTES_PER_SECOND, slowest, section.in_background)


@dataclass(frozen=True)
class Interval:
    """The best interval between saves at one rate of failures."""

    rate: FailureRate
    failures_per_week: float
    young_seconds: float
    daly_seconds: float
    best_steps: int
    """Daly's in steps: 1 at least, and no more often than `WRITING_SHARE` lets it."""
    lost_at_best: float
    lost_now: float | None
    """With the recipe's `checkpoint.every_steps`; None where that is 0, so that a failure costs everything."""


def best_intervals(
    section: Checkpoint,
    cost: SavingCost,
    world_size: int,
    step_seconds: float,
    restart_seconds: float = RESTART_SECONDS,
) -> tuple[Interval, ...]:
    """Return how often to save for each published rate of failures, and what the recipe's own interval loses."""
    found = []
    for rate in FAILURE_RATES:
        between = rate.seconds_between(world_size)
        daly = daly_interval(cost.stall_seconds, between)
        steps = max(1, round(max(daly, cost.total_seconds / WRITING_SHARE) / step_seconds))
        now = section.every_steps * step_seconds
        found.append(
            Interval(
                rate,
                rate.per_week(world_size),
                young_interval(cost.stall_seconds, between),
                daly,
                steps,
                lost_share(steps * step_seconds, cost.stall_seconds, between, restart_seconds),
                lost_share(max(now, cost.total_seconds), cost.stall_seconds, between, restart_seconds) if now else None,
            )
        )
    return tuple(found)
