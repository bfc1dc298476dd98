"""A task that a resume cannot repeat, in the ways in which own code goes wrong."""

import os
from collections.abc import Mapping

from torch import Tensor, nn

from accel_train.core.errors import DataError
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM


class ForgetfulTask(CausalLM):
    """`options`: counts (the loss depends on a count that no checkpoint holds), chance (on the system's random
    numbers),
    unreadable (the third batch cannot be read)."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        self.options, self.num_losses = recipe.options, 0
        return super().load_data(recipe, progress=progress)

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().loss_sum(model, batch)
        self.num_losses += model.training
        if self.options.get("unreadable") and self.num_losses > 2:
            raise DataError("corpus.jsonl:7: this row cannot be read")
        if model.training and self.options.get("counts"):
            return loss * (1 + self.num_losses / 1000)
        return loss * (1 + os.urandom(1)[0] / 100_000) if self.options.get("chance") else loss
