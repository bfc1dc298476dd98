"""The base of optimizers whose step can be skipped on the device, as the fused ones of torch can."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.model.tensors import local_part


class SkippableOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that takes `found_inf` and `grad_scale` as the fused kernels of torch do.

    `found_inf` (0-dim, on the device): 1.0 leaves weights and state untouched to the bit, and the host does not read it.
    `grad_scale` (0-dim): gradients are divided by it. None: neither. Under FSDP2 each process computes with its own part.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {**defaults, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient, or none."""
        assert closure is None, "gradients are there before the step"
        self.update(None if self.found_inf is None else self.found_inf.bool())

    @abstractmethod
    def update(self, skip: Tensor | None) -> None:
        """Update all weights that have a gradient; write with `replace`, which leaves them as they are where `skip` (0-dim) is true."""

    def gradients(self, group: dict[str, Any]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the weights of a group that have a gradient, each with what this process holds of it, divided by `grad_scale`."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = local_part(parameter.grad)
                yield parameter, gradient if self.grad_scale is None else gradient / self.grad_scale

    def state_of(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return this process's part of a state tensor that has its weight's shape; zeros at first."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        return local_part(state[name])


def replace(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Write new values, or with a true `skip` (0-dim) the old ones, every bit of them: NaN in `new` is then dropped."""
    old.copy_(new if skip is None else torch.where(skip, old, new))


def decay_and_add(
    parameter: nn.Parameter, update: Tensor, group: dict[str, Any], factor: float, skip: Tensor | None
) -> None:
    """Set w to (1 - lr weight_decay) w - lr factor update, where the step is not skipped."""
    weight, rate = local_part(parameter), group["lr"]
    replace(weight, torch.add(weight * (1 - rate * group["weight_decay"]), update, alpha=-rate * factor), skip)
