"""The training loss of each source of a mixture, added up where the loss is computed."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from accel_train.data.labels import IGNORED_LABEL


class LossBySource(NamedTuple):
    """Sums of a micro-batch for each source: its losses, then its numbers of targets."""

    sources: Tensor
    """Number of the source of each label, (B x T,) int64."""
    sums: Tensor
    """(2 x sources,) fp32, on the device."""

    @classmethod
    def of(cls, sources: Tensor, labels: Tensor, size: int) -> Self:
        """Return the sums, `size` numbers, with the targets counted and the losses to come; labels are (B, T)."""
        sums = torch.zeros(size, device=labels.device)
        is_target = (labels != IGNORED_LABEL).flatten().float()
        return cls(sources.flatten(), sums.index_add_(0, sources.flatten() + size // 2, is_target))

    def at(self, labels: Tensor, num_kept: int) -> Self:
        """Return the same sums for the labels that are not -100, if only those are kept; labels are (B x T,)."""
        return self if num_kept == len(labels) else self._replace(sources=self.sources[labels != IGNORED_LABEL])

    def add(self, part: slice, losses: Tensor) -> None:
        """Add the losses (N,) of a part of the positions."""
        self.sums.index_add_(0, self.sources[part], losses.detach().float())


def loss_by_source(model: nn.Module, labels: Tensor, counted: Any) -> LossBySource | None:
    """Return the sums of a micro-batch of a mixture in training, which `counted` adds to the step's. None otherwise."""
    if (sources := getattr(counted, "sources", None)) is None or not model.training:
        return None
    found = LossBySource.of(sources, labels, counted.size)
    counted.add(found.sums)
    return found


@torch.no_grad()
def count_losses(
    model: nn.Module,
    counted: Any,
    loss_sum: Callable[..., Tensor],
    *tensors: Tensor,
    ignored: int | None = None,
) -> None:
    """Add the losses of the sources of a mixture in training, and their numbers of targets, to `counted`.

    `loss_sum` returns the loss of a batch from `tensors`, (N, ...) each, as a sum over samples. A sample has one
    target, or those of the last tensor that are not `ignored`.
    """
    if (numbers := getattr(counted, "sources", None)) is None or not model.training:
        return
    losses = torch.vmap(lambda *one: loss_sum(*(each[None] for each in one)))(*(each.detach() for each in tensors))
    sources = numbers.view(len(losses), -1)[:, 0]
    sums = torch.zeros(counted.size, device=losses.device).index_add_(0, sources, losses.float())
    targets = torch.ones_like(losses) if ignored is None else (tensors[-1] != ignored).flatten(1).sum(1)
    counted.add(sums.index_add_(0, sources + counted.size // 2, targets.float()))
