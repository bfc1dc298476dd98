"""Optimizers of other packages: load the class, pass it the recipe's options, and try it before a model is built.

A recipe names them by a short name or by module:Class. They cannot read the flag that skips a step.
`update.update_within` therefore reads the gradient norm on the host before each step.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.core.errors import check_packages
from accel_train.guard.guard import Limits
from accel_train.model.weights import embeddings
from accel_train.optim.update import update_within
from accel_train.recipe.optimizer import CUSTOM, Groups, optimizer_kind
from accel_train.recipe.optimizer import Optimizer as OptimizerSection
from accel_train.task import load_class

BY_HOST = (
    "it cannot skip a bad step by itself: the host reads the gradient norm before each update, one wait for the "
    "device a step"
)
TRIAL_SHAPES = ((64, 64), (64,))
"""Shapes of the weights to try an optimizer on. 8-bit optimizers keep states of fewer than 4,096 elements in fp32."""


def build_custom(groups: Groups, section: OptimizerSection, *_: Any) -> torch.optim.Optimizer:
    """Return an optimizer of the class that the recipe names, built by Class(groups, lr=..., **options).

    Raises:
        ValueError: the class does not exist, is not an optimizer, refuses its options, or lacks a learning rate or
            weight decay.
    """
    setting = f"optimizer.name={section.name}"
    kind = optimizer_kind(section.name)
    if kind.package:
        check_packages((kind.package,), kind.package, setting)
    name = section.name if kind is CUSTOM else kind.of_class
    found: Any = load_class("optimizer.name", name, "torch.optim.Optimizer")
    if not issubclass(found, torch.optim.Optimizer):
        raise ValueError(f"{setting}: {found.__name__} is not derived from torch.optim.Optimizer; name a class that is")
    of_adam = {name: getattr(section, name) for name in ("betas", "eps") if name in kind.settings}
    unnamed = []
    for group in groups:
        # Optimizers that read the groups in their constructor expect tensors without names.
        names, tensors = zip(*group["params"], strict=True)
        unnamed.append({**group, "params": list(tensors), "param_names": list(names)})
    try:
        optimizer = found(unnamed, lr=section.learning_rate, **of_adam, **section.options)
    # A custom class may raise any exception.
    except Exception as error:
        raise ValueError(
            f"{setting}: {found.__name__}(groups, lr={section.learning_rate:g}, **optimizer.options) raised "
            f"{_in_one_line(error)}; correct optimizer.options, which are {dict(section.options)}"
        ) from error
    decays = any(group["weight_decay"] for group in groups)
    for key, is_used, remedy in (
        ("lr", True, "the schedule could not set it; use another class"),
        ("weight_decay", decays, "set optimizer.weight_decay to 0"),
    ):
        if is_used and key not in optimizer.defaults:
            raise ValueError(f"{setting}: {found.__name__} knows no {key}; {remedy}")
    return optimizer


def build_adamw_8bit(
    groups: Groups, section: OptimizerSection, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW over the groups; the moments of embeddings stay in fp32."""
    optimizer = build_custom(groups, section)
    # As transformers does. bitsandbytes has a list of such weights, but all optimizers of the process share it.
    for weight in embeddings(model):
        moments = {name: torch.zeros_like(weight, dtype=torch.float32) for name in ("state1", "state2")}
        optimizer.state[weight] = {"step": 0, **moments}
    return optimizer


def try_custom(section: OptimizerSection, device: torch.device, *, is_sharded: bool) -> None:
    """Run one step on two small weights and one step with NaN, if the recipe names a custom optimizer.

    Raises:
        ValueError: the optimizer cannot be built or stepped, a checkpoint cannot hold its state, or the NaN step
            changes it.
    """
    if not optimizer_kind(section.name).of_class:
        return
    weights = _trial_weights(device)
    groups = [
        {"params": [(str(number), weight)], "weight_decay": section.weight_decay, "lr_scale": 1.0}
        for number, weight in enumerate(weights)
    ]
    optimizer = build_custom(groups, section)
    setting = f"optimizer.name={section.name}"
    try:
        # Accelerate also loads the state dict when it prepares an optimizer.
        optimizer.load_state_dict(optimizer.state_dict())
        before = _settings_of(optimizer)
        _step(optimizer, weights, 0.5)
        problem = _unsaved(optimizer, before, is_sharded=is_sharded)
        held = _bytes_of(optimizer, weights)
        _step(optimizer, weights, math.nan)
    # A custom class may raise any exception.
    except Exception as error:
        raise ValueError(
            f"{setting} cannot step alone: {_in_one_line(error)}; an optimizer is stepped by step(), with "
            "dense gradients"
        ) from error
    if not problem and _bytes_of(optimizer, weights) != held:
        problem = "says that it is fused, and a step with NaN changes its weights or state; leave out the option fused"
    if problem:
        raise ValueError(f"{setting} {problem}")


def _trial_weights(device: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, device=device)) for shape in TRIAL_SHAPES]


def try_given(optimizer: torch.optim.Optimizer) -> None:
    """Run one step of a copy of the given optimizer on two small weights. The given optimizer does not change.

    Classes that need more than groups or gradients pass this check. Their state is checked once it exists.

    Raises:
        ValueError: a checkpoint cannot hold its state.
    """
    group = optimizer.param_groups[0]
    weights = _trial_weights(group["params"][0].device)
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    try:
        named = inspect.signature(type(optimizer)).parameters
        taken = {key: value for key, value in options.items() if key in named}
        other = type(optimizer)([{"params": weights, **options}], **taken)
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5)
        other.step()
    # A custom class may raise any exception.
    except Exception:
        return
    if problem := _unsaved_state(other, is_sharded=False):
        raise ValueError(f"optimizers: {type(optimizer).__name__} {problem}")


def _step(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], gradient: float) -> None:
    for weight in weights:
        weight.grad = torch.full_like(weight, gradient)
    update_within(Limits(1.0), optimizer, weights, None)


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    return [{key: repr(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _bytes_of(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]) -> list[bytes | str]:
    values = [value for weight in weights for value in (weight, *optimizer.state[weight].values())]
    return [
        each.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        if isinstance(each, Tensor)
        else repr(each)
        for each in values
    ]


def _unsaved(optimizer: torch.optim.Optimizer, before: list[dict[str, str]], *, is_sharded: bool) -> str:
    """Return why a checkpoint cannot hold an optimizer's state; empty if it can."""
    for was, now in zip(before, _settings_of(optimizer), strict=True):
        if changed := [key for key in now if was.get(key) != now[key]]:
            return f"keeps {changed[0]} in its parameter groups, which checkpoints cannot hold; use another optimizer"
    return _unsaved_state(optimizer, is_sharded=is_sharded)


def _unsaved_state(optimizer: torch.optim.Optimizer, *, is_sharded: bool) -> str:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is None or isinstance(value, bool | int | float):
                continue
            if type(value) is not Tensor:
                kind = type(value).__name__
                return (
                    f"keeps {key} as a {kind}, but a checkpoint holds tensors and numbers only; use another optimizer"
                )
            if is_sharded and value.dim() and value.shape != parameter.shape:
                shapes = f"{key} of shape {tuple(value.shape)} for a weight of shape {tuple(parameter.shape)}"
                return f"keeps {shapes}, which cannot be sharded like the weight; use parallel.strategy ddp"
    return ""


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
