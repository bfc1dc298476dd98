"""AdamW and Adam by torch's fused kernel, with less Python per step."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from accel_train.model.tensors import local_part
from accel_train.recipe.optimizer import Group, Groups
from accel_train.recipe.optimizer import Optimizer as OptimizerSection

PIECE = 8 * 2**20
"""Elements of bf16 moments that are converted at once: 64 MiB of fp32 moments on the device."""


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
            self._run_kernel(group, [local_part(gradient) for gradient in some], kept)
        return None

    def _run_kernel(self, group: Group, gradients: list[Tensor], held: GroupState) -> None:
        """Run torch's fused kernel on some tensors of a group."""
        adam(
            held.parameters,
            gradients,
            held.exp_avgs,
            held.exp_avg_sqs,
            [],
            held.steps,
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


class Bf16Adam(FusedAdam):
    """Adam or AdamW whose moments are stored in bf16: 4 bytes per weight instead of 8.

    torch's fused kernel computes each update on moments in the type of the weights, one piece of `PIECE` elements at a
    time. The new moments are then rounded to bf16. A skipped step changes no bit, because bf16 survives the conversion.
    Rounding loses changes of a moment below 0.2 to 0.4 %.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights that have a gradient, or none if the step is skipped."""
        assert closure is None, "gradients are there before the step"
        for group in self.param_groups:
            for batch in self._batches(group["params"]):
                parameters, gradients, *moments, steps = (list(each) for each in zip(*batch, strict=True))
                means, squares = ([each.to(parameters[0].dtype) for each in kind] for kind in moments)
                self._run_kernel(group, gradients, GroupState(parameters, means, squares, steps))
                for stored, new in zip(moments, (means, squares), strict=True):
                    torch._foreach_copy_(stored, new)

    def load_state_dict(self, state_dict: Group) -> None:
        """Load a state dict. torch converts moments to the type of the weights; this method converts them back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16()

    def _batches(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[tuple[Tensor, ...]]]:
        """Yield lists of (weight, gradient, two moments, step count), with at most `PIECE` elements where possible."""
        pieces = list[tuple[Tensor, ...]]()
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            tensors = [local_part(each) for each in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
            cuts = [tensors]
            if tensors[0].numel() > PIECE and all(each.is_contiguous() for each in tensors):
                cuts = [list(cut) for cut in zip(*(each.view(-1).split(PIECE) for each in tensors), strict=True)]
            # The kernel counts the step once per piece.
            steps = [state["step"], *(state["step"].clone() for _ in cuts[1:])]
            pieces += [(*cut, step) for cut, step in zip(cuts, steps, strict=True)]
        while pieces:
            ends = [*accumulate(piece[0].numel() for piece in pieces)]
            count = max(1, bisect_right(ends, PIECE))
            yield pieces[:count]
            pieces = pieces[count:]


def has_fused_kernels(device: torch.device) -> bool:
    """Return whether torch has fused optimizer kernels for the device."""
    return device.type in ("cpu", "cuda", "mps", "xpu")


def build_adam(
    groups: Groups, section: OptimizerSection, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """Return AdamW over the groups, or Adam, which adds weight decay to the gradient."""
    kind: Any = FusedAdam if has_fused_kernels(device) else partial(torch.optim.Adam, fused=False)
    if section.state_dtype == "bf16":
        if kind is not FusedAdam:
            raise ValueError(f"optimizer.state_dtype=bf16: torch has no fused Adam for {device.type}. Use fp32")
        kind = Bf16Adam
    return kind(
        groups,
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        decoupled_weight_decay=section.name == "adamw",
    )
