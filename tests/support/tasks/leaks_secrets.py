"""A task whose failure tells everything it knows, as programs of other people do."""

import os
from collections.abc import Mapping

from torch import Tensor, nn

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from tests.support.tasks.probe import ProbeTask


class TalkativeTask(ProbeTask):
    """`options.fail_at`: the step at which it fails, with its options and environment in the message."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        data = super().load_data(recipe, progress=progress)
        data.facts.others["source"] = dict(self.options)
        data.facts.notes = [*data.facts.notes, f"read with {self.options}"]
        return data

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().loss_sum(model, batch)
        if self.accumulation_calls == self.options.get("fail_at"):
            known = {**self.options, **os.environ}
            raise RuntimeError(f"the service cannot be reached: {known}")
        return loss
