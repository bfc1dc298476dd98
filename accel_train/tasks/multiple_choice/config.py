"""The settings of `data` for multiple choice."""

from typing import ClassVar

from accel_train.recipe.data import TextData
from accel_train.recipe.tasks import TEXT, TaskSpec


class MultipleChoiceData(TextData):
    """Settings of `data` for multiple choice."""

    label_setting: ClassVar[str | None] = "label_column"
    text_columns: tuple[str, ...] = ("text",)
    """One text column, or two columns that are read as a pair."""
    choices_columns: tuple[str, ...] = ("endings",)
    """One column with a list of endings, or one column per ending. With two text_columns, the second
    begins each ending.
    """
    label_column: str | None = "label"
    """Column with the label: a name, an integer, a number (regression), or a list of names (multi_label). null: rows to
    predict, without labels.
    """

    @property
    def input_columns(self) -> tuple[str, ...]:
        return self.text_columns[:1]


SPEC = TaskSpec(
    where="accel_train.tasks.multiple_choice.task:MultipleChoice",
    data=MultipleChoiceData,
    uses=TEXT | {"loss.label_smoothing"},
    targets="samples",
    gives="choice",
    learns="choose the right ending of a text",
    takes="a text with several endings (SWAG, RACE)",
    auto="AutoModelForMultipleChoice",
    pipeline="multiple-choice",
    metrics=("accuracy",),
)
