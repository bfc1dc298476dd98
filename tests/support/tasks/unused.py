"""A regression with parameters that take no part in the loss: never, on one process, in some micro-batches, or from a
step on.
"""

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from tests.support.tasks.number_faults import NUM_FEATURES, FaultyRegression

RANK = int(os.environ.get("RANK", "0"))


class Plain(nn.Module):
    """Features to one number; without dropout and batch norm, any number of processes computes the same."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(NUM_FEATURES, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_layers))
        self.left_out = num_layers

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            x = x if number == self.left_out else layer(torch.tanh(x))
        return self.head(torch.tanh(x)).squeeze(-1)


class Unused(FaultyRegression):
    """`options`: never (bool): `spare` is never used; branch: `first` or `second` is, by the first sample of a
    micro-batch;
    leaves: {call, rank}: the head's bias takes no part in the forward of that number, and those after it; on
    all processes with rank -1; layers: that many, which FSDP2 gathers one at a time; drops: process r computes all but
    layer r; skips: every second forward leaves out the first layer; shared: the first two
    layers have one weight; scalar: `scale` is a weight without dimensions; empty: a build on the meta device `fails`
    after it drew random numbers, or `differs` by a weight."""

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        self.options, self.calls = recipe.options, 0
        model = Plain(int(self.options.get("layers", 0)))
        if torch.get_default_device().type == "meta" and "empty" in self.options:
            model.register_parameter("spare", nn.Parameter(torch.ones(3)))
            if self.options["empty"] == "fails":
                model.embed.weight.sum().item()
        if self.options.get("drops"):
            model.left_out = RANK
        if self.options.get("never"):
            model.register_parameter("spare", nn.Parameter(torch.ones(3, 3)))
        if self.options.get("scalar"):
            model.register_parameter("scale", nn.Parameter(torch.ones(())))
        if self.options.get("shared"):
            model.layers[1].weight = model.layers[0].weight
        if self.options.get("branch"):
            model.add_module("first", nn.Linear(1, 1))
            model.add_module("second", nn.Linear(1, 1))
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        self.faults.samples = batch["sample"]
        leaves = self.options.get("leaves", {"call": 10**9, "rank": RANK})
        bias = model.get_parameter("head.bias")
        is_left_out = self.calls >= leaves["call"] and leaves["rank"] in (RANK, -1)
        if self.options.get("skips"):
            model.left_out = (self.calls % 2) * len(model.get_submodule("layers"))  # type: ignore[arg-type, assignment]
        found = model(batch["features"])
        if is_left_out:
            model.get_submodule("head").bias = None  # type: ignore[assignment]
            found = model(batch["features"])
            model.get_submodule("head").bias = bias  # type: ignore[assignment]
        if self.options.get("branch"):
            name = "first" if int(batch["sample"][0]) % 2 else "second"
            found = model.get_submodule(name)(found[:, None]).squeeze(-1)
        return ((found.float() - batch["wanted"]).square() * batch["counts"]).sum()
