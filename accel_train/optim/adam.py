"""AdamW and Adam by torch's fused kernel, with less Python a step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from accel_train.recipe.optimizer import Optimizer as OptimizerSection


class GroupState(NamedTuple):
    """The state of a group's parameters, in their order."""

    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]


class FusedAdam(torch.optim.Adam):
    """torch's fused Adam (Kingma & Ba 2015); with `decoupled_weight_decay` its AdamW (Loshchilov & Hutter 2019).

    It calls the same kernel on the same tensors. torch collects them in each step, with some ten lookups a weight; here the lists of
    weights and state are made once, and a step collects the gradients alone.

    Args:
        groups: parameters or groups of them, as torch takes them.
        arguments: those of `torch.optim.Adam`.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    _kept: Sequence[GroupState] = ()

    def __init__(self, groups: Sequence[Any], **arguments: Any) -> None:
        super().__init__(groups, fused=True, **arguments)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights, as `torch.optim.Adam.step` does; returns the closure's loss."""
        gradients = [[parameter.grad for parameter in group["params"]] for group in self.param_groups]
        if closure is not None or not self._is_current() or any(each is None for some in gradients for each in some):
            loss = super().step(closure)  # makes the state, and leaves out weights without a gradient
            self._keep()
            return loss
        for group, some, kept in zip(self.param_groups, gradients, self._kept, strict=True):
            adam(
                group["params"],
                some,
                kept.exp_avgs,
                kept.exp_avg_sqs,
                [],
                kept.steps,
                fused=True,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
                decoupled_weight_decay=group["decoupled_weight_decay"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        return None

    def _is_current(self) -> bool:
        """Return whether the lists are those of the state: a restored checkpoint replaces it, and ZeRO the parameters, too."""
        if len(self._kept) != len(self.param_groups):
            return False
        for group, kept in zip(self.param_groups, self._kept, strict=True):
            if len(group["params"]) != len(kept.steps):
                return False
            first = self.state.get(group["params"][0])
            if not first or first.get("exp_avg") is not kept.exp_avgs[0]:
                return False
        return True

    def _keep(self) -> None:
        """Make the lists, where each group has parameters (ZeRO's stage 3 leaves some empty), and each parameter its state."""
        states = [[self.state.get(parameter) for parameter in group["params"]] for group in self.param_groups]
        self._kept = ()
        if all(some and all(some) for some in states):
            self._kept = [
                GroupState(*([state[name] for state in some] for name in ("exp_avg", "exp_avg_sq", "step")))  # type: ignore[index]
                for some in states
            ]


def has_fused_kernels(device: torch.device) -> bool:
    """Return whether torch has fused optimizer kernels for the device."""
    return device.type in ("cpu", "cuda", "mps", "xpu")


def build_adamw(
    groups: list[dict[str, Any]], section: OptimizerSection, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """Return AdamW over the groups."""
    return _build(groups, section, device, decoupled=True)


def build_adam(
    groups: list[dict[str, Any]], section: OptimizerSection, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """Return Adam over the groups; weight decay is added to the gradient."""
    return _build(groups, section, device, decoupled=False)


def _build(
    groups: list[dict[str, Any]], section: OptimizerSection, device: torch.device, *, decoupled: bool
) -> torch.optim.Optimizer:
    kind = FusedAdam if has_fused_kernels(device) else partial(torch.optim.Adam, fused=False)
    return kind(
        groups, lr=section.learning_rate, betas=section.betas, eps=section.eps, decoupled_weight_decay=decoupled
    )
