"""The settings of `data` for token classification."""

from typing import ClassVar

from accel_train.recipe.data import NamedClassesData, TextData


class TokenClassificationData(TextData, NamedClassesData):
    """Settings of `data` for token classification."""

    label_setting: ClassVar[str | None] = "tags_column"
    tokens_column: str = "tokens"
    """Column with the words of a sentence, as a list. In csv it is a JSON list, or words
    separated by blanks.
    """
    tags_column: str | None = "tags"
    """Column with one tag per word, as a list of names or ids. null: sentences to predict."""
