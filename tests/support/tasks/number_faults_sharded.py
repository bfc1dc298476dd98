"""The tasks of `number_fault_task` for processes that hold parts of a model: what breaks is named by the recipe's `options.faults`.

`fails` makes one process raise an error in the second block: {rank, where: forward or backward}, and when: `rows_below`, with
fewer rows than that; `after_calls`, after so many forwards, and up to `until_calls` of them.
"""

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.recipe import Recipe
from accel_train.task import TaskData
from number_fault_task import Fault, Faults, FaultyLanguageModel, FaultyRegression


class FailsOnTheWayBack(torch.autograd.Function):
    """Raises an error when gradients pass through it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("made to fail\non the way back")


class ShardedFaults(Faults):
    """Puts a fault of a gradient where it can be seen: into the whole weight, which FSDP2 gathers for each forward."""

    def put_into(self, model: nn.Module, faults: Sequence[Fault]) -> None:
        for fault in faults:
            fault.value = float(fault.value)  # no recipe holds NaN
        super().put_into(model, [fault for fault in faults if fault.place != "gradient"])
        self.faults = list(faults)
        self.gathered: dict[int, nn.Parameter] = {}
        for fault in faults:
            if fault.place == "gradient":
                path, _, leaf = fault.name.rpartition(".")
                model.get_submodule(path).register_forward_pre_hook(partial(self._find_weight, fault, leaf))

    def _find_weight(self, fault: Fault, leaf: str, module: nn.Module, args: Any) -> None:
        weight = getattr(module, leaf)
        if id(weight) not in self.gathered:
            self.gathered[id(weight)] = weight
            weight.register_hook(partial(self._break_gradient, fault))


class Fails:
    """A forward hook that makes one process fail."""

    def __init__(
        self, rank: int, where: str, rows_below: int = 0, after_calls: float = math.inf, until_calls: float = math.inf
    ) -> None:
        self.is_here = rank == int(os.environ.get("RANK", "0"))
        self.where, self.rows_below, self.after_calls, self.until_calls = where, rows_below, after_calls, until_calls
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        self.calls += 1
        is_time = self.after_calls < self.calls <= self.until_calls
        if not self.is_here or not (is_time or len(output) < self.rows_below):
            return None
        if self.where == "backward":
            return FailsOnTheWayBack.apply(output)  # type: ignore[no-any-return]
        raise RuntimeError("made to fail\nhere")


class ShardedRegression(FaultyRegression):
    """The regression, with `options.faults` and `options.fails`."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = ShardedFaults()

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        model = super().build_model(recipe, data)
        if "fails" in recipe.options:
            model.get_submodule("blocks.1").register_forward_hook(Fails(**recipe.options["fails"]))
        return model


class ShardedLanguageModel(FaultyLanguageModel):
    """Language modelling, with `options.faults`."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = ShardedFaults()

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        model = super().build_model(recipe, data)
        self.put_in([Fault(**fault) for fault in recipe.options["faults"]], model, data)
        return model
