"""The settings of `data` for extractive question answering."""

from typing import ClassVar

from accel_train.recipe.data import TextData
from accel_train.recipe.tasks import TEXT, TaskSpec
from accel_train.recipe.values import PositiveInt


class QuestionAnsweringData(TextData):
    """Settings of `data` for extractive question answering."""

    label_setting: ClassVar[str | None] = "answers_column"
    question_column: str = "question"
    """Column with the question."""
    context_column: str = "context"
    """Column with the text that answers the question."""
    answers_column: str | None = "answers"
    """Column with {text: [...], answer_start: [...]}, with empty lists for unanswerable questions.
    null: questions to predict.
    """
    doc_stride: PositiveInt | None = None
    """Overlap between neighboring windows of a long context, in tokens. Default: a quarter of
    max_length.
    """
    max_answer_length: PositiveInt = 30
    """Maximum length of an answer, in tokens."""


SPEC = TaskSpec(
    where="accel_train.tasks.question_answering.task:QuestionAnswering",
    data=QuestionAnsweringData,
    uses=TEXT | {"loss.label_smoothing", "evaluate.null_score_diff_threshold"},
    targets="samples",
    gives="answer",
    learns="find the answer to a question in a text",
    takes="questions, contexts, and answer positions: tables, SQuAD files; questions may have no answer",
    finetune=True,
    auto="AutoModelForQuestionAnswering",
    pipeline="question-answering",
    metrics=("f1", "exact_match", "has_answer_f1", "no_answer_accuracy", "best_f1", "best_f1_threshold"),
)
