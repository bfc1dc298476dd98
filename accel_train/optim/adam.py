"""AdamW and Adam by torch's fused kernel, with less Python per step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from accel_train.model.tensors import local_part
from accel_train.recipe.optimizer import Optimizer as OptimizerSection


class GroupState(NamedTuple):
    """This process's parts of one group's weights and state tensors, in the order of its parameters."""

    parameters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]


class FusedAdam(torch.optim.Adam):
    """torch's fused Adam (Kingma & Ba 2015); with `decoupled_weight_decay`, AdamW (Loshchilov & Hutter 2019).

    It calls the same kernel on the same tensors as torch. torch collects the tensors in each step, with about ten
    lookups per weight. This class builds the lists of weights and state once. Each step then collects only the
    gradients. The kernel gets this process's parts of sharded tensors, because DTensors cost 10 us of the host each.

    Args:
        groups: parameters or groups of parameters, as torch takes them.
        arguments: arguments of `torch.optim.Adam`.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    _kept: Sequence[GroupState] = ()

    def __init__(self, groups: Sequence[Any], **arguments: Any) -> None:
        super().__init__(groups, fused=True, **arguments)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights as `torch.optim.Adam.step` does; return the closure's loss."""
        gradients = [[parameter.grad for parameter in group["params"]] for group in self.param_groups]
        if closure is not None or not self._is_current() or any(each is None for some in gradients for each in some):
            # The first step creates the state. torch's step also leaves out weights without a gradient.
            loss = super().step(closure)
            self._keep()
            return loss
        for group, some, kept in zip(self.param_groups, gradients, self._kept, strict=True):
            adam(
                kept.parameters,
                [local_part(gradient) for gradient in some],
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
        """Return whether the lists match the optimizer's state.

        Loading a checkpoint replaces the state, and ZeRO also replaces the parameters.
        """
        if len(self._kept) != len(self.param_groups):
            return False
        for group, kept in zip(self.param_groups, self._kept, strict=True):
            if len(group["params"]) != len(kept.steps):
                return False
            parameter = group["params"][0]
            state = self.state.get(parameter)
            if not state or local_part(state.get("exp_avg")) is not kept.exp_avgs[0]:
                return False
            if local_part(parameter).data_ptr() != kept.parameters[0].data_ptr():
                return False
        return True

    def _keep(self) -> None:
        """Build the lists if every group has parameters and every parameter has state.

        ZeRO stage 3 leaves some groups empty.
        """
        states = [[self.state.get(parameter) for parameter in group["params"]] for group in self.param_groups]
        self._kept = ()
        if all(some and all(some) for some in states):
            names = ("exp_avg", "exp_avg_sq", "step")
            self._kept = [
                GroupState(
                    [local_part(parameter) for parameter in group["params"]],
                    *([local_part(self.state[each][name]) for each in group["params"]] for name in names),
                )
                for group in self.param_groups
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
