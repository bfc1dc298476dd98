"""Looking into a bad step: which process, which samples, which module, and whether it happens again."""

from dataclasses import dataclass

from accel_train.guard import Verdict
from accel_train.prepare import Run
from accel_train.state import StepResult
from accel_train.step import MicroBatch


@dataclass(frozen=True)
class Cause:
    """What was found out about a bad step."""

    folder_name: str
    sentence: str


def look_into(run: Run, result: StepResult, verdict: Verdict, micro_batches: list[MicroBatch]) -> Cause | None:
    """Find the cause of a bad step."""
    return None
