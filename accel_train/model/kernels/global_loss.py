"""Losses that are not a sum over samples: they need numbers of all micro-batches of all processes first.

The micro-batches of a step are read twice. A first forward without gradients gives this process's part, one exchange
joins the parts of all processes, and the training forwards then compute with the whole. With one micro-batch per
process, its training forward exchanges the parts itself. So losses and gradients do not depend on the number of
processes or on accumulation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.model.isolation import RandomState
from accel_train.task import Batch

Whole = TypeVar("Whole")


class GlobalLoss(ABC, Generic[Whole]):
    """A loss over the global batch. A task names it as `global_loss`, and returns parts from `global_part`.

    `loss_sum` of the task calls `whole(part)` in its training forward.
    """

    loss: Tensor | None = None
    """Number of the last step to log, 0-dim, equal on all processes; None for nothing."""

    def __init__(self) -> None:
        self._whole: Whole | None = None
        # The first forward of the step exchanges the parts.
        self._meets_later = False
        self._weighs, self._is_alone = True, True

    @abstractmethod
    def join(self, parts: Sequence[Tensor], weighs: Sequence[bool], *, is_alone: bool) -> Whole:
        """* Return the whole from this process's parts. Parts that do not weigh only keep the processes together."""

    @abstractmethod
    def join_failed(self, device: torch.device) -> None:
        """* Take part in `join` of the other processes, so that their loss becomes NaN."""

    @property
    def is_in_step(self) -> bool:
        """Return whether the whole of a step is known."""
        return self._whole is not None

    @torch.compiler.disable
    def whole(self, part: Tensor) -> Whole:
        """Return the whole of the step. Outside of a step, the micro-batch counts as the global batch."""
        if self._whole is not None:
            return self._whole
        if not self._meets_later:
            return self.join([part], [True], is_alone=True)
        return self._join([part], [self._weighs])

    def _join(self, parts: Sequence[Tensor], weighs: Sequence[bool]) -> Whole:
        self._whole = self.join(parts, weighs, is_alone=self._is_alone)
        self._meets_later = False
        return self._whole

    @contextmanager
    def over(
        self,
        part_of: Callable[[Batch], Tensor],
        micro_batches: Sequence[tuple[Batch, int]],
        device: torch.device,
        *,
        is_alone: bool,
        one_each: bool,
        can_fail_alone: bool,
    ) -> Iterator[None]:
        """Compute losses over the global batch that the micro-batches of all processes form, inside the context.

        Args:
            part_of: returns the part of a micro-batch, by a forward.
            micro_batches: batches with their number of targets. A batch without targets does not weigh.
            one_each: every process has one micro-batch, so its training forward also gives the part.
            can_fail_alone: if the forward fails on one process, it still takes part in the exchange, so that the others
                do not wait.
        """
        assert not one_each or len(micro_batches) == 1, "the same number on every process"
        self._whole, self._is_alone, self._meets_later = None, is_alone, True
        weighs = [num_targets > 0 for _, num_targets in micro_batches]
        self._weighs = not one_each or weighs[0]
        try:
            if not one_each:
                # The training forwards must draw the same random numbers again.
                state = RandomState(device)
                with torch.no_grad():
                    parts = [part_of(batch) for batch, _ in micro_batches]
                state.put_back()
                self._join(parts, weighs)
            yield
        except (RuntimeError, MemoryError):
            if self._meets_later and can_fail_alone and not is_alone:
                self.join_failed(device)
            raise
        finally:
            self._whole, self._meets_later, self._weighs = None, False, True


class SummedParts(GlobalLoss[Tensor]):
    """A loss over the global batch whose whole is the sum of all parts, each of `num_terms` numbers."""

    @property
    @abstractmethod
    def num_terms(self) -> int:
        """Number of terms of a part."""

    def join(self, parts: Sequence[Tensor], weighs: Sequence[bool], *, is_alone: bool) -> Tensor:
        """* Return the sums over all parts and processes."""
        weighed = [part if weight else torch.zeros_like(part) for part, weight in zip(parts, weighs, strict=True)]
        sums = torch.stack(weighed).sum(0)
        if not is_alone:
            dist.all_reduce(sums)
        return sums

    def join_failed(self, device: torch.device) -> None:
        """* Send NaN as this process's sums."""
        dist.all_reduce(torch.full((self.num_terms,), torch.nan, dtype=sums_dtype(device), device=device))


def sums_dtype(device: torch.device) -> torch.dtype:
    """Return fp64, which holds every count exactly, or fp32 on MPS, which does not support it."""
    return torch.float32 if device.type == "mps" else torch.float64
