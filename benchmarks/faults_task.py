"""The task by which faults.py trains with accel_train: language modelling whose forwards go through `Faults`."""

from collections.abc import Mapping

from torch import Tensor, nn

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM
from benchmarks.faults_loops import Faults, Job


class FaultyText(CausalLM):
    """`options.job`: the fields of a `Job`."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """The token file, and what is to go wrong with it."""
        self.faults = Faults(Job(**recipe.options["job"]))
        return super().load_data(recipe, progress=progress)

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss, times what the fault makes of it, written down."""
        if not model.training:
            return super().loss_sum(model, batch)
        factor = self.faults.factor()
        loss = super().loss_sum(model, batch) * factor
        self.faults.note(batch["input_ids"][:, 0], float(loss.detach()))
        return loss
