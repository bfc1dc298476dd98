"""The settings of `data` for token classification."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from accel_train.core.metric_names import OF_CLASSES
from accel_train.recipe.data import NamedClassesData, TextData
from accel_train.recipe.tasks import TEXT, TaskSpec


class TokenClassificationData(TextData, NamedClassesData):
    """Settings of `data` for token classification."""

    label_setting: ClassVar[str | None] = "tags_column"
    tokens_column: str = "tokens"
    """Column with the words of a sentence, as a list. In csv it is a JSON list, or words
    separated by blanks. With spans, the column of the text. In CoNLL files, a number chooses the column of the words.
    """
    tags_column: str | None = "tags"
    """Column with one tag per word, as a list of names or ids, or with the spans of a text. In CoNLL files, a number
    chooses the column of the tags. null: sentences to predict.
    """
    tag_format: Literal["auto", "conll", "spans", "prodigy", "label_studio"] = "auto"
    """How words and tags are written. auto: CoNLL in .conll and text files, otherwise one list of words and one of
    tags. conll: CoNLL in files of any kind. spans: a text, and a list of [start, end, label] or {start, end, label} in
    characters (doccano, spaCy's JSON, Label Studio's JSON_MIN). prodigy: the same, with `answer`. label_studio: Label
    Studio's export JSON.
    """
    sentence_column: str | None = Field(default=None, examples=["Sentence #"])
    """Column that numbers sentences, in tables with one word and one tag in each row. Empty cells continue a sentence.
    """

    def unread(self) -> Mapping[str, str]:
        return {} if self.tag_format == "auto" else {"sentence_column": f"data.tag_format is {self.tag_format}"}


SPEC = TaskSpec(
    where="accel_train.tasks.token_classification.task:TokenClassification",
    data=TokenClassificationData,
    uses=TEXT | {"loss.label_smoothing", "loss.class_weights"},
    targets="words",
    gives="tags",
    learns="tag each word of a sentence",
    takes="words with one tag each: tables with lists, CoNLL files",
    finetune=True,
    auto="AutoModelForTokenClassification",
    pipeline="token-classification",
    metrics=("f1", "precision", "recall", *OF_CLASSES),
)
