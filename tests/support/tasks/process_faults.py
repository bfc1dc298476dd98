"""A task whose processes fail, hang and dawdle on demand: what happens to one process, and what the
others make of it.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Scores, TaskData, Tensors
from tests.support.tasks.probe import RANK, ProbeTask


class SlowDataset(Dataset[Any]):
    """Takes its time for each batch; the process that reads one named sample may be killed, or sleep for ever."""

    def __init__(self, inner: Any, seconds: float, fault: str) -> None:
        self.inner, self.seconds, self.fault, self.num_reads = inner, seconds, fault, 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        self.num_reads += 1
        time.sleep(self.seconds)
        if self.fault == "killed" and self.num_reads == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        if (
            self.fault == "hangs_up" and self.num_reads == 12
        ):  # on the training, which asks it for the memory of a batch
            connection.deliver_challenge = lambda caller, key: caller.close()  # type: ignore[attr-defined]
        if self.fault == "exits" and self.num_reads == 2:
            sys.exit(0)
        if self.fault == "hangs" and self.num_reads == 12:
            time.sleep(3600)
        return self.inner.__getitems__(indices)


def note_opened(path: Path, opened: str) -> None:
    if opened.endswith(".safetensors") and Path(opened).parent.name.startswith("step-"):
        with path.open("a") as file:
            file.write(f"{Path(opened).name}\n")


class FaultTask(ProbeTask):
    """`options`, beside those of ProbeTask: raise_at / exit_at / sys_exit_at / sigstop_at / spin_at / flip_at: {step,
    rank};

    seconds: {load, build, step, evaluate, read, score, save, baselines}: how long each takes; sigstop_in: {score or
    save: rank}; data_worker: killed, hangs_up, exits or hangs;
    in_load / in_build: {rank, fault: raise}; other_data: rank whose data differs; file_limit: {bytes, rank}: longer
    files cannot be written;
    flip_part_at: {step, rank}: a bit of what this process holds of a block that FSDP2 spreads;
    slow: {rank, read, step or block: seconds}, of one process alone (-1: all); timeouts: a folder where each process
    writes how long a collective of each group may wait, in seconds, at each forward; opened: a folder where each
    process writes which files of checkpoints Python opens after the data are loaded (safetensors reads tensors
    without it).
    """

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        slow = recipe.options.get("slow", {"rank": None})
        self.seconds = {**recipe.options.get("seconds", {}), **(slow if slow["rank"] in (RANK, -1) else {})}
        time.sleep(self.seconds.get("load", 0))
        data = super().load_data(recipe, progress=progress)
        if recipe.options.get("raise_in_load") == RANK:
            raise ValueError("corpus.jsonl:7 is unreadable on this machine")
        limit = recipe.options.get("file_limit", {"rank": -1})
        if limit["rank"] == RANK:  # Python ignores the signal, so a longer file is an error of its write
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit["bytes"], limit["bytes"]))
        if recipe.options.get("other_data") == RANK:
            data = replace(data, fingerprint="0123456789abcdef")
        if "opened" in recipe.options:
            path = Path(recipe.options["opened"]) / f"rank-{RANK}.txt"
            sys.addaudithook(lambda event, arguments: note_opened(path, str(arguments[0])) if event == "open" else None)
        fault = recipe.options.get("data_worker", "")
        if fault or "read" in self.seconds:
            data = replace(data, train=SlowDataset(data.train, self.seconds.get("read", 0), fault))
        return data

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        begin = time.monotonic()
        while time.monotonic() < begin + self.seconds.get("build", 0):
            time.sleep(0.01)
        if recipe.options.get("raise_in_build") == RANK:
            raise RuntimeError("no such layer on this machine")
        model = super().build_model(recipe, data)
        if "block" in self.seconds:
            model.get_submodule("transformer.h.0.mlp").register_forward_hook(self._dawdle)
        return model

    def _dawdle(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            time.sleep(self.seconds["block"])

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._here("flip_part_at", self.accumulation_calls + 1) and model.training:
            weight = model.get_parameter("transformer.h.1.ln_2.weight")  # not gathered yet
            weight.to_local().data.view(torch.int32)[3] ^= 1
        loss = super().loss_sum(model, batch)
        if not model.training:
            return loss
        time.sleep(self.seconds.get("step", 0))
        if "timeouts" in self.options:
            groups = dist.distributed_c10d._world.pg_map
            limits = {each.group_name: each._get_backend(torch.device("cpu")).options._timeout for each in groups}
            named = {each.group_name: each.group_desc for each in groups}
            seconds = {f"{named[name]} {name}": limit.total_seconds() for name, limit in limits.items()}
            with Path(self.options["timeouts"], f"rank-{RANK}.jsonl").open("a") as file:
                file.write(json.dumps(seconds) + "\n")
        faults = {
            "raise_at": self._fail,
            "exit_at": lambda: os._exit(0),
            "sys_exit_at": lambda: sys.exit(0),
            "sigstop_at": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "spin_at": self._spin,
            "flip_at": lambda: self._flip(model),
        }
        for fault, happen in faults.items():
            if self._here(fault, self.accumulation_calls):
                happen()
        return loss

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        time.sleep(self.seconds.get("evaluate", 0))
        return super().evaluate_batch(model, batch)

    def _work(self, what: str) -> None:
        if self.options.get("sigstop_in", {}).get(what) == RANK:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(self.seconds.get(what, 0))

    def score(self, loss: float, totals: Mapping[str, Any], data: TaskData) -> Scores:
        self._work("score")
        return super().score(loss, totals, data)

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        self._work("save")
        super().save(model, data, folder)

    def baselines(self, data: TaskData) -> dict[str, float]:
        self._work("baselines")
        return super().baselines(data)

    def _fail(self) -> None:
        raise KeyError("a layer that is not there")

    def _spin(self) -> None:
        while True:
            sys.getrecursionlimit()

    def _flip(self, model: nn.Module) -> None:
        """A bit of the first and of the last weight, after they were read: the gradients of this step are as on the
        other processes.
        """
        weights = list(model.parameters())
        for weight in (weights[0], weights[-1]):
            weight.data.view(-1).view(torch.int32)[3] ^= 1 << 12  # unseen by autograd, as a fault of the memory is
