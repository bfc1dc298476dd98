"""A task for the search for the micro-batch: a real limit on the process's address space, and activations that are
large in it.

What a row keeps for the backward pass is address space that nobody touches, so that gigabytes of it cost no time.
"""

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from tests.support.tasks.probe import RANK, ProbeTask


class Keeps(torch.autograd.Function):
    """Hands a number through, and keeps so many bytes until its gradient has come back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, num_bytes: int) -> Tensor:
        ctx.save_for_backward(torch.empty(num_bytes, dtype=torch.uint8))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        return gradients[0], None


class MemoryTask(ProbeTask):
    """`options`, beside those of ProbeTask: mebibytes_a_row; address_space_gibibytes: of each rank (0: no limit);
    forwards:
    a folder where each process writes the rows of each training forward."""

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        model = super().build_model(recipe, data)
        gibibytes = recipe.options.get("address_space_gibibytes", [0] * 8)[RANK]
        if gibibytes:
            resource.setrlimit(resource.RLIMIT_AS, (int(gibibytes * 2**30), resource.RLIM_INFINITY))
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        rows = len(batch["labels"])
        if model.training and "forwards" in self.options:
            with Path(self.options["forwards"], f"rank-{RANK}.txt").open("a") as file:
                file.write(f"{rows}\n")
        loss = super().loss_sum(model, batch)
        return Keeps.apply(loss, rows * int(self.options["mebibytes_a_row"]) * 2**20) if model.training else loss
