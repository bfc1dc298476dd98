"""Adafactor: second moments as a row and a column of each matrix (Shazeer & Stern 2018)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.optim.update import SkippableOptimizer, replace
from accel_train.recipe.optimizer import Group


class Adafactor(SkippableOptimizer, torch.optim.Adafactor):
    """torch's Adafactor without two waits for the device per weight. It skips a step as torch's fused kernels do."""

    def __init__(self, groups: Any, **options: Any) -> None:
        torch.optim.Adafactor.__init__(self, groups, **options)
        self.defaults["fused"] = True

    def update(self, skip: Tensor | None) -> None:
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for weight, gradient in self.gradients(group):
                self._update(weight, -gradient if group["maximize"] else gradient, group, skip)

    def _update(self, weight: nn.Parameter, gradient: Tensor, group: Group, skip: Tensor | None) -> None:
        state, rate, (eps, least) = self.state[weight], group["lr"], group["eps"]
        eps = torch.finfo(weight.dtype).eps if eps is None else eps
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            if weight.dim() > 1:
                state["row_var"] = torch.zeros_like(gradient[..., :1])
                state["col_var"] = torch.zeros_like(gradient[..., :1, :])
            else:
                state["variance"] = torch.zeros_like(gradient)
        new = {"step": state["step"] + 1}
        share = new["step"].pow(group["beta2_decay"]).to(gradient.dtype)
        size = (weight.norm() / math.sqrt(weight.numel())).clamp(min=least) * new["step"].rsqrt().clamp(max=rate)
        if weight.dim() > 1:
            for name, dim in (("row_var", -1), ("col_var", -2)):
                mean = gradient.norm(dim=dim, keepdim=True).square() / gradient.shape[dim]
                new[name] = torch.lerp(state[name], mean, share)
            variance = new["row_var"] @ new["col_var"]
            variance = variance / new["row_var"].mean(dim=-2, keepdim=True).clamp(min=eps)
        else:
            variance = new["variance"] = torch.lerp(state["variance"], gradient.square(), share)
        update = variance.clamp(min=eps * eps).rsqrt() * gradient
        size = size / (update.norm() / (math.sqrt(update.numel()) * group["d"])).clamp(min=1.0)
        replace(weight, weight * (1 - rate * group["weight_decay"]) - size.to(update.dtype) * update, skip)
        for name, value in new.items():
            replace(state[name], value, skip)
