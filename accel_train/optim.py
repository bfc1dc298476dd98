"""Parameter groups and optimizers, fused where torch has a fused kernel, and ready to skip a step on the device."""

import torch
from torch import nn

from accel_train.recipe import Optimizer as OptimizerSection


def parameter_groups(model: nn.Module, section: OptimizerSection) -> list[dict[str, object]]:
    """Trainable parameters in two groups: with weight decay, and those that `no_decay` names; each keeps its name.

    A parameter is a `norm` when it belongs to a module whose class name contains "norm", an `embedding` when to an
    `nn.Embedding` (tied output weights included), a `bias` when it is called so.
    """
    no_decay: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kinds = {
                "norm": "norm" in type(module).__name__.lower(),
                "embedding": isinstance(module, nn.Embedding),
                "bias": name.endswith("bias"),
            }
            if any(kinds[kind] for kind in section.no_decay):
                no_decay.add(id(parameter))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [(n, p) for n, p in named if id(p) not in no_decay], "weight_decay": section.weight_decay},
        {"params": [(n, p) for n, p in named if id(p) in no_decay], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, section: OptimizerSection, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the recipe over the model's trainable parameters; the learning rate is set step by step.

    Raises:
        ValueError: nothing to train.
    """
    groups = parameter_groups(model, section)
    if not groups:
        raise ValueError("every parameter of the model is frozen, so there is nothing to train; unfreeze some")
    fused = device.type in ("cpu", "cuda", "mps", "xpu")
    if section.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=section.learning_rate, momentum=section.momentum, fused=fused)
        if section.momentum:
            # The fused kernel leaves a momentum buffer uninitialised when the very first step is the skipped one.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    adam = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    return adam(groups, lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> float:
    """Set one learning rate on all groups, and return it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    return learning_rate
