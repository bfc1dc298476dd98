"""Base class of the tasks that put a head on a text encoder of transformers."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from accel_train.data.labels import LabelScheme
from accel_train.recipe.data import TextData
from accel_train.recipe.schema import Recipe
from accel_train.task import Facts, Task, TaskData
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.texts import classifier_tokenizer


class Reader(NamedTuple):
    """Tokenizer, model configuration, and length with which a task reads its texts."""

    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    max_length: int
    """Largest number of tokens in a sample."""
    notes: list[str]


class EncoderTask(Task):
    """Base of the text tasks with an encoder. A subclass reads its rows, and adds loss, scores, and predictions.

    `data.source` of a subclass has the attributes `tokenizer` and `config`.
    """

    head: ClassVar[models.Head]

    def reader(
        self, recipe: Recipe, texts: Iterable[str], *, is_pair: bool, scheme: LabelScheme | None = None
    ) -> Reader:
        """Return the tokenizer, the model's configuration, and the maximum length. `texts` may train a tokenizer.

        Raises:
            ValueError: tokenizer, model, and `data.max_length` do not fit together.
        """
        tokenizer, notes = classifier_tokenizer(recipe, texts)
        if scheme is None:
            config = models.model_config(recipe, tokenizer, self.head)
        else:
            config = models.classifier_config(recipe, tokenizer, scheme, self.head)
        positions = models.num_positions(config, self.head)
        asked = TextData.of(recipe.data).max_length
        return Reader(tokenizer, config, models.resolve_max_length(asked, positions, tokenizer, is_pair=is_pair), notes)

    def task_data(
        self,
        recipe: Recipe,
        reader: Reader,
        rows: Any,
        *,
        train: Sequence[Any],
        evaluation: Sequence[Any] | None,
        lengths: NDArray[np.int64],
        collate: Callable[..., dict[str, Any]],
        fingerprint: str,
        source: Any,
        facts: Facts,
    ) -> TaskData:
        """Return the samples as task data, and keep their mean length. `collate` gets padding and `max_length`.

        `rows`, as they were read, have a `description` and `notes`.
        """
        facts.sources, facts.notes = rows.description, [*rows.notes, *reader.notes, *facts.notes]
        self.mean_length = float(lengths.mean())
        facts.num_train, facts.num_eval = len(train), 0 if evaluation is None else len(evaluation)
        facts.max_length, facts.mean_length = reader.max_length, round(self.mean_length, 1)
        return TaskData(
            # The DataLoader reads a list as a map-style dataset.
            train=cast("Dataset[Any]", train),
            eval=cast("Dataset[Any] | None", evaluation),
            collate=partial(
                collate,
                pad_id=int(cast("int", reader.tokenizer.pad_token_id)),
                multiple=TextData.of(recipe.data).pad_to_multiple_of,
                max_length=reader.max_length,
            ),
            fingerprint=fingerprint,
            facts=facts,
            reading_is_free=True,
            source=source,
            lengths=lengths,
            lengths_vary=True,
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's model and add notes about new weights in a pretrained model to the facts of `data`.

        Raises:
            ValueError: the weights cannot be loaded, or are not in the safetensors format.
        """
        model, notes = models.build_model(recipe, data.source.config, data.source.tokenizer, self.head)
        data.add_notes(notes)
        return model

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Return 3 x the FLOPs of the forward pass of a mean-length sample, without padding."""
        assert isinstance(model, PreTrainedModel)
        shape = self.input_shape(max(1, round(self.mean_length)))
        return classification.training_flops(self.head.factory, model.config, input_ids=shape)

    def input_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of the token ids of one sample with this number of tokens."""
        return (1, length)

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration, the tokenizer, and a model card."""
        super().save_description(model, data, folder)
        models.save_tokenizer(data.source.tokenizer, data.facts.max_length, folder)


def cut_note(lengths: NDArray[np.int64], max_length: int, rows: str) -> list[str]:
    """Return a note about samples that reach `data.max_length`. It counts a few that fit exactly."""
    num_cut = int((lengths >= max_length).sum())
    if not num_cut:
        return []
    return [f"{num_cut:,} of {len(lengths):,} {rows} reach data.max_length={max_length} tokens, and are cut there"]
