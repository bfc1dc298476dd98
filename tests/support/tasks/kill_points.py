"""Tasks that kill processes of their run at a chosen place: in reading, training, evaluating.

`KILL_PLACE` (load, forward, backward, evaluate), `KILL_COUNT` (the how manieth time a process comes there), `KILL_RANK`
and
`KILL_WHO` (rank, group, launcher) in the environment say where and whom; without them it is a task like any other.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_train.data.samples import fetch
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, TaskData, Tensors
from accel_train.tasks.object_detection.task import ObjectDetection
from accel_train.tasks.sentence_embedding.task import SentenceEmbedding
from tests.support.tasks.probe import ProbeTask

RANK = os.environ.get("RANK", "0")
TRAINER = os.getpid()


class DeadlyDataset(Dataset[Any]):
    """Reads, and kills when it is its time; also in a process that only reads."""

    def __init__(self, inner: Any, task: "Deadly") -> None:
        self.inner, self.task = inner, task

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        self.task.pass_by("load")
        return fetch(self.inner, indices)


class Deadly:
    """A task that kills processes of its run."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        data = super().load_data(recipe, progress=progress)  # type: ignore[misc]
        self.times, own_draw = 0, data.draw

        def draw(index: int, generator: np.random.Generator) -> Any:
            assert own_draw is not None
            self.pass_by("load")
            return own_draw(index, generator)

        return replace(data, train=DeadlyDataset(data.train, self), draw=None if own_draw is None else draw)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            self.pass_by("forward")
        loss = super().loss_sum(model, batch)  # type: ignore[misc]
        if model.training and os.environ.get("KILL_PLACE") == "backward":
            loss.register_hook(lambda _: self.pass_by("backward"))
        return loss

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        self.pass_by("evaluate")
        return super().evaluate_batch(model, batch)  # type: ignore[misc]

    def pass_by(self, place: str) -> None:
        """Count that this process comes to a place, and kill if it is the time."""
        if os.environ.get("KILL_PLACE") != place or os.environ["KILL_RANK"] != RANK:
            return
        self.times += 1
        if self.times < int(os.environ["KILL_COUNT"]):
            return
        if os.environ["KILL_WHO"] == "group":
            os.killpg(os.getpgid(0), signal.SIGKILL)
        elif os.environ["KILL_WHO"] == "launcher":
            os.environ.pop("KILL_PLACE")
            os.kill(os.getpgid(0), signal.SIGKILL)  # it leads the group
        else:
            os.kill(TRAINER, signal.SIGKILL)


class KillTask(Deadly, ProbeTask):
    """`options`: those of ProbeTask."""


class KillSentenceEmbedding(Deadly, SentenceEmbedding):
    """Sentence embeddings."""


class KillObjectDetection(Deadly, ObjectDetection):
    """Object detection."""
