"""Base class of optimizers whose step can be skipped on the device, like torch's fused optimizers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.model.tensors import local_part


class SkippableOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that takes `found_inf` and `grad_scale` as torch's fused kernels do.

    `found_inf` (0-dim, on the device): 1.0 leaves weights and state bit-identical, and the host does not read it.
    `grad_scale` (0-dim): gradients are divided by it. None disables either. Under FSDP2, each process computes with its
    part.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {**defaults, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient, or none if the step is skipped."""
        assert closure is None, "gradients are there before the step"
        self.update(None if self.found_inf is None else self.found_inf.bool())

    @abstractmethod
    def update(self, skip: Tensor | None) -> None:
        """Update all weights that have a gradient. `replace` writes them, and keeps them if `skip` (0-dim) is true."""

    def gradients(self, group: dict[str, Any]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the weights of a group that have a gradient, with this process's part divided by `grad_scale`."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = local_part(parameter.grad)
                yield parameter, gradient if self.grad_scale is None else gradient / self.grad_scale

    def state_of(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return this process's part of a state tensor with the shape of its weight. It starts as zeros."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        return local_part(state[name])


def replace(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Write new values into `old`; if `skip` (0-dim) is true, keep every bit of `old`, even if `new` has NaN."""
    old.copy_(new if skip is None else torch.where(skip, old, new))


def decay_and_add(
    parameter: nn.Parameter, update: Tensor, group: dict[str, Any], factor: float, skip: Tensor | None
) -> None:
    """Set w to (1 - lr weight_decay) w - lr factor update, unless the step is skipped."""
    weight, rate = local_part(parameter), group["lr"]
    replace(weight, torch.add(weight * (1 - rate * group["weight_decay"]), update, alpha=-rate * factor), skip)
