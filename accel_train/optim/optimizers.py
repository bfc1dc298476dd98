"""Parameter groups and optimizers, fused if torch has a fused kernel, that can skip a step on the device."""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import nn

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.model.compile import blocks_in_order
from accel_train.model.freeze import matching
from accel_train.optim.custom import BY_HOST
from accel_train.optim.muon import Muon
from accel_train.recipe.optimizer import Groups, ParameterGroup, optimizer_kind
from accel_train.recipe.optimizer import Optimizer as OptimizerSection

Builder = Callable[[Groups, OptimizerSection, nn.Module, torch.device], torch.optim.Optimizer]


def parameter_groups(model: nn.Module, section: OptimizerSection) -> Groups:
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

    The n repeated blocks have the distances n to 1. A decoder's blocks follow its encoder's. Other weights have the
    distance of the next block, plus 1. Weights after the last block (norms and heads) have factor 1 and are left out.
    The result is empty for a decay of 1.

    Raises:
        ValueError: the model repeats no block, so its layers cannot be distinguished.
    """
    if decay == 1.0:
        return {}
    blocks = blocks_in_order(model)
    if not blocks:
        raise ValueError(
            f"optimizer.layer_decay={decay}: the model repeats no block; use optimizer.groups with patterns"
        )
    depth = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    scales, distance = dict[str, float](), 0
    for name, parameter in reversed([*model.named_parameters()]):
        if id(parameter) in depth:
            distance = len(blocks) - depth[id(parameter)]
            scales[name] = decay**distance
        elif distance:
            scales[name] = decay ** (distance + 1)
    return scales


def build_optimizer(model: nn.Module, section: OptimizerSection, device: torch.device) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over the model's trainable parameters. The learning rate is set at each step.

    Raises:
        ValueError: nothing to train, a group that matches nothing, or no matrices for Muon.
    """
    groups = parameter_groups(model, section)
    if not groups:
        raise ValueError("all parameters of the model are frozen. Unfreeze some")
    module, _, function = optimizer_kind(section.name).build.partition(":")
    build: Builder = getattr(import_module(f"accel_train.optim.{module}"), function)
    return build(groups, section, model, device)


def describe_optimizer(optimizer: torch.optim.Optimizer, name: str) -> Choice[str] | None:
    """Return a description of a composite or custom optimizer and its cost; None if the name says enough."""
    if isinstance(optimizer, Muon):
        matrices, rest = (
            [each for group in optimizer.param_groups if group["is_matrix"] == is_matrix for each in group["params"]]
            for is_matrix in (True, False)
        )
        where = f"muon for {format_count(len(matrices), 'matrix', 'matrices')} of the blocks, "
        where += f"adamw for the other {format_count(len(rest), 'tensor')}"
        who = "every process makes all matrices orthogonal"
        if optimizer.group is not None:
            who = f"each of {optimizer.group.size()} processes makes its share of the matrices orthogonal"
        return Choice("muon", f"{where}; {who}")
    kind = optimizer_kind(name)
    if kind.of_class and not kind.skips_alone:
        return Choice(name, f"{kind.note}; {BY_HOST}" if kind.note else BY_HOST)
    return None


def name_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Set the parameter names in an optimizer's groups; return the optimizer. Checkpoints store its state by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group.setdefault("param_names", [names[id(parameter)] for parameter in group["params"]])
        group.setdefault("lr_scale", 1.0)
    return optimizer
