"""Broken training samples within `data.max_broken`: left out of their step, counted, and named once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from torch import Tensor

from accel_train.core.state import StepResult
from accel_train.data.samples import fetch_readable, first_readable, numbered
from accel_train.engine.step import Counted
from accel_train.task import Collate, Collated

if TYPE_CHECKING:
    from accel_train.engine.run import RunContext

FAULTS = "faults"
"""Name of the errors of broken samples in a micro-batch."""


class Faults(Counted):
    """Errors of broken samples. Their number travels with the statistics of each step."""

    def __init__(self) -> None:
        super().__init__(1)
        self.here = dict[str, None]()
        """Errors that this process has met, the oldest first."""
        self.sent = 0
        """Number of them at the end of the last step."""
        self.known = set[str]()
        """Errors that any process has met, as all processes have counted them."""
        self.met = 0.0
        """Sum over all processes of the errors that each had met at the last count."""

    def take(self, like: Tensor) -> Tensor:
        self.sent = len(self.here)
        return like.new_full((1,), self.sent)


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

    All processes know from the step's own collective whether some process has met another error, and only then tell
    each other the errors. So all have counted the same samples: those that any process has met since it started or
    resumed, however often each is read again.

    Raises:
        DataError: on all processes, if more than `data.max_broken` samples are broken.
    """
    most, faults, shards = run.plan.data.max_broken, run.faults, run.plan.data.shards
    found: Sequence[str] = ()
    if shards is not None:
        # All processes count the same lines when they read a block.
        found, most = [*shards.broken][len(faults.known) :], shards.shards.cut.data.max_broken
    elif most and result.counts[0] != faults.met:
        faults.met = result.counts[0]
        found = sorted({*gather_object([*faults.here][: faults.sent])} - faults.known)
    for fault in found:
        faults.known.add(fault)
        run.observer.on_event("broken_sample", result.step, numbered(fault, len(faults.known), most))
