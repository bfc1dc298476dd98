"""Tasks whose step does what no step on a GPU may do, and one whose model has a weight that it does not use."""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from accel_train.model.compile import repeated_blocks
from accel_train.tasks.causal_lm.task import CausalLM


class LeavesOneOut(CausalLM):
    def build_model(self, recipe: Any, data: Any) -> nn.Module:
        model = super().build_model(recipe, data)
        repeated_blocks(model)[0].register_parameter("spare", nn.Parameter(torch.zeros(8, 8)))
        return model


class ReadsANumber(CausalLM):
    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss_sum(model, batch)
        return loss if loss.item() < 1e9 else loss * 0  # ReadsANumber


class ReadsAList(CausalLM):
    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss_sum(model, batch) + len(batch["input_ids"][0, :2].tolist())  # ReadsAList


class MixesDevices(CausalLM):
    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        return (super().loss_sum(model, batch) * torch.ones(2)).sum()  # MixesDevices


class SendsFromTheHost(CausalLM):
    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        dist.all_reduce(torch.ones(2))  # SendsFromTheHost
        return super().loss_sum(model, batch)


class SkipsACollective(CausalLM):
    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        if dist.get_rank() == 0:
            dist.all_reduce(batch["input_ids"].new_zeros(1))  # SkipsACollective
        return super().loss_sum(model, batch)
