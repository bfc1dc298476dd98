"""Tasks of text rows that record what they read: labeled texts, pairs, and rewrites, which may be in shards."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_train.data.text import shards
from accel_train.recipe.schema import Recipe
from accel_train.task import Task, TaskData
from accel_train.tasks.sentence_embedding.task import SentenceEmbedding
from accel_train.tasks.seq2seq.task import Seq2Seq
from accel_train.tasks.text_classification.task import TextClassification
from tests.support.tasks.probe import RANK, RecordingDataset


class KillingDataset(RecordingDataset):
    """Ends its process, without a chance to save, at a read."""

    def __init__(self, inner: Any, path: Path, last_read: int) -> None:
        super().__init__(inner, path)
        self.reads_left = last_read

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        self.reads_left -= 1
        if not self.reads_left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(indices)


class _Recorded(Task):
    """`options`: record (folder), shard_bytes, kill_at: {read, rank}."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        options = recipe.options
        shards.SHARD_BYTES = options.get("shard_bytes", shards.SHARD_BYTES)
        data = super().load_data(recipe, progress=progress)  # type: ignore[safe-super]
        kill_at = options.get("kill_at", {"rank": -1})
        last_read = kill_at["read"] if kill_at["rank"] == RANK else -1
        path = Path(options["record"]) / f"rank-{RANK}.jsonl"
        return replace(data, train=KillingDataset(data.train, path, last_read))


class RecordedTexts(_Recorded, TextClassification):
    """Labeled texts."""

    spec = TextClassification.spec


class RecordedPairs(_Recorded, SentenceEmbedding):
    """Pairs of texts, with a loss over the global batch."""

    spec = SentenceEmbedding.spec


class RecordedRewrites(_Recorded, Seq2Seq):
    """Pairs of a text and another text to write from it."""

    spec = Seq2Seq.spec
