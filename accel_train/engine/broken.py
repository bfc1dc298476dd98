"""Broken training samples within `data.max_broken`: left out of their step, counted, and named once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from accel_train.core.errors import DataError
from accel_train.core.state import StepResult
from accel_train.data.samples import fetch_readable, first_readable
from accel_train.task import Collate, Collated

if TYPE_CHECKING:
    from accel_train.engine.run import RunContext

FAULTS = "faults"
"""Name of the errors of broken samples in a micro-batch."""


def collate_readable(dataset: Any, collate: Collate, most: int, numbers: Sequence[int]) -> Collated:
    """Return the micro-batch of the samples that can be read, with the errors of the others.

    If none can be read, another sample fills the micro-batch, without a target. `most` is `data.max_broken`.
    """
    samples, faults = fetch_readable(dataset, numbers)
    batch = collate(samples or first_readable(dataset, most))
    if not samples:
        batch["num_targets"] = 0
    batch[FAULTS] = faults
    return batch


def count_broken(run: "RunContext", result: StepResult) -> None:
    """Report the samples that turned out broken in a step, each once.

    Each sample is one target, so a step with fewer targets than samples had broken ones. All processes know both
    numbers from the step's own collective, and only then tell each other the errors. So all have counted the same
    samples: those that any process has met since it started or resumed, however often each is read again.

    Raises:
        DataError: on all processes, if more than `data.max_broken` samples are broken.
    """
    most = run.plan.data.max_broken
    if not most or result.num_targets == len(run.plan.order.step_samples(result.step - 1)):
        return
    for fault in sorted({*gather_object([*run.faults])} - run.broken):
        run.broken.add(fault)
        number = f"broken sample {len(run.broken)}, and data.max_broken is {most}"
        if len(run.broken) > most:
            raise DataError(f"{fault} ({number})")
        run.observer.on_event("broken_sample", result.step, f"{fault} ({number})")
