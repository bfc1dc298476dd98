"""The settings of `data` for token classification."""

from typing import ClassVar

from accel_train.core.metric_names import OF_CLASSES
from accel_train.recipe.data import NamedClassesData, TextData
from accel_train.recipe.tasks import TEXT, TaskSpec


class TokenClassificationData(TextData, NamedClassesData):
    """Settings of `data` for token classification."""

    label_setting: ClassVar[str | None] = "tags_column"
    tokens_column: str = "tokens"
    """Column with the words of a sentence, as a list. In csv it is a JSON list, or words
    separated by blanks.
    """
    tags_column: str | None = "tags"
    """Column with one tag per word, as a list of names or ids. null: sentences to predict."""


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
