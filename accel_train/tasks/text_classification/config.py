"""The settings of `data` for text classification and regression."""

from typing import Literal

from accel_train.recipe.data import ClassData, TextData


class TextClassificationData(TextData, ClassData):
    """Settings of `data` for text classification and regression."""

    text_columns: tuple[str, ...] = ("text",)
    """One text column, or two columns that are read as a pair."""
    missing_labels: Literal["error", "drop"] = "error"
    """Handling of rows without a label. error: the run stops and names the row. drop: rows are
    left out, and the run log prints their number.
    """
