"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675)."""

import torch
from torch import Tensor, nn

from accel_train.optim.update import SkippableOptimizer, decay_and_add, replace
from accel_train.recipe.optimizer import Groups, Optimizer


class Lion(SkippableOptimizer):
    """Lion: each weight moves up or down by the learning rate.

        U = sign(beta1 M + (1 - beta1) G)
        W = (1 - lr weight_decay) W - lr U
        M = beta2 M + (1 - beta2) G

    The authors use a learning rate 3 to 10 times lower than AdamW's, a weight decay higher by the same factor, and
    betas 0.9, 0.99.
    """

    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def update(self, skip: Tensor | None) -> None:
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter, gradient in self.gradients(group):
                kept = self.state_of(parameter, "exp_avg")
                decay_and_add(parameter, torch.lerp(gradient, kept, beta1).sign_(), group, 1.0, skip)
                replace(kept, torch.lerp(gradient, kept, beta2), skip)


def build_lion(groups: Groups, section: Optimizer, model: nn.Module, device: torch.device) -> Lion:
    """Return Lion over the groups."""
    return Lion(groups, lr=section.learning_rate, betas=section.betas)
