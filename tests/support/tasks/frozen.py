"""A task with weights that it freezes itself, and moves itself: a teacher that follows."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM


class TeacherTask(CausalLM):
    """Language modelling beside a teacher, which takes no gradient."""

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        model = super().build_model(recipe, data)
        model.add_module("teacher", nn.Embedding(4, 4).requires_grad_(False))
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        teacher = model.get_submodule("teacher")
        with torch.no_grad():
            teacher.get_parameter("weight").mul_(0.99)
        return super().loss_sum(model, batch)
