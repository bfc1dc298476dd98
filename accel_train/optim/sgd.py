"""SGD by torch's fused kernel."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_train.optim.adam import has_fused_kernels
from accel_train.recipe.optimizer import Groups, Optimizer


def build_sgd(groups: Groups, section: Optimizer, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Return SGD over the groups with the section's momentum."""
    # torch has no fused SGD for parts of weights, so each step of a sharded model waits for its verdict.
    fused = has_fused_kernels(device) and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.SGD(groups, lr=section.learning_rate, momentum=section.momentum, fused=fused)
    if section.momentum:
        # The fused kernel leaves a momentum buffer uninitialized if the very first step is skipped.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
