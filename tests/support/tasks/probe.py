"""A task for the tests of the loop: language modelling that records what it reads, with ragged targets and faults on
demand.
"""

import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_train.data.samples import fetch
from accel_train.data.text import shards
from accel_train.model.kernels import chunked_loss
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, TaskData, Tensors
from accel_train.tasks.causal_lm.task import CausalLM

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


@contextmanager
def runs_out_in(block: nn.Module, where: str) -> Iterator[None]:
    """Inside, memory runs out in this block's forward, or where its gradients come back."""

    def fails(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if where == "forward":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return FailsBackward.apply(output)

    handle = block.register_forward_hook(fails, prepend=True)
    try:
        yield
    finally:
        handle.remove()


class RecordingDataset(Dataset[Any]):
    """Writes the indices of each read to a file of its own process."""

    def __init__(self, inner: Any, path: Path) -> None:
        self.inner, self.path = inner, path

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        with self.path.open("a") as file:
            file.write(json.dumps(list(indices)) + "\n")
        return fetch(self.inner, [*indices])


class ProbeTask(CausalLM):
    """`options`: record (folder), ragged (bool), nan_at / inf_at / kill_at / term_at / hang_at: {step, rank}, nan_from:
    step;
    no_room: {rank (or every), rows, where: forward or backward, from_step, block, times}: out of memory with more rows
    in a micro-batch, in
    training, at the end of the forward or, where a block is named, in that one; so many times, or always;
    no_room_to_evaluate: rows; counts_forwards: a batch norm, whose statistics are those of the steps that were done;
    weighs (folder): the bytes of the weights with values, after each build of a model, in a file of each process;
    seconds_a_forward: how long each takes at least; logits_at_once: how many, where
    the loss is computed in chunks; shard_bytes: of raw text that is tokenized meanwhile."""

    spec = CausalLM.spec

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        self.options = recipe.options
        chunked_loss.LOGITS_AT_ONCE = self.options.get("logits_at_once", chunked_loss.LOGITS_AT_ONCE)
        shards.SHARD_BYTES = self.options.get("shard_bytes", shards.SHARD_BYTES)
        self.accumulation_calls = self.times_run_out = 0
        self.last_batch: Batch | None = None
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

        return replace(data, train=train, collate=collate)

    @wraps(CausalLM.build_model)  # a resume makes the package's own models without values
    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        model = super().build_model(recipe, data)
        if recipe.options.get("counts_forwards"):
            model.add_module("count", nn.BatchNorm1d(1))
        if "weighs" in recipe.options:
            held = sum(each.untyped_storage().nbytes() for each in model.parameters() if not each.is_meta)
            with (Path(recipe.options["weighs"]) / f"rank-{RANK}").open("a") as file:
                file.write(f"{held}\n")
        return model

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        rows, limit = len(batch["labels"]), self.options.get("no_room", {"rank": -1})
        is_new = batch is not self.last_batch  # not forwarded again only to reduce gradients
        calls = self.accumulation_calls + is_new
        is_early = calls < limit.get("from_step", 1)
        has_room = not model.training or limit["rank"] not in (RANK, "every") or rows <= limit["rows"] or is_early
        has_room = has_room or self.times_run_out >= limit.get("times", math.inf)
        self.times_run_out += not has_room
        in_block = nullcontext()
        if not has_room and "block" in limit:
            blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
            in_block = runs_out_in(blocks[limit["block"]], limit["where"])
        elif not has_room and limit["where"] == "forward":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        with in_block:
            loss = super().loss_sum(model, batch)
        if self.options.get("counts_forwards"):
            loss = loss + 0 * model.get_submodule("count")(loss.detach().expand(2, 1)).sum()
        if (
            not has_room and "block" not in limit
        ):  # in the middle of the backward pass, when some gradients are on their way
            loss = loss + FailsBackward.apply(next(model.parameters()).sum()) * 0
        if not model.training:
            return loss
        time.sleep(self.options.get("seconds_a_forward", 0))
        self.accumulation_calls += is_new  # one micro-batch a step in the tests that ask for faults
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

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        if len(batch["labels"]) > self.options.get("no_room_to_evaluate", math.inf):
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return super().evaluate_batch(model, batch)

    def _here(self, fault: str, step: int) -> bool:
        return bool(self.options.get(fault) == {"step": step, "rank": RANK})
