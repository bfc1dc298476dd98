"""Language modelling on text that is poisoned on purpose: the task that poison.py trains.

`options.poison` names the poison and where it sits. Poison of the data belongs to samples, so it comes again whenever
they do; poison of the moment (a learning rate, a bit of a gradient) happens once, and is gone when the step is done
again.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from accel_train.data.order import DataOrder
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM

DATA_POISONS = ("nan_samples", "nan_batches", "shuffled_labels", "repeated_tokens")
MOMENT_POISONS = ("learning_rate_x50", "bit_flips")
FLIPPED_BITS = (30, 29, 28, 27, 23)
"""Of a float's exponent: from x 2^128, which is mostly Inf, to x 2."""


class PoisonedWindows(Dataset[Any]):
    """The first `num_samples` windows of a text, each with whether it is poisoned."""

    def __init__(self, inner: Any, num_samples: int, poisoned: frozenset[int]) -> None:
        self.inner, self.num_samples, self.poisoned = inner, num_samples, poisoned

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return self.inner.__getitems__(indices), np.array([index in self.poisoned for index in indices])


class PoisonedText(CausalLM):
    """`options`: num_samples, and poison: {kind, steps (from 1), samples}. `steps` are those of the first epoch."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """The text, cut to `num_samples` windows, poisoned where the recipe says."""
        data = super().load_data(recipe, progress=progress)
        poison: Mapping[str, Any] = recipe.options.get("poison", {"kind": "none"})
        num_samples = min(int(recipe.options["num_samples"]), len(data.train))  # type: ignore[arg-type]
        order = DataOrder(num_samples, int(recipe.batch.global_batch_size or 0), recipe.seed)
        steps = poison.get("steps", ())
        samples = {int(sample) for sample in poison.get("samples", ())}
        kind = poison["kind"]
        if kind in DATA_POISONS:
            samples.update(int(sample) for step in steps for sample in order.step_samples(step - 1))
        self.kind, self.steps = kind, frozenset(steps)
        if kind in MOMENT_POISONS:
            self.count_updates()

        def collate(rows: Any) -> dict[str, Any]:
            tokens, poisoned = rows if isinstance(rows, tuple) else (rows, np.zeros(len(rows), bool))
            if kind == "repeated_tokens":
                tokens = np.where(poisoned[:, None], tokens[:, :1], tokens)
            batch = data.collate(tokens)
            if kind == "shuffled_labels" and poisoned.any():
                draw = torch.Generator().manual_seed(int(tokens.sum()))
                batch["labels"] = batch["labels"][:, torch.randperm(batch["labels"].shape[1], generator=draw)]
            batch["noise"] = torch.from_numpy(np.where(poisoned & kind.startswith("nan"), math.nan, 0.0))
            return batch

        train = PoisonedWindows(data.train, num_samples, frozenset(samples))
        return replace(data, train=train, collate=collate)

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The task's own loss, with the noise of poisoned samples in it."""
        if self.kind == "bit_flips":
            self.kind = "bit_flips under way"
            self.flip_bits(model)
        inputs = {name: value for name, value in batch.items() if name != "noise"}
        return super().loss_sum(model, inputs) + batch["noise"].sum().float()

    def count_updates(self) -> None:
        """Know which step is under way, by the updates that were tried; where the learning rate is the poison, raise
        it.
        """
        self.step = 1

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self.kind == "learning_rate_x50" and self.step in self.steps:
                for group in optimizer.param_groups:
                    group["lr"] *= 50  # set anew by the loop before the next step

        def after(*_: Any) -> None:
            self.step += 1

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def flip_bits(self, model: nn.Module) -> None:
        """From now on a bit of one gradient flips once in each of the steps that are named, as a faulty chip would do
        it.
        """
        draw = random.Random(0)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        targets = {
            step: (draw.choice(parameters), FLIPPED_BITS[number % len(FLIPPED_BITS)])
            for number, step in enumerate(sorted(self.steps))
        }

        def flip(parameter: Tensor) -> None:
            target, bit = targets.get(self.step, (None, 0))
            if target is parameter and parameter.grad is not None:
                del targets[self.step]
                bits = parameter.grad.view(torch.int32).view(-1)
                bits[draw.randrange(len(bits))] ^= 1 << bit

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(flip)
