"""Optimizers and schedulers that a user brings, and a torch scheduler as a function of the step."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_pt_utils import get_parameter_names

NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""transformers' patterns of parameter names, see `transformers.Trainer.get_decay_parameter_names`."""


def decayed_names(model: nn.Module) -> list[str]:
    """Parameters that transformers gives weight decay."""
    names: list[str] = get_parameter_names(model, [nn.LayerNorm], NOT_DECAYED)
    return names


def optimizer_of_class(
    model: nn.Module, cls: Any, kwargs: dict[str, Any], decayed: Iterable[str], weight_decay: float
) -> torch.optim.Optimizer:
    """`optimizer_cls_and_kwargs` over the parameters, in two groups: with and without weight decay."""
    if is_optimizer_factory(cls):
        built: torch.optim.Optimizer = cls()(model, **kwargs)
        return built
    names = set(decayed)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in trained if name in names], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trained if name not in names], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = cls([group for group in groups if group["params"]], **kwargs)
    return made


class ScheduledRates:
    """Steps a scheduler ahead of the loop, once for each step of the run; a step asked for again has the same rates.

    Raises:
        ValueError: the scheduler follows a metric, so its rates are no function of the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            raise ValueError(
                f"the scheduler is a {type(scheduler).__name__}, whose rates follow a metric: here a rate is a function of the "
                "step, so that a resume repeats it; use a scheduler of torch.optim.lr_scheduler whose step() takes nothing"
            )
        self._optimizer, self._scheduler = optimizer, scheduler
        self._rates = [self._current()]

    def __call__(self, step: int) -> list[float]:
        while len(self._rates) <= step:
            self._advance()
        return self._rates[step]

    def _advance(self) -> None:
        in_use = self._current()
        self._set(self._rates[-1])  # many schedulers go on from the rate that they find
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped yet: it is ahead of it
            self._scheduler.step()
        self._rates.append(self._current())
        self._set(in_use)

    def _current(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
