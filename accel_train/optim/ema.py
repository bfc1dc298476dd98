"""An exponential moving average of the weights: often better than the last ones, and what is then evaluated and saved."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accel_train.tensor_parts import like, local_part


class WeightAverage:
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
        """Of each parameter, as much as this process holds."""

    def decay_at(self, step: int) -> float:
        """d of a 0-based step."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """Take in the weights after a step; `skipped` (0-dim, 1.0 where it was) stays on the device."""
        weights = [local_part(parameter.detach()) for parameter in self.parameters]
        if skipped.device.type == "cpu":
            if not skipped.numpy():
                torch._foreach_lerp_(self.averages, weights, 1 - self.decay_at(step))
            return
        share = (1 - skipped) * (
            1 - self.decay_at(step)
        )  # 0 for a skipped step: x + 0 (w - x) is x, for finite weights
        torch._foreach_add_(self.averages, torch._foreach_mul(torch._foreach_sub(weights, self.averages), share))

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
        """The averages by the names of their parameters: for the checkpoint."""
        whole = (like(average, weights) for average, weights in zip(self.averages, self.parameters, strict=True))
        return dict(zip(self.names, whole, strict=True))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put saved averages back.

        Raises:
            ValueError: they are of other parameters.
        """
        if tensors.keys() != set(self.names):
            raise ValueError("the checkpoint's averaged weights do not fit this model")
        for name, average in zip(self.names, self.averages, strict=True):
            average.copy_(tensors[name])
