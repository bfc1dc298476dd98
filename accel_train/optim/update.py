"""One update of the weights: clip the gradients and step the optimizer, or leave every bit as it is."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.guard.guard import Limits
from accel_train.runtime.private import norms_of


class FlooredGradScaler(torch.amp.GradScaler):
    """A loss scale that never falls below a floor: torch's own goes to 0 in 166 overflows, and the next good step writes NaN."""

    def __init__(self, device: str, *, init_scale: float, growth_interval: int, floor: float) -> None:
        super().__init__(device, init_scale=max(init_scale, floor), growth_interval=growth_interval)
        self.floor = floor

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self.scale_tensor.clamp_(min=self.floor)

    def update_if(self, learned: Tensor) -> None:
        """Update, or leave scale and growth count as they are where `learned` (0-dim bool, on the device) is False."""
        assert self._growth_tracker is not None, "the count exists from the first scaled loss on"
        kept = [(now, now.clone()) for now in (self.scale_tensor, self._growth_tracker)]
        self.update()
        for now, before in kept:
            now.copy_(torch.where(learned.to(now.device), now, before))

    @property
    def scale_tensor(self) -> torch.Tensor:
        """The scale, 0-dim fp32 on the device: reading it here does not wait for the device."""
        assert self._scale is not None, "the scale exists from the first scaled loss on"
        return self._scale


class Update(NamedTuple):
    """The outcome of one update, 0-dim on the device: nobody waits for it."""

    grad_norm: Tensor
    """Before clipping."""
    skipped: Tensor
    """1.0 where the update was not made."""
    loss_scale: Tensor | None
    """That the gradients were computed with."""


def update_within(
    limits: Limits,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    scaler: FlooredGradScaler | None,
    share: Tensor | None = None,
    fault: Tensor | None = None,
) -> Update:
    """Clip the gradients and step; or, where their norm is not finite or above the limit, leave weights, moments and step
    counters untouched to the bit. The same holds where `fault` is NaN, and, for the loss scale too, where `share` is NaN: the batch
    has no targets.

    The fused kernels of torch take `found_inf` (1.0: do nothing) and `grad_scale` (divide gradients by it, which is the clip
    without another pass over them); both are how `torch.amp.GradScaler` talks to an optimizer.
    """
    scale = None
    if scaler is not None:
        scale = scaler.scale_tensor.clone()
        scaler.unscale_(optimizer)
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    grad_norm = torch.linalg.vector_norm(torch.stack(norms_of(grads)))
    if isinstance(grad_norm, DTensor):  # one collective more where gradients are sharded
        grad_norm = grad_norm.full_tensor()
    if share is not None:
        grad_norm = nan_without_targets(grad_norm, share)
    if fault is not None:
        grad_norm = grad_norm + fault
    decide = _on_host if grad_norm.device.type == "cpu" else _on_device
    skipped, found_inf, grad_scale = decide(grad_norm, limits)
    if optimizer.defaults.get("fused", False):
        optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():  # one host sync a step: this device has no fused kernel that could decide by itself
        if limits.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, limits.clip, grad_norm, foreach=True)
        optimizer.step()
    if scaler is not None:
        scaler.update() if share is None else scaler.update_if(share.isfinite())
    for parameter in parameters:  # what `zero_grad` comes to, less what it looks up: 20 us a step on a small model
        parameter.grad = None
    return Update(grad_norm, skipped, scale)


def nan_without_targets(grad_norm: Tensor, share: Tensor) -> Tensor:
    """Return the norm, or NaN where `share` (weight of a target, 0-dim) is NaN. The host does not wait.

    NaN that is sent backward need not arrive: the backward of `cross_entropy` writes 0 for ignored labels.
    """
    if share.device.type == "cpu":
        return grad_norm if math.isfinite(number_on_host(share)) else torch.full_like(grad_norm, math.nan)
    return grad_norm + (share - share).to(grad_norm.device)  # x - x is 0, or NaN where x is NaN


def _on_host(grad_norm: Tensor, limits: Limits) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return 1.0 where the step is skipped, and what a fused kernel takes: `found_inf` and `grad_scale`, 0-dim.

    Here the norm is there to be seen: tensors of one number cost 10 us a sum, and None saves the kernel a pass.
    """
    norm = number_on_host(grad_norm)
    is_skipped = not norm <= limits.skip  # NaN is less than nothing, Inf than no limit
    skipped = _flag(is_skipped)
    factor = max((norm + 1e-6) / limits.clip, 1.0) if limits.clip else 1.0
    return skipped, skipped if is_skipped else None, _number(factor) if factor > 1.0 else None


def number_on_host(tensor: Tensor) -> float:
    """Return the value of a 0-dim CPU tensor; numpy has no bf16."""
    return float((tensor if tensor.dtype == torch.float32 else tensor.double()).numpy())


@cache
def _flag(value: bool) -> Tensor:
    return _number(float(value))


def _number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32)  # the fused kernels take no other, in a model of 64 bits too


def _on_device(grad_norm: Tensor, limits: Limits) -> tuple[Tensor, Tensor, Tensor | None]:
    skipped = grad_norm.le(limits.skip).logical_not().float()
    return skipped, skipped, ((grad_norm + 1e-6) / limits.clip).clamp(min=1.0).float() if limits.clip else None
