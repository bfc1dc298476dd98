"""An exponential moving average of the weights: often better than the last ones, and what is then evaluated and saved."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from accel_train.model.tensors import like, local_part
from accel_train.runtime.private import move_towards


class Average(ABC):
    """Weights that are evaluated, and saved as the model, in place of those that are trained."""

    names: list[str]
    """Of the parameters."""

    @abstractmethod
    def update(self, step: int, skipped: Tensor) -> None:
        """Take in the weights after a step; `skipped` (0-dim, 1.0 where it was) stays on the device."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Begin with the weights as they are: those of a checkpoint that has no average."""

    @abstractmethod
    def in_place(self) -> AbstractContextManager[None]:
        """Inside, the model has the average for its weights."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by the names of their parameters: for the checkpoint."""


class WeightAverage(Average):
    """The average of the trained weights, one tensor for each, on their device.

    After step t (0-based): average = d average + (1 - d) weights with d = min(decay, (1 + t) / (10 + t)), so that the first
    steps do not stay in it for long (the warmup of `tf.train.ExponentialMovingAverage`). A skipped step leaves it alone.
    Buffers (the statistics of batch norms) are not averaged.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], decay: float) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.decay = decay
        self.averages = [local_part(parameter.detach()).clone() for parameter in self.parameters]
        """The average of each parameter, as much as this process holds."""

    def decay_at(self, step: int) -> float:
        """d of a 0-based step."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """Take in the weights after a step; `skipped` (0-dim, 1.0 where it was) stays on the device."""
        weights = [local_part(parameter.detach()) for parameter in self.parameters]
        if skipped.device.type == "cpu":
            if not skipped.numpy():
                for average, weight in zip(self.averages, weights, strict=True):
                    average.lerp_(weight, 1 - self.decay_at(step))
            return
        # 0 for a skipped step: x + 0 (w - x) is x, for finite weights
        move_towards(self.averages, weights, (1 - skipped) * (1 - self.decay_at(step)))

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Begin with the weights as they are."""
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.copy_(local_part(parameter.detach()))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the average for its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            weights = local_part(parameter.detach())
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by the names of their parameters: for the checkpoint."""
        whole = (like(average, weights) for average, weights in zip(self.averages, self.parameters, strict=True))
        return dict(zip(self.names, whole, strict=True))
