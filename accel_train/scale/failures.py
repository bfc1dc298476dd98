"""How often a run on many GPUs fails, and how often it is then worth saving."""

import math
from dataclasses import dataclass

DAY_SECONDS = 86_400.0
RESTART_SECONDS = 600.0
"""From a failure to the next step: noticing, rescheduling, loading, compiling. Assumed."""


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
    """The same to a higher order, good also where saves are not short beside M. Daly 2006, FGCS 22 (3), equation 37.

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
    """Of all time, what is no progress: saves, and at each failure half an interval and a restart; 1 at most, to first order."""
    saves = save_seconds / (interval_seconds + save_seconds)
    return min(1.0, saves + (interval_seconds / 2 + restart_seconds) / seconds_between_failures)
