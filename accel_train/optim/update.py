"""One update of the weights: clip the gradients and step the optimizer, or leave every bit unchanged."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.guard.guard import Limits
from accel_train.model.tensors import holders, local_part
from accel_train.runtime.private import norms_of


class FlooredGradScaler(torch.amp.GradScaler):
    """A loss scale with a lower bound.

    torch's loss scale falls to 0 after 166 overflows, and the next good step writes NaN.
    """

    def __init__(self, device: str, *, init_scale: float, growth_interval: int, floor: float) -> None:
        super().__init__(device, init_scale=max(init_scale, floor), growth_interval=growth_interval)
        self.floor = floor

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self.scale_tensor.clamp_(min=self.floor)

    def update_if(self, learned: Tensor) -> None:
        """Update the scale; keep scale and growth count if `learned` (0-dim bool, on the device) is False."""
        assert self._growth_tracker is not None, "the count exists from the first scaled loss on"
        kept = [(now, now.clone()) for now in (self.scale_tensor, self._growth_tracker)]
        self.update()
        for now, before in kept:
            now.copy_(torch.where(learned.to(now.device), now, before))

    @property
    def scale_tensor(self) -> torch.Tensor:
        """The scale, 0-dim fp32 on the device. Reading this property does not wait for the device."""
        assert self._scale is not None, "the scale exists from the first scaled loss on"
        return self._scale


class Update(NamedTuple):
    """The outcome of one update, 0-dim on the device. Reading it on the host would wait for the device."""

    grad_norm: Tensor
    """Gradient norm before clipping."""
    skipped: Tensor
    """1.0 if the update was skipped."""
    loss_scale: Tensor | None
    """Loss scale with which the gradients were computed."""


def update_within(
    limits: Limits,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    scaler: FlooredGradScaler | None,
    share: Tensor | None = None,
    fault: Tensor | None = None,
) -> Update:
    """Clip the gradients and step the optimizer; skip if the gradient norm is not finite or above the limit.

    A skipped step leaves weights, moments, and step counters bit-identical. A NaN in `fault` also skips the step. A NaN
    in `share` (a batch without targets) skips the step and keeps the loss scale.

    torch's fused kernels take `found_inf` (1.0: do nothing) and `grad_scale` (gradients are divided by it). The
    division clips without another pass over the gradients. `torch.amp.GradScaler` uses the same two attributes.
    """
    scale = None
    if scaler is not None:
        scale = scaler.scale_tensor.clone()
        scaler.unscale_(optimizer)
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    grad_norm = norm_of_all(grads)
    if share is not None:
        grad_norm = nan_without_targets(grad_norm, share)
    if fault is not None:
        grad_norm = grad_norm + fault
    decide = _on_host if grad_norm.device.type == "cpu" else _on_device
    skipped, found_inf, grad_scale = decide(grad_norm, limits)
    if optimizer.defaults.get("fused", False):
        optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
        optimizer.step()
    # One host sync per step: this device has no fused kernel that could decide on the device.
    elif not skipped.item():
        if limits.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, limits.clip, grad_norm, foreach=True)
        optimizer.step()
    if scaler is not None:
        scaler.update() if share is None else scaler.update_if(share.isfinite())
    # Equals `zero_grad` without its lookups: saves 20 us per step on a small model.
    for parameter in parameters:
        parameter.grad = None
    return Update(grad_norm, skipped, scale)


@torch.no_grad()
def norm_of_all(gradients: Sequence[Tensor]) -> Tensor:
    """* Return the norm of all gradients, 0-dim. Parts of sharded gradients are added in one small collective.

    The norms are computed from this process's parts. As DTensors, they would take 10 us of the host per gradient.
    """
    norms, first = norms_of([local_part(each) for each in gradients]), gradients[0]
    if not isinstance(first, DTensor):
        return torch.linalg.vector_norm(torch.stack(norms))
    group, sizes = holders(first), first.device_mesh.shape
    num_processes = group.size()
    for index, each in enumerate(gradients):
        assert isinstance(each, DTensor), "all weights of a sharded model are DTensors"
        layout = zip(sizes, each.placements, strict=True)
        num_copies = num_processes // math.prod(size for size, placement in layout if not placement.is_replicate())
        if num_copies > 1:
            norms[index] = norms[index] / math.sqrt(num_copies)
    squares = torch.stack(norms).square()
    dist.all_reduce(squares, group=group)
    return torch.linalg.vector_norm(squares.sqrt())


def nan_without_targets(grad_norm: Tensor, share: Tensor) -> Tensor:
    """Return the norm, or NaN if `share` (weight of a target, 0-dim) is NaN. The host does not wait.

    A NaN in the loss may not reach the gradients: the backward of `cross_entropy` writes 0 for ignored labels.
    """
    if share.device.type == "cpu":
        return grad_norm if math.isfinite(number_on_host(share)) else torch.full_like(grad_norm, math.nan)
    # x - x is 0, or NaN if x is NaN.
    return grad_norm + (share - share).to(grad_norm.device)


def _on_host(grad_norm: Tensor, limits: Limits) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the skip flag (1.0: step skipped), and `found_inf` and `grad_scale` for a fused kernel, all 0-dim.

    The norm is already on the host. Sums of one-element tensors cost 10 us each, and None saves the kernel a pass.
    """
    norm = number_on_host(grad_norm)
    # Every comparison with NaN is false, and Inf is above every limit.
    is_skipped = not norm <= limits.skip
    skipped = _flag(is_skipped)
    factor = max((norm + 1e-6) / limits.clip, 1.0) if limits.clip else 1.0
    return skipped, skipped if is_skipped else None, _number(factor) if factor > 1.0 else None


def number_on_host(tensor: Tensor) -> float:
    """Return the value of a 0-dim CPU tensor. numpy does not support bf16."""
    return float((tensor if tensor.dtype == torch.float32 else tensor.double()).numpy())


@cache
def _flag(value: bool) -> Tensor:
    return _number(float(value))


def _number(value: float) -> Tensor:
    # The fused kernels require fp32, also in a 64-bit model.
    return torch.full((), value, dtype=torch.float32)


def _on_device(grad_norm: Tensor, limits: Limits) -> tuple[Tensor, Tensor, Tensor | None]:
    skipped = grad_norm.le(limits.skip).logical_not().float()
    return skipped, skipped, ((grad_norm + 1e-6) / limits.clip).clamp(min=1.0).float() if limits.clip else None


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
