"""Parameter groups and optimizers, fused if torch has a fused kernel, that can skip a step on the device."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_train.core.state import Choice
from accel_train.model.compile import repeated_blocks
from accel_train.model.freeze import matching
from accel_train.model.weights import embeddings, hidden_matrices
from accel_train.optim.adam import FusedAdam
from accel_train.optim.custom import BY_HOST, build_custom, is_custom
from accel_train.optim.lion import Lion
from accel_train.optim.muon import Muon
from accel_train.recipe.optimizer import Optimizer as OptimizerSection
from accel_train.recipe.optimizer import ParameterGroup

KEPT = {
    "adamw_8bit": "moments in 8 bits, but for embeddings and tensors of fewer than 4,096 numbers",
    "schedule_free_adamw": "an average of the weights is evaluated, and what model/ will hold",
}


def parameter_groups(model: nn.Module, section: OptimizerSection) -> list[dict[str, Any]]:
    """Return the trainable parameters with their names, grouped by weight decay and learning rate factor (`lr_scale`).

    A parameter is a `norm` if its module's class name contains "norm". It is an `embedding` if it belongs to an
    `nn.Embedding` (tied output weights included), and a `bias` if its name ends in "bias". With `layer_decay`, the
    learning rate falls with the distance from the output (`layer_scales`). A matching group of the recipe multiplies
    that rate.

    Raises:
        ValueError: a group of the recipe matches no parameter.
    """
    no_decay: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_norm, is_embedding = "norm" in type(module).__name__.lower(), isinstance(module, nn.Embedding)
            kinds = {"norm": is_norm, "embedding": is_embedding, "bias": name.endswith("bias")}
            if any(kinds[kind] for kind in section.no_decay):
                no_decay.add(id(parameter))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    scales = layer_scales(model, section.layer_decay)
    own: dict[str, ParameterGroup] = {}
    for number, each in reversed(list(enumerate(section.groups))):
        names = matching([name for name, _ in named], each.match, f"optimizer.groups[{number}].match")
        own |= dict.fromkeys(names, each)
    grouped: dict[tuple[float, float], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        decay = 0.0 if id(parameter) in no_decay else section.weight_decay
        scale = scales.get(name, 1.0)
        if (group := own.get(name)) is not None:
            scale *= group.lr_scale
            decay = decay if group.weight_decay is None else group.weight_decay
        grouped.setdefault((scale, decay), []).append((name, parameter))
    # Groups with decay come first. Checkpoints depend on this order.
    order = sorted(grouped, key=lambda key: (-key[0], -key[1]))
    return [{"params": grouped[key], "weight_decay": key[1], "lr_scale": key[0]} for key in order]


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return learning rate factors by parameter name: decay^(distance from the output), as in BEiT (Bao et al. 2022).

    The n repeated blocks have the distances n to 1. Weights before the first block have n + 1. All other weights (norms
    and heads after the blocks) have factor 1 and are left out. The result is empty for a decay of 1.

    Raises:
        ValueError: the model repeats no block, so its layers cannot be distinguished.
    """
    if decay == 1.0:
        return {}
    blocks = repeated_blocks(model)
    if not blocks:
        raise ValueError(
            f"optimizer.layer_decay={decay}: the model repeats no block; use optimizer.groups with patterns"
        )
    depth = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    scales: dict[str, float] = {}
    before_the_blocks = True
    for name, parameter in model.named_parameters():
        if id(parameter) in depth:
            before_the_blocks = False
            scales[name] = decay ** (len(blocks) - depth[id(parameter)])
        elif before_the_blocks:
            scales[name] = decay ** (len(blocks) + 1)
    return scales


def matrix_groups(groups: Sequence[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups, each split into the matrices of the repeated blocks (`is_matrix`) and the rest.

    Raises:
        ValueError: the model has no such matrix.
    """
    matrices = {id(parameter) for parameter in hidden_matrices(model)}
    found = []
    for group in groups:
        for is_matrix in (True, False):
            some = [each for each in group["params"] if (id(each[1]) in matrices) == is_matrix]
            if some:
                found.append({**group, "params": some, "is_matrix": is_matrix})
    return found


def build_optimizer(model: nn.Module, section: OptimizerSection, device: torch.device) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over the model's trainable parameters. The learning rate is set at each step.

    Raises:
        ValueError: nothing to train, a group that matches nothing, or no matrices for Muon.
    """
    groups = parameter_groups(model, section)
    if not groups:
        raise ValueError("every parameter of the model is frozen, so there is nothing to train; unfreeze some")
    fused = device.type in ("cpu", "cuda", "mps", "xpu")
    if section.name == "muon":
        adamw = {"betas": section.betas, "eps": section.eps}
        return Muon(matrix_groups(groups, model), lr=section.learning_rate, momentum=section.momentum, **adamw)
    if is_custom(section.name):
        optimizer = build_custom(groups, section)
        if section.name == "adamw_8bit":
            keep_whole(optimizer, embeddings(model))
        return optimizer
    if section.name == "lion":
        return Lion(groups, lr=section.learning_rate, betas=section.betas)
    if section.name == "sgd":
        # torch has no fused SGD for sharded weights. Each step then waits for the decision to skip.
        fused = fused and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        optimizer = torch.optim.SGD(groups, lr=section.learning_rate, momentum=section.momentum, fused=fused)
        if section.momentum:
            # The fused kernel leaves a momentum buffer uninitialized if the very first step is skipped.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    adam = FusedAdam if fused else partial(torch.optim.Adam, fused=False)
    decoupled = section.name == "adamw"
    return adam(
        groups, lr=section.learning_rate, betas=section.betas, eps=section.eps, decoupled_weight_decay=decoupled
    )


def keep_whole(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]) -> None:
    """Make bitsandbytes keep the moments of these weights in fp32, as transformers does for embeddings.

    It creates the state before the first step. bitsandbytes has a list for this, but all optimizers of the process
    share it.
    """
    for weight in weights:
        optimizer.state[weight] = {
            "step": 0,
            "state1": torch.zeros_like(weight, dtype=torch.float32),
            "state2": torch.zeros_like(weight, dtype=torch.float32),
        }


def describe_optimizer(optimizer: torch.optim.Optimizer, name: str) -> Choice[str] | None:
    """Return a description of a composite or custom optimizer and its cost; None if the name says enough."""
    if isinstance(optimizer, Muon):
        matrices, rest = (
            [each for group in optimizer.param_groups if group["is_matrix"] == is_matrix for each in group["params"]]
            for is_matrix in (True, False)
        )
        where = f"muon for {len(matrices)} matrices of the blocks, adamw for the other {len(rest)} tensors"
        who = "every process makes all matrices orthogonal"
        if optimizer.group is not None:
            who = f"each of {optimizer.group.size()} processes makes its share of the matrices orthogonal"
        return Choice("muon", f"{where}; {who}, in fp32 (TF32 where precision.tf32 is on)")
    if is_custom(name):
        return Choice(name, f"{KEPT[name]}; {BY_HOST}" if name in KEPT else BY_HOST)
    return None


def name_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Set the parameter names in an optimizer's groups; return the optimizer. Checkpoints store its state by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group.setdefault("param_names", [names[id(parameter)] for parameter in group["params"]])
        group.setdefault("lr_scale", 1.0)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Sequence[float]) -> float:
    """Set one learning rate on all groups, times each group's factor, or one per group; return the (first) rate."""
    if isinstance(rate, float | int):
        for group in optimizer.param_groups:
            set_rate(group, rate * group["lr_scale"])
        return rate
    for group, own in zip(optimizer.param_groups, rate, strict=True):
        set_rate(group, own)
    return rate[0]


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of one group. A tensor stays a tensor, because some optimizers (torchao's) require one."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
