"""A task for tests of checkpoints and rollbacks: poisoned samples, and faults of the disk and of this process on
demand.
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_train.checkpoint.rollback_log import ROLLBACKS
from accel_train.recipe.schema import Recipe
from accel_train.recovery import rollback
from accel_train.task import Batch, TaskData
from accel_train.tasks.causal_lm.task import CausalLM

RANK = int(os.environ.get("RANK", "0"))
POISON = 255
"""A byte that no UTF-8 text holds."""


class PoisonedDataset(Dataset[Any]):
    """Puts POISON into the samples of some steps; data in its own order, so a step's samples follow from its number."""

    def __init__(self, inner: Any, poisoned: set[int]) -> None:
        self.inner, self.poisoned = inner, poisoned

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        rows = np.array(self.inner.__getitems__(indices))
        rows[[index in self.poisoned for index in indices], 0] = POISON
        return rows


class DiskTask(CausalLM):
    """`options`:

    poisoned: the steps (from 1, in the order of the data) whose loss is NaN;
    full: [from, to]: between these forward passes no file of the main process can grow over 64 KiB;
    slow_fsync: seconds that each fsync of a checkpoint takes;
    kill_in_save: this process is killed in its second save, before the fsync of the file or folder of this name;
    kill_after_rollback: the so-manieth forward pass after the first rollback kills this process;
    kill_in_rollback: this process is killed before "record", before "removal", or "after" both; number: of which
    rollback;
    interrupt_at: the so-manieth forward pass presses Ctrl-C twice, where a checkpoint is being written.
    """

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        self.options = recipe.options
        self.calls = self.calls_since = 0
        self.record = Path(recipe.output_dir) / ROLLBACKS
        self.most_writers = self.calls_beside_a_writer = 0
        self.saves: set[threading.Thread] = set()
        self.last_batch: Batch | None = None
        data = super().load_data(recipe, progress=progress)
        if RANK == 0:
            self._break_the_disk()
            self._break_the_rollback()
        size = recipe.batch.global_batch_size
        samples = {size * (step - 1) + i for step in self.options.get("poisoned", ()) for i in range(size)}
        return replace(data, train=PoisonedDataset(data.train, samples))

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss_sum(model, batch)
        if not model.training:
            return loss
        if batch is self.last_batch:  # forwarded again only to reduce gradients, or to find out about it
            return self._poisoned(loss, batch)
        self.last_batch = batch
        self.calls += 1
        writers = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
        self.most_writers = max(self.most_writers, len(writers))
        self.calls_beside_a_writer += bool(writers)
        if RANK == 0:
            self._limit_files(writers)
            self.calls_since += self.record.exists()
            if self.calls_since == self.options.get("kill_after_rollback"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.calls == self.options.get("interrupt_at"):
                assert writers, "nothing is being written"
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
        return self._poisoned(loss, batch)

    def _poisoned(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss * float("nan") if bool((batch["input_ids"] == POISON).any()) else loss

    def _limit_files(self, writers: list[threading.Thread]) -> None:
        first, last = self.options.get("full", (0, 0))
        if self.calls in (first, last):
            for thread in writers:
                thread.join()
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16 if self.calls == first else hard, hard))

    def _break_the_disk(self) -> None:
        if "slow_fsync" not in self.options and "kill_in_save" not in self.options:
            return
        real = os.fsync

        def fsync(descriptor: int) -> None:
            if threading.current_thread().name == "checkpoint":
                self.saves.add(threading.current_thread())
                name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
                if len(self.saves) == 2 and name == self.options.get("kill_in_save"):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(self.options.get("slow_fsync", 0))
            real(descriptor)

        os.fsync = fsync  # type: ignore[assignment]

    def _break_the_rollback(self) -> None:
        if "kill_in_rollback" not in self.options:
            return
        where, number = self.options["kill_in_rollback"], self.options.get("number", 1)

        def killing(real: Callable[..., None], before: bool) -> Callable[..., None]:
            def call(place: Any, rollbacks: Any) -> None:
                if before and len(rollbacks) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(place, rollbacks)
                if len(rollbacks) == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            return call

        name = "write_rollbacks" if where == "record" else "remove_abandoned"
        setattr(rollback, name, killing(getattr(rollback, name), where != "after"))
