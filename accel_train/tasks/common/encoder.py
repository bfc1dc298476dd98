"""Base of the tasks that fine-tune a text encoder with a head: sequences, tokens, answers, or choices."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from accel_train.data.labels import LabelScheme
from accel_train.data.text.tokenizers import vocab_size_of
from accel_train.recipe.data import TextData
from accel_train.recipe.schema import Recipe
from accel_train.task import Task, TaskData
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.texts import classifier_tokenizer


class Row(Protocol):
    """A row of the user's data."""

    @property
    def id(self) -> str:
        """Name in predictions: the id column, or file and row number."""


class Rows(Protocol):
    """The user's data in memory, split into training and evaluation."""

    @property
    def train(self) -> Sequence[Row]:
        """Training rows."""

    @property
    def eval(self) -> Sequence[Row] | None:
        """Evaluation rows, or None without an evaluation."""

    @property
    def description(self) -> str:
        """Names and sizes of the files."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user, as sentences."""


RowsT = TypeVar("RowsT", bound=Rows)


@dataclass(frozen=True)
class Source(Generic[RowsT]):
    """The rows, tokenizer, and model configuration that a task keeps in addition to its samples."""

    rows: RowsT
    samples: list[Any]
    """Tokenized evaluation rows."""
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    label_names: tuple[str, ...]
    """Class names in the order of their ids. Empty without classes."""

    def row_ids(self, index: int) -> str:
        """Return the name of an evaluation row: its id column, or its file and row number."""
        assert self.rows.eval is not None
        return self.rows.eval[index].id


@dataclass(frozen=True)
class Encoded:
    """Tokenized rows, with facts about them for the plan and the report."""

    train: list[Any]
    eval: list[Any] | None
    fingerprint: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class EncoderTask(Task, Generic[RowsT]):
    """A task with a text encoder. Subclasses define `head`, `collate`, `read`, `texts`, `encode`, and `card`."""

    head: ClassVar[models.Head]
    collate: ClassVar[Callable[..., dict[str, Any]]]
    """Static function from samples, `pad_id`, `multiple`, `max_length`, and for pairs `with_types`, to a batch."""
    source_type: ClassVar[type[Source[Any]]] = Source
    needs_offsets: ClassVar[bool] = False
    """Whether the tokenizer must map tokens to characters."""
    is_pair = True
    """Whether a sample joins two texts. `read` may set it."""
    scheme: LabelScheme | None = None
    """Classes of the head, set by `read`; None for a head without classes."""
    label_names: tuple[str, ...] = ()
    """Names in predictions, set by `read`."""
    choices_shape: tuple[int, ...] = ()
    """Number of texts per sample as a shape, set by `read`; () for one text."""
    targets_per_sample = 1.0
    """Mean number of targets of a training sample. `encode` may set it."""

    @abstractmethod
    def read(self, recipe: Recipe) -> RowsT:
        """Read the rows, and check the settings of the task. The model's type is already checked."""

    @abstractmethod
    def texts(self, rows: RowsT) -> Iterable[str]:
        """Return the training texts, on which a tokenizer may be trained."""

    @abstractmethod
    def encode(
        self,
        recipe: Recipe,
        rows: RowsT,
        config: PreTrainedConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        progress: bool,
    ) -> Encoded:
        """Tokenize the rows. `ids` of a sample is an array, or one array per choice."""

    @abstractmethod
    def card(self, facts: Mapping[str, Any], model_type: str) -> str:
        """Return the model card."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenize all rows into memory.

        Raises:
            ValueError: the model, tokenizer, rows, or labels do not match the recipe. The message names the file and
                row.
        """
        section = cast("TextData", self.Data.of(recipe.data))
        models.check_model(recipe, self.head)
        rows = self.read(recipe)
        tokenizer, tokenizer_notes = classifier_tokenizer(recipe, self.texts(rows))
        if self.needs_offsets:
            models.check_offsets(recipe, tokenizer)
        if self.scheme is None:
            config = models.model_config(recipe, tokenizer, self.head)
        else:
            config = models.classifier_config(recipe, tokenizer, self.scheme, self.head)
        positions = models.num_positions(config, self.head)
        max_length = models.resolve_max_length(section.max_length, positions, tokenizer, is_pair=self.is_pair)
        encoded = self.encode(recipe, rows, config, tokenizer=tokenizer, max_length=max_length, progress=progress)
        lengths = np.array([_length(sample.ids) for sample in encoded.train])
        self.mean_length = float(lengths.mean())
        padding: dict[str, Any] = {"pad_id": int(tokenizer.pad_token_id), "multiple": section.pad_to_multiple_of}
        if self.is_pair:
            padding["with_types"] = models.with_token_types(tokenizer, config, self.head)
        return TaskData(
            # The DataLoader reads a list as a map-style dataset.
            train=cast("Dataset[Any]", encoded.train),
            eval=cast("Dataset[Any] | None", encoded.eval),
            collate=partial(self.collate, max_length=max_length, **padding),
            fingerprint=encoded.fingerprint,
            facts={
                "sources": rows.description,
                "num_train": len(encoded.train),
                "num_eval": len(encoded.eval or ()),
                **encoded.facts,
                "max_length": max_length,
                "mean_length": round(self.mean_length, 1),
                "notes": [*rows.notes, *tokenizer_notes, *encoded.notes],
            },
            reading_is_free=True,
            source=self.source_type(rows, encoded.eval or [], tokenizer, config, self.label_names),
            lengths=lengths,
            lengths_vary=True,
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's model and add notes about new weights in a pretrained model to the facts of `data`.

        Raises:
            ValueError: the weights cannot be loaded, or are not in the safetensors format.
        """
        source: Source[RowsT] = data.source
        model, notes = models.build_model(recipe, source.config, vocab_size_of(source.tokenizer), self.head)
        data.add_notes(notes)
        return model

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Return 3 x the FLOPs per target of the forward pass of a mean-length sample, without padding."""
        assert isinstance(model, PreTrainedModel)
        shape = (1, *self.choices_shape, max(1, round(self.mean_length)))
        flops = classification.training_flops(self.head.factory, model.config, input_ids=shape)
        return None if flops is None else flops / self.targets_per_sample

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration, the tokenizer, and a model card."""
        assert isinstance(model, PreTrainedModel)
        super().save_description(model, data, folder)
        text = self.card(data.facts, model.config.model_type)
        models.save_tokenizer_and_card(data.source.tokenizer, data.facts["max_length"], text, folder)


def model_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the model's logits for the inputs of a batch."""
    logits: Tensor = model(
        **{name: each for name, each in batch.items() if name not in ("labels", "word_starts")}
    ).logits
    return logits


def cut_notes(samples: Sequence[Any], max_length: int, called: str) -> list[str]:
    """Return a note if training samples reach `max_length`. It includes a few samples that fit exactly."""
    count = sum(_length(sample.ids) >= max_length for sample in samples)
    if not count:
        return []
    return [f"{count:,} of {len(samples):,} {called} reach data.max_length={max_length} tokens, and are cut there"]


def _length(ids: Any) -> int:
    return len(ids) if isinstance(ids, np.ndarray) else max(map(len, ids))
