"""The settings of `data` for sequence-to-sequence text generation."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from accel_train.recipe.data import BlockData, TextData
from accel_train.recipe.tasks import TEXT, TaskSpec
from accel_train.recipe.values import PositiveInt


class Seq2SeqData(TextData, BlockData):
    """Settings of `data` for sequence-to-sequence text generation."""

    label_setting: ClassVar[str | None] = "target_column"
    source_column: str = "source"
    """Column with the text to read."""
    target_column: str | None = "target"
    """Column with the text to learn. null: rows to predict, without targets."""
    translation_column: str | None = Field(default=None, examples=["translation"])
    """Column that maps languages to texts (Translation of `datasets`). source_column and target_column then name
    languages.
    """
    target_suffix: str | None = Field(default=None, examples=["en"])
    """Suffix of the files with the targets, for line-aligned files. With `train: train.de` and `target_suffix: en`, the
    target of a line is the same line of train.en. Tables are read by their columns.
    """
    source_prefix: str = Field(default="", examples=["summarize: "])
    """Text in front of each source, for example `summarize: `."""
    max_target_length: PositiveInt = 128
    """Maximum length of targets and of generated texts, in tokens. Longer targets are cut. Sources are cut to
    max_length.
    """

    def unread(self) -> Mapping[str, str]:
        names = () if self.target_suffix is None else ("id_column", "group_column", "translation_column")
        return dict.fromkeys(names, "data.target_suffix reads lines of text, which have no columns")

    @property
    def input_columns(self) -> tuple[str, ...]:
        return (self.source_column,)

    @property
    def reads_any_suffix(self) -> bool:
        return self.target_suffix is not None


SPEC = TaskSpec(
    where="accel_train.tasks.seq2seq.task:Seq2Seq",
    data=Seq2SeqData,
    uses=TEXT | {"loss.label_smoothing", "evaluate.sample_prompt", "evaluate.generation"},
    targets="tokens",
    gives="text",
    learns="write a text from another text",
    takes="two columns of text: translations, summaries, any rewriting",
    finetune=True,
    auto="AutoModelForSeq2SeqLM",
    pipeline="text-generation",
    metrics=("chrf", "bleu", "exact_match", "rougeL", "rouge1", "rouge2", "perplexity", "token_accuracy"),
    extra="seq2seq",
    extra_is_for="evaluate.generation.max_samples",
    packages=("sacrebleu", "rouge_score"),
)
