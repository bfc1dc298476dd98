"""The text tasks with a fault on demand: `options` nan_at, term_at, or no_room_at: {step, rank}."""

import math
import os
import signal
from typing import Any

import torch
from torch import nn

from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, TaskData
from accel_train.tasks.masked_lm.task import MaskedLM
from accel_train.tasks.multiple_choice.task import MultipleChoice
from accel_train.tasks.question_answering.task import QuestionAnswering
from accel_train.tasks.sentence_embedding import losses
from accel_train.tasks.sentence_embedding.data import text_hash
from accel_train.tasks.sentence_embedding.task import SentenceEmbedding
from accel_train.tasks.seq2seq.task import Seq2Seq
from accel_train.tasks.token_classification.task import TokenClassification


class Faulty:
    """Counts the training forwards, one a step, and breaks at one of them."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        self.options, self.step = recipe.options, 0
        return super().load_data(recipe, progress=progress)  # type: ignore[misc]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Any:
        loss = super().loss_sum(model, batch)  # type: ignore[misc]
        if model.training:
            self.step += 1
            here = {"step": self.step, "rank": int(os.environ.get("RANK", "0"))}
            if self.options.get("term_at") == here:
                os.kill(os.getpid(), signal.SIGTERM)
            if self.options.get("nan_at") == here:
                return loss * math.nan
        return loss


class FaultyTokenClassification(Faulty, TokenClassification):
    """Token classification."""


class FaultyQuestionAnswering(Faulty, QuestionAnswering):
    """Question answering."""


class FaultyMultipleChoice(Faulty, MultipleChoice):
    """Multiple choice."""


class FaultySeq2Seq(Faulty, Seq2Seq):
    """Sequence to sequence."""


class FaultyMaskedLM(Faulty, MaskedLM):
    """Masked language modelling."""


class FaultySentenceEmbedding(Faulty, SentenceEmbedding):
    """Sentence embeddings. With no_room_at, memory runs out between the exchanges of a step.

    With nan_text, the vector of this text is NaN.
    """

    def _table(self, model: nn.Module, batch: Batch) -> losses.Table:
        table = super()._table(model, batch)
        if "nan_text" not in self.options:
            return table
        is_bad = table.texts == text_hash(self.options["nan_text"])
        return table._replace(vectors=table.vectors.masked_fill(is_bad[..., None], math.nan))

    def loss_sum(self, model: nn.Module, batch: Batch) -> Any:
        exchange, calls, at = losses._exchange_count, 0, self.options.get("no_room_at")

        def short_of_memory(count: int, device: torch.device) -> list[int]:
            nonlocal calls
            calls += 1
            found = exchange(count, device)
            if calls == 1 and at == {"step": self.step + 1, "rank": int(os.environ.get("RANK", "0"))}:
                raise torch.OutOfMemoryError("no room for the rows of the others")
            return found

        losses._exchange_count = short_of_memory
        try:
            return super().loss_sum(model, batch)
        finally:
            losses._exchange_count = exchange
