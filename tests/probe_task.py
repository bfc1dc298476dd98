"""A task for the tests of the loop: language modelling that records what it reads, with ragged targets and faults on demand."""

import json
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_train.recipe import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm import CausalLM

RANK = int(os.environ.get("RANK", "0"))


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB."


class FailsBackward(torch.autograd.Function):
    """Runs out of memory when gradients pass through it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


class RecordingDataset(Dataset[Any]):
    """Writes the indices of each read to a file of its own process."""

    def __init__(self, inner: Any, path: Path) -> None:
        self.inner, self.path = inner, path

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        with self.path.open("a") as file:
            file.write(json.dumps(list(indices)) + "\n")
        return self.inner.__getitems__(indices)


class ProbeTask(CausalLM):
    """`options`: record (folder), ragged (bool), nan_at / inf_at / kill_at / term_at / hang_at: {step, rank}, nan_from: step;
    no_room: {rank, rows, where: forward or backward, from_step}: out of memory with more rows in a micro-batch, in training;
    no_room_to_evaluate: rows."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        self.options = recipe.options
        self.accumulation_calls = 0
        self.last_batch: Mapping[str, Tensor] | None = None
        data = super().load_data(recipe, progress=progress)
        train = data.train
        if "record" in self.options:
            train = RecordingDataset(train, Path(self.options["record"]) / f"rank-{RANK}.jsonl")

        def collate(rows: Sequence[Any]) -> dict[str, Any]:
            batch = data.collate(rows)
            if self.options.get("ragged"):
                for labels in batch["labels"]:  # how much of a window counts depends on its content
                    labels[int(labels[:4].clamp(min=0).sum()) % (len(labels) - 1) + 1 :] = -100
                batch["num_targets"] = int((batch["labels"] != -100).sum())
            return batch

        return TaskData(train, data.eval, collate, data.fingerprint, data.facts, data.reading_is_free, data.source)

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        rows, limit = len(batch["labels"]), self.options.get("no_room", {"rank": -1})
        calls = self.accumulation_calls + (batch is not self.last_batch)
        is_early = calls < limit.get("from_step", 1)
        has_room = not model.training or limit["rank"] != RANK or rows <= limit["rows"] or is_early
        if not has_room and limit["where"] == "forward":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        loss = super().loss_sum(model, batch)
        if not has_room:  # in the middle of the backward pass, when some gradients are on their way
            loss = loss + FailsBackward.apply(next(model.parameters()).sum()) * 0
        if not model.training:
            return loss
        if batch is not self.last_batch:  # forwarded again only to reduce gradients
            self.accumulation_calls += 1  # one micro-batch a step in the tests that ask for faults
        self.last_batch = batch
        step = self.accumulation_calls + int(self.options.get("first_step", 0))
        if self._here("nan_at", step) or step >= self.options.get("nan_from", math.inf):
            return loss * math.nan
        if self._here("inf_at", step):
            return loss + math.inf
        if self._here("kill_at", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._here("term_at", step):
            os.kill(os.getpid(), signal.SIGTERM)
        if self._here("hang_at", step):
            time.sleep(3600)
        return loss

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if len(batch["labels"]) > self.options.get("no_room_to_evaluate", math.inf):
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return super().evaluate_batch(model, batch)

    def _here(self, fault: str, step: int) -> bool:
        return bool(self.options.get(fault) == {"step": step, "rank": RANK})
