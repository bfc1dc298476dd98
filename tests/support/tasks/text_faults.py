"""The five text tasks with a fault on demand: `options` nan_at or term_at: {step, rank}."""

import math
import os
import signal
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.masked_lm.task import MaskedLM
from accel_train.tasks.multiple_choice.task import MultipleChoice
from accel_train.tasks.question_answering.task import QuestionAnswering
from accel_train.tasks.seq2seq.task import Seq2Seq
from accel_train.tasks.token_classification.task import TokenClassification


class Faulty:
    """Counts the training forwards, one a step, and breaks at one of them."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        self.options, self.step = recipe.options, 0
        data: TaskData = super().load_data(recipe, progress=progress)  # type: ignore[misc]
        return data

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
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
