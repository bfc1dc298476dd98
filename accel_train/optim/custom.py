"""Optimizers of other packages, by a name of ours or that of their class: found, given their options, and tried out before a
model is built.

They know nothing of the flag that skips a step, so `update.update_within` reads the gradient norm on the host before each step.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.guard.guard import Limits
from accel_train.optim.update import update_within
from accel_train.recipe.optimizer import Optimizer as OptimizerSection
from accel_train.task import load_class

CLASSES = {
    "adafactor": "torch.optim:Adafactor",
    "adamw_8bit": "bitsandbytes.optim:AdamW8bit",
    "schedule_free_adamw": "accel_train.optim.schedule_free:ScheduleFreeAdamW",
}
"""Classes that the recipe has a name for."""
PACKAGES = {"adamw_8bit": "bitsandbytes", "schedule_free_adamw": "schedulefree"}
"""What else they need: the package, and the extra that brings it."""
BY_HOST = "it cannot skip a bad step by itself: the host reads the gradient norm before each update, one wait for the device a step"
TRIAL_SHAPES = ((64, 64), (64,))
"""Of weights to try an optimizer on: 8-bit ones keep states of fewer than 4,096 numbers in fp32."""


def is_custom(name: str) -> bool:
    """Return whether an `optimizer.name` stands for a class that this package does not build itself."""
    return name in CLASSES or ":" in name


def build_custom(groups: Sequence[Mapping[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Return the optimizer that the recipe names by its class, made by Class(groups, lr=..., **options).

    Raises:
        ValueError: no such class, it is no optimizer, refuses its options, or has no learning rate or weight decay to set.
    """
    setting = f"optimizer.name={section.name}"
    package = PACKAGES.get(section.name)
    if package is not None and find_spec(package) is None:
        raise ValueError(f"{setting} needs the package {package}; install it: pip install 'accel-train[{package}]'")
    found: Any = load_class("optimizer.name", CLASSES.get(section.name, section.name), "torch.optim.Optimizer")
    if not issubclass(found, torch.optim.Optimizer):
        raise ValueError(f"{setting}: {found.__name__} is not derived from torch.optim.Optimizer; name a class that is")
    optimizer: torch.optim.Optimizer
    of_adam = {} if package is None else {"betas": section.betas, "eps": section.eps}
    try:
        # Without names: those who look into the groups themselves expect tensors.
        optimizer = found(_unnamed(groups), lr=section.learning_rate, **of_adam, **section.options)
    except Exception as error:  # of a class that we do not know
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


def _unnamed(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    unnamed = []
    for group in groups:
        names, tensors = zip(*group["params"], strict=True)
        unnamed.append({**group, "params": list(tensors), "param_names": list(names)})
    return unnamed


def try_custom(section: OptimizerSection, device: torch.device, *, is_sharded: bool) -> None:
    """Make a step on two small weights, and a step with NaN, where the recipe names an optimizer by its class.

    Raises:
        ValueError: it cannot be built or stepped, a checkpoint could not hold its state, or the step with NaN changes it.
    """
    if not is_custom(section.name):
        return
    weights = [nn.Parameter(torch.ones(shape, device=device)) for shape in TRIAL_SHAPES]
    groups = [
        {"params": [(str(number), weight)], "weight_decay": section.weight_decay, "lr_scale": 1.0}
        for number, weight in enumerate(weights)
    ]
    optimizer = build_custom(groups, section)
    setting = f"optimizer.name={section.name}"
    try:
        optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does where it prepares one
        before = _settings_of(optimizer)
        _step(optimizer, weights, 0.5)
        problem = _unsaved(optimizer, before, is_sharded=is_sharded)
        held = _bytes_of(optimizer, weights)
        _step(optimizer, weights, math.nan)
    except Exception as error:  # of a class that we do not know
        raise ValueError(
            f"{setting} cannot make a step alone: {_in_one_line(error)}; an optimizer is stepped by step(), with dense gradients"
        ) from error
    if not problem and _bytes_of(optimizer, weights) != held:
        problem = "says that it is fused, and a step with NaN changes its weights or state; leave out the option fused"
    if problem:
        raise ValueError(f"{setting} {problem}")


def try_given(optimizer: torch.optim.Optimizer) -> None:
    """Make a step of another optimizer like the given one on two small weights; that one stays as it is.

    Nothing is said of a class that cannot be made of groups alone, or needs more than gradients: its state is looked at when there is some.

    Raises:
        ValueError: it keeps what a checkpoint could not hold.
    """
    group = optimizer.param_groups[0]
    device = group["params"][0].device
    weights = [nn.Parameter(torch.ones(shape, device=device)) for shape in TRIAL_SHAPES]
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    try:
        named = inspect.signature(type(optimizer)).parameters
        taken = {key: value for key, value in options.items() if key in named}
        other = type(optimizer)([{"params": weights, **options}], **taken)
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5)
        other.step()
    except Exception:  # of a class that we do not know
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
    """Return why a checkpoint could not hold what an optimizer has kept; empty where it can."""
    for was, now in zip(before, _settings_of(optimizer), strict=True):
        if changed := [key for key in now if was.get(key) != now[key]]:
            return f"keeps {changed[0]} in its parameter groups, which no checkpoint holds; use another optimizer"
    return _unsaved_state(optimizer, is_sharded=is_sharded)


def _unsaved_state(optimizer: torch.optim.Optimizer, *, is_sharded: bool) -> str:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is None or isinstance(value, bool | int | float):
                continue
            if type(value) is not Tensor:
                kind = type(value).__name__
                return (
                    f"keeps {key} as a {kind}, and a checkpoint holds tensors and numbers only; use another optimizer"
                )
            if is_sharded and value.dim() and value.shape != parameter.shape:
                shapes = f"{key} of shape {tuple(value.shape)} for a weight of shape {tuple(parameter.shape)}"
                return f"keeps {shapes}, which cannot be sharded as the weight is; use parallel.strategy ddp"
    return ""


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
