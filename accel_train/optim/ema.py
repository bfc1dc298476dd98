"""An exponential moving average of the weights, evaluated and saved instead of the last weights.

The average is often better than the last weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from accel_train.model.tensors import like, local_part
from accel_train.runtime.private import move_towards


class Average(ABC):
    """Weights that are evaluated, and saved as the model, in place of the trained weights."""

    names: list[str]
    """Names of the parameters."""

    @abstractmethod
    def update(self, step: int, skipped: Tensor) -> None:
        """Update the average after a step. `skipped` (0-dim, 1.0 for a skipped step) stays on the device."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Restart from the current weights, after loading a checkpoint without an average."""

    @abstractmethod
    def in_place(self) -> AbstractContextManager[None]:
        """Swap the average into the model inside the context."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, for the checkpoint."""


class WeightAverage(Average):
    """The average of the trained weights: one tensor per weight, on its device.

    After step t (0-based): average = d average + (1 - d) weights with d = min(decay, (1 + t) / (10 + t)). The smaller d
    at the start limits the influence of the first steps (the warmup of `tf.train.ExponentialMovingAverage`). A skipped
    step does not change the average. Buffers (the statistics of batch norms) are not averaged.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], decay: float) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.decay = decay
        self.averages = [local_part(parameter.detach()).clone() for parameter in self.parameters]
        """This process's part of the average of each parameter."""

    def decay_at(self, step: int) -> float:
        """Return d for a 0-based step."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """Update the average after a step. `skipped` (0-dim, 1.0 for a skipped step) stays on the device."""
        weights = [local_part(parameter.detach()) for parameter in self.parameters]
        if skipped.device.type == "cpu":
            if not skipped.numpy():
                for average, weight in zip(self.averages, weights, strict=True):
                    average.lerp_(weight, 1 - self.decay_at(step))
            return
        # The factor is 0 for a skipped step: x + 0 (w - x) is x, for finite weights.
        move_towards(self.averages, weights, (1 - skipped) * (1 - self.decay_at(step)))

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Restart from the current weights."""
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.copy_(local_part(parameter.detach()))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average into the model inside the context."""
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
        """Return the averages by parameter name, for the checkpoint."""
        whole = (like(average, weights) for average, weights in zip(self.averages, self.parameters, strict=True))
        return dict(zip(self.names, whole, strict=True))
