"""The tasks of `number_fault_task` for processes that hold parts of a model: what breaks is named by the recipe's
`options.faults`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from tests.support.tasks.number_faults import Fault, Faults, FaultyLanguageModel, FaultyRegression


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


class ShardedRegression(FaultyRegression):
    """The regression, with `options.faults`."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = ShardedFaults()


class ShardedLanguageModel(FaultyLanguageModel):
    """Language modelling, with `options.faults`."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = ShardedFaults()

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        model = super().build_model(recipe, data)
        self.put_in([Fault(**fault) for fault in recipe.options["faults"]], model, data)
        return model
