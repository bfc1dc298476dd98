"""A task that writes down how many bytes of frozen blocks a process holds."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from accel_train.model.tensors import local_part
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM


class PackedTask(CausalLM):
    """Language modelling; writes packed-RANK.json into `options.held` before a forward: bytes by type and name."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        self.folder = Path(recipe.options["held"])
        return super().load_data(recipe, progress=progress)

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        blocks = {name: local_part(each) for name, each in model.named_parameters() if ".layers." in name}
        held = {name: each.numel() * each.element_size() for name, each in blocks.items() if not each.requires_grad}
        (self.folder / f"packed-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(held))
        return super().loss_sum(model, batch)
