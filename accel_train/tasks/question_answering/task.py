"""Extractive question answering: find the answer in a context, or that it has no answer (SQuAD 1.1 and 2.0)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from accel_train.core.format import format_count
from accel_train.core.model_card import FOLDER, Use
from accel_train.data.text.kept import Values
from accel_train.data.text.padding import joined_arrays, samples_digest
from accel_train.data.text.rows_cache import contents_of
from accel_train.metrics.texts import answer_scores
from accel_train.model.kernels.loss_by_source import count_losses
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Columns, Facts, Scores, TaskData, Tensors, Totals
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.encoder import EncoderTask
from accel_train.tasks.common.texts import Divided
from accel_train.tasks.question_answering import data as questions
from accel_train.tasks.question_answering.answers import Best, best_spans, overlap_answers, position_loss_sum, ranked
from accel_train.tasks.question_answering.config import SPEC, QuestionAnsweringData
from accel_train.tasks.rows import Kept, TextSource

NUM_BEST = 20
"""Number of likeliest answers that are kept per question."""
_SHOWN_MISTAKES = 20
_EXAMPLE = f"""
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{FOLDER}")
model = AutoModelForQuestionAnswering.from_pretrained("{FOLDER}")
question, context = "a question", "a text"
tokens = tokenizer(question, context, truncation="only_second", return_offsets_mapping=True, return_tensors="pt")
letters = tokens.pop("offset_mapping")[0]
found = model(**tokens)
answer = range(tokens.sequence_ids().index(1), len(letters) - 1)  # the context's tokens
first = max(answer, key=lambda place: found.start_logits[0, place])
last = max(answer[answer.index(first) :], key=lambda place: found.end_logits[0, place])
print(context[letters[first, 0] : letters[last, 1]])
"""
_PLACES = ("start_positions", "end_positions", "attention_mask")
# Field in the configuration of a model that has learned to return no answer.
_MAY_BE_UNANSWERED = "may_be_unanswered"


Source = TextSource[Divided[questions.Question]]


class QuestionAnswering(EncoderTask):
    """Fine-tune any extractive reader of transformers, or train one from a configuration.

    A training sample is one window of a question's context. An evaluation sample is a whole question with all its
    windows.
    """

    spec = SPEC
    counts_sources = True
    head = models.ANSWERS

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenize all questions into memory.

        Raises:
            ValueError: the model, tokenizer, or questions do not match the recipe. The message names the file and row.
        """
        section = QuestionAnsweringData.of(recipe.data)
        models.check_model(recipe, self.head)
        keep = Kept(recipe, progress)
        asked = keep.rows(partial(questions.load_questions, recipe), questions.Question)
        pairs = (text for row in asked.train for text in (row.question, row.context))
        reader = self.reader(recipe, keep.words(pairs), is_pair=True)
        tokenizer, config, max_length = reader.tokenizer, reader.config, reader.max_length
        models.check_offsets(recipe, tokenizer)
        doc_stride = _stride(section.doc_stride, max_length)
        encode = partial(
            questions.tokenize_questions,
            tokenizer=tokenizer,
            max_length=max_length,
            doc_stride=doc_stride,
            progress=progress,
        )

        def build() -> Values:
            (by_question, num_cut), (evaluation, _) = encode(asked.train), encode(asked.eval or [])
            train = questions.without_offsets(by_question)
            return {
                "train": train,
                "eval": [*chain(*evaluation)],
                "num_windows": np.array([*map(len, by_question)]),
                "num_eval_windows": [*map(len, evaluation)],
                "num_cut": num_cut,
                "lengths": np.array([len(window.ids) for window in train]),
                "fingerprint": _fingerprint(train, evaluation),
                "unanswered": sum(not row.answers for row in asked.train) if section.is_labelled else 0,
            }

        kept = keep.keep([contents_of(tokenizer), max_length, doc_stride], build, questions.Window)
        # Encoding sets the truncation that is saved with the tokenizer.
        encode(asked.train[:1])
        windows, num_windows, unanswered = iter(kept["eval"]), kept["num_windows"], kept["unanswered"]
        evaluation = [tuple(islice(windows, count)) for count in kept["num_eval_windows"]]
        self.may_be_unanswered = bool(unanswered) or getattr(config, _MAY_BE_UNANSWERED, False)
        setattr(config, _MAY_BE_UNANSWERED, self.may_be_unanswered)
        self.threshold = recipe.evaluate.null_score_diff_threshold if self.may_be_unanswered else None
        self.label_smoothing, self.max_answer_length = recipe.loss.label_smoothing, section.max_answer_length
        self.is_labelled = section.is_labelled
        called = section.of_training("questions")
        found = self.task_data(
            recipe,
            reader,
            asked,
            train=kept["train"],
            evaluation=evaluation or None,
            lengths=kept["lengths"],
            collate=partial(
                questions.collate_windows, with_types=models.with_token_types(tokenizer, config, self.head)
            ),
            fingerprint=kept["fingerprint"],
            source=Source(asked, tokenizer, config),
            facts=Facts(
                others={
                    "num_train_questions": len(asked.train),
                    "num_unanswered": unanswered,
                    "doc_stride": doc_stride,
                },
                notes=self._notes(num_windows, kept["num_cut"], called, max_length, doc_stride),
            ),
        )
        if not self.may_be_unanswered:
            found.unread["evaluate.null_score_diff_threshold"] = "every training question has an answer"
        numbers = np.repeat(np.arange(len(asked.train)), num_windows)
        return replace(found, where=lambda index: asked.train[numbers[index]].where)

    def _notes(
        self, num_windows: NDArray[np.int64], num_cut: int, called: str, max_length: int, doc_stride: int
    ) -> list[str]:
        """Return notes about windows and about unanswered questions."""
        notes = [
            f"{called}: {len(num_windows):,}, in "
            f"{format_count(int(num_windows.sum()), 'window')} of at most {max_length} tokens; longer contexts: "
            f"{(num_windows > 1).sum():,}; neighbouring windows share {doc_stride} tokens"
        ]
        if num_cut:
            notes.append(f"{called} longer than half a window, and cut there: {num_cut:,}")
        if self.threshold is not None:
            notes.append(
                "some questions have no answer: the answer is empty where no answer scores higher than the best one "
                f"by more than evaluate.null_score_diff_threshold={self.threshold:g}; "
                "best_f1_threshold says which would have been best"
            )
        return notes

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean fp32 cross-entropy of an answer's first and last token, summed over windows.

        Padding is excluded from the softmax, unlike in the models' own loss, so the rest of the batch has no effect.
        """
        smoothing = self.label_smoothing if model.training else 0.0
        tensors = (*self._logits(model, batch), *map(batch.__getitem__, _PLACES))
        loss_sum = partial(_loss_sum, smoothing=smoothing)
        count_losses(model, self.counted, loss_sum, *tensors)
        return loss_sum(*tensors)

    def _logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the fp32 logits (W, T) of the first token and of the last token."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        output = model(**{name: batch[name] for name in names if name in batch})
        return output.start_logits.float(), output.end_logits.float()

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss without smoothing, and the likeliest answers per question: positions and scores."""
        logits = self._logits(model, batch)
        found = {f"rows_{name}": value for name, value in self._best(logits, batch).items()}
        return {"loss_sum": _loss_sum(*logits, *(batch[name] for name in _PLACES), smoothing=0.0), **found}

    def _best(self, logits: tuple[Tensor, Tensor], batch: Batch) -> Tensors:
        return best_spans(*logits, batch, num_best=NUM_BEST, max_answer_length=self.max_answer_length)

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return SQuAD's exact match and F1, with no-answer metrics if questions may be unanswered."""
        source: Source = data.source
        rows = {name.removeprefix("rows_"): value for name, value in totals.items() if name.startswith("rows_")}
        asked = [source.evaluated[index] for index in rows["index"]]
        best = [ranked(question, rows, row)[0] for row, question in enumerate(asked)]
        wanted = [question.answers for question in asked]
        metrics = answer_scores(
            [each.text for each in best], [each.null_score for each in best], wanted, self.threshold
        )
        mistakes = [
            {"question": question.question, "answer": given, "wanted": sorted(set(texts)), "id": question.id}
            for question, given, texts in zip(asked, map(self._given, best), wanted)
            if given not in (texts or [""])
        ]
        return Scores(metrics, {"mistakes": mistakes[:_SHOWN_MISTAKES]})

    def _given(self, best: Best) -> str:
        """Return the text of `best`, or an empty string if the no-answer score exceeds the threshold."""
        return "" if self.threshold is not None and best.null_score > self.threshold else best.text

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the likeliest answers of each question, and the score of no answer."""
        return self._best(self._logits(model, batch), batch)

    def prediction_columns(self, rows: Totals, data: TaskData) -> Columns:
        """Return the answer, its probability, the five likeliest answers, and the right answers if known."""
        source: Source = data.source
        asked = [source.evaluated[index] for index in rows["index"].tolist()]
        every = [ranked(question, rows, row) for row, question in enumerate(asked)]
        columns: Columns = {
            "question": [question.question for question in asked],
            "answer": [self._given(best[0]) for best in every],
            "score": [best[0].probability for best in every],
        }
        if self.threshold is not None:
            columns["null_score"] = [best[0].null_score for best in every]
        columns["best_answers"] = [[each.text for each in best[:5]] for best in every]
        if self.is_labelled:
            columns["true_answers"] = [sorted({*question.answers}) for question in asked]
        return columns

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of the context part with the most question words around it, and of an empty answer."""
        source: Source = data.source
        if source.rows.eval is None:
            return {}
        wanted = [question.answers for question in source.evaluated]
        answers = {"sliding_window": overlap_answers(source.rows.train, source.evaluated)}
        if self.threshold is not None:
            answers["no_answer"] = [""] * len(wanted)
        return {
            f"{name}_{metric}": answer_scores(given, [0.0] * len(given), wanted, None)[metric]
            for name, given in answers.items()
            for metric in ("exact_match", "f1")
        }

    def use(self, model: nn.Module, data: TaskData) -> Use:
        none = ", or its first token ([CLS]) for none" if self.may_be_unanswered else ""
        windows = "question and context together; longer contexts in several windows"
        return Use(
            _EXAMPLE,
            [
                f"Gives: the first and the last token of the answer in the context{none}",
                models.reads(data.facts.max_length, windows),
            ],
            "questions",
        )


def _stride(asked: int | None, max_length: int) -> int:
    """Return the tokens that neighboring windows share: `data.doc_stride`, or by default a quarter of a window."""
    most = max(1, max_length // 4)
    if asked is not None and asked > most:
        raise ValueError(
            f"data.doc_stride={asked} is more than a quarter of data.max_length={max_length}; next to a long "
            f"question, windows would not advance. Lower it to {most}, or raise data.max_length"
        )
    return most if asked is None else asked


def _fingerprint(train: list[questions.Window], evaluation: Sequence[tuple[questions.Window, ...]]) -> str:
    arrays: list[NDArray[Any]] = []
    for side in filter(None, (train, [*chain(*evaluation)])):
        arrays += joined_arrays([window.ids for window in side])
        arrays.append(np.array([(*window.context, *window.answer) for window in side]))
    return samples_digest(("question-answering",), [*arrays, np.array([*map(len, evaluation)])])


def _loss_sum(first: Tensor, last: Tensor, starts: Tensor, ends: Tensor, mask: Tensor, *, smoothing: float) -> Tensor:
    sums = (position_loss_sum(*each, mask, smoothing) for each in ((first, starts), (last, ends)))
    return sum(sums, first.new_zeros(())) / 2
