"""What checkpoints cost a run: their size and time, and whether they come as often as failures want them to."""

from collections.abc import Sequence
from dataclasses import dataclass

from accel_train.recipe import Checkpoint
from accel_train.scale.failures import FAILURE_RATES, FailureRate, daly_interval, lost_share, young_interval
from accel_train.scale.hardware import GB
from accel_train.scale.layout import Layout

WRITE_BYTES_PER_SECOND = 1 * GB
"""Of one process, hashing and syncing included: assumed."""
STORAGE_BYTES_PER_SECOND = 20 * GB
"""Of a shared file system, over all processes that write at once: assumed."""
COPY_BYTES_PER_SECOND = 10 * GB
"""From a GPU to host memory, which the training waits for: assumed."""

WRITING_SHARE = 0.1
"""Of the time at most, that a best interval spends writing: the file system has others to serve, and the data to read."""


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
        """How long the training stands still for it."""
        return self.copy_seconds + (0.0 if self.in_background else self.write_seconds)

    @property
    def total_seconds(self) -> float:
        """Until it is published: the next one cannot begin before."""
        return self.copy_seconds + self.write_seconds


def saving_cost(section: Checkpoint, layout: Layout, num_bytes: int) -> SavingCost:
    """Of a whole model one process writes all; of a model in parts every process writes its own."""
    parts = layout.shard_size * layout.tp_size
    writers = layout.world_size if parts > 1 else 1
    held = num_bytes / parts
    slowest = max(num_bytes / writers / WRITE_BYTES_PER_SECOND, num_bytes / STORAGE_BYTES_PER_SECOND)
    return SavingCost(num_bytes, writers, held / COPY_BYTES_PER_SECOND, slowest, section.in_background)


@dataclass(frozen=True)
class Interval:
    """How often to save at one rate of failures."""

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
    rates: Sequence[FailureRate] = FAILURE_RATES,
) -> tuple[Interval, ...]:
    """For each published rate of failures, how often to save, and what the recipe's own interval loses."""
    found = []
    for rate in rates:
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
                lost_share(steps * step_seconds, cost.stall_seconds, between),
                lost_share(max(now, cost.total_seconds), cost.stall_seconds, between) if now else None,
            )
        )
    return tuple(found)
