"""The settings of `data` for text classification and regression."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from accel_train.core.errors import SettingError
from accel_train.core.metric_names import OF_CLASSES
from accel_train.recipe.data import BlockData, ClassData, TextData
from accel_train.recipe.tasks import TEXT, TaskSpec


class TextClassificationData(TextData, ClassData, BlockData):
    """Settings of `data` for text classification and regression."""

    text_columns: tuple[str, ...] = ("text",)
    """One text column, or two columns that are read as a pair. A column may be a template: `{title}. {body}`."""
    label_columns: tuple[str, ...] | None = Field(default=None, examples=[["toxic", "insult"]])
    """Columns of 0 and 1, one for each label of a multi-label problem. Their names are the class names, in this order.
    They replace label_column.
    """
    missing_labels: Literal["error", "drop"] | tuple[str, ...] = Field(default="error", examples=[["NA"]])
    """Handling of rows without a label. error: the run stops and names the row. drop: rows are
    left out, and the run log prints their number. A list of words: rows with one of them in place of a label are left
    out too.
    """

    @property
    def input_columns(self) -> tuple[str, ...]:
        return self.text_columns

    @model_validator(mode="before")
    @classmethod
    def label_columns_replace_label_column(cls, tree: Any) -> Any:
        has_columns = isinstance(tree, dict) and tree.get("label_columns") is not None
        return {"label_column": None, **tree} if has_columns else tree

    @model_validator(mode="after")
    def label_columns_are_classes(self) -> Self:
        columns, texts = self.label_columns, self.text_columns
        if columns is None:
            return self
        problem, remedy, other = "", "Leave one of them out.", ""
        if self.label_column is not None:
            problem, other = f"data.label_column={self.label_column} also names the label", "label_column"
        elif self.label_names is not None:
            problem, other = "the columns are the classes, and data.label_names names others", "label_names"
        elif self.label_ids_from:
            problem, other = (
                f"columns have no ids, and data.label_ids_from={self.label_ids_from} counts",
                "label_ids_from",
            )
        elif len(columns) < 2:
            problem, remedy = "several labels need at least two columns", "Name one column in data.label_column."
        elif twice := [name for number, name in enumerate(columns) if name in columns[:number]]:
            problem, remedy = f"{twice[0]!r} occurs twice", "Name each column once."
        elif read := [each for each in columns if each in texts or f"{{{each}}}" in "".join(texts)]:
            problem = f"data.text_columns also reads {read[0]!r}, and the model would see its label"
            remedy, other = "Leave it out of one.", "text_columns"
        if problem:
            settings = ("data.label_columns", *([f"data.{other}"] if other else []))
            raise SettingError(problem, remedy, at=f"data.label_columns=[{', '.join(columns)}]", settings=settings)
        return self

    @property
    def words_for_missing(self) -> tuple[str, ...]:
        """Return the words that stand for a missing label."""
        return () if isinstance(self.missing_labels, str) else self.missing_labels

    @property
    def is_labelled(self) -> bool:
        """Return whether the samples have labels."""
        return self.label_columns is not None or super().is_labelled

    def without_labels(self) -> Self:
        """Return this section for samples to predict."""
        return super().without_labels().model_copy(update={"label_columns": None})


SPEC = TaskSpec(
    where="accel_train.tasks.text_classification.task:TextClassification",
    data=TextClassificationData,
    uses=TEXT
    | {
        "model.problem_type",
        "loss.label_smoothing",
        "loss.class_weights",
        "evaluate.metrics",
        "evaluate.allow_hub_metrics",
        "evaluate.num_examples",
    },
    targets="samples",
    gives="class",
    learns="name the class of a text, or predict a number",
    takes="one or two columns of text, with a label, several labels, or a number",
    finetune=True,
    auto="AutoModelForSequenceClassification",
    pipeline="text-classification",
    metrics=(
        *OF_CLASSES,
        "auroc",
        "hamming_loss",
        "pearson",
        "spearman",
        "mae",
        "r2",
        "rmse",
        "mse",
        "uncalibrated_loss",
    ),
)
