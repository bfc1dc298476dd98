"""Question answering: read rows with a context and answers in it, tokenize them in windows and batch them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train.core.json_io import parse_json
from accel_train.data.encoding import BOM, decode
from accel_train.data.sources import Source, describe, file_kind
from accel_train.data.tables import read_rows, show_cell, text_cell
from accel_train.data.text.padding import padded
from accel_train.data.text.tokenizers import parts_to_tokenize, plain_encoder
from accel_train.recipe.schema import Recipe
from accel_train.task import Collated
from accel_train.tasks.common.texts import Divided, read_both
from accel_train.tasks.question_answering.config import QuestionAnsweringData
from accel_train.tasks.rows import file_by_file, given, padded_pairs, second_from

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTIONS_PER_CALL = 200


class Question(NamedTuple):
    """One question about a context."""

    question: str
    context: str
    answers: tuple[str, ...]
    """Accepted answers; training uses the first. Empty if the context has no answer, or if the answer is unknown."""
    starts: Sequence[int]
    """Position of the first character of each answer in the context."""
    where: str
    """File and line or row."""
    id: str
    """Name of the question in predictions."""

    @property
    def key(self) -> str:
        """Return the context. Questions about one context are on the same side of a split."""
        return self.context


def load_questions(recipe: Recipe) -> Divided[Question]:
    """Return the questions of `data.train` and `data.eval`. Without `data.eval`, a part is held out by context.

    Raises:
        ValueError: a question cannot be read, or its answer is not in its context; the message names file and row.
    """
    data = QuestionAnsweringData.of(recipe.data)
    return read_both(
        data,
        lambda sources, key, _: read_questions(sources, data, key=key),
        is_labelled=data.is_labelled,
    )


def read_questions(sources: Sequence[Source], data: QuestionAnsweringData, *, key: str) -> list[Question]:
    """Return all questions of sources, in memory.

    Raises:
        ValueError: no questions exist, or a question cannot be read; the message names file, row and column.
    """
    questions: list[Question] = []
    for part in file_by_file(sources):
        is_json = bool(part.files) and file_kind(part.files[0]) == "json"
        questions += _squad_questions(part.files[0], data) if is_json else _table_questions(part, data)
    if not questions:
        raise ValueError(f"{key} holds no questions: {describe(sources)}; name a file that has some")
    return questions


def _table_questions(source: Source, data: QuestionAnsweringData) -> Iterator[Question]:
    columns = [data.question_column, data.context_column]
    for row in read_rows(source, given(*columns, data.answers_column, data.id_column), data):
        question, context = (text_cell(cell, name, row.where, data) for cell, name in zip(row.cells, columns))
        answers = ((), ()) if data.answers_column is None else _answers(row.cells[2], context, row.where)
        name = row.where if data.id_column is None else str(row.cells[-1])
        yield Question(question.strip(), context, *answers, row.where, name)


def _squad_questions(path: Path, data: QuestionAnsweringData) -> Iterator[Question]:
    """Yield the questions of a file in SQuAD format: articles with paragraphs with `qas`."""
    try:
        articles = parse_json(decode(path.read_bytes().removeprefix(BOM), data, path))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        found = [(paragraph["context"], question) for paragraph in paragraphs for question in paragraph["qas"]]
        rows = [(context, each["question"], str(each["id"]), each.get("answers")) for context, each in found]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not in SQuAD's form ({type(error).__name__}: {error}); write data -> paragraphs -> context and "
            "qas, or a jsonl file with a question a line"
        ) from None
    for context, question, name, answers in rows:
        where = f"{path}, question {name}"
        context, question = (text_cell(cell, "", where, data) for cell in (context, question))
        known = ((), ()) if data.answers_column is None else _answers(answers, context, where)
        yield Question(question.strip(), context, *known, where, name)


def _answers(cell: Any, context: str, where: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the answers of a cell, and where they start.

    Accepts {text: [...], answer_start: [...]}, a list of {text, answer_start}, or either as JSON text (csv).
    """
    if cell is None:
        raise ValueError(
            f"{where}: the row has no answers; fill them in (an empty list: the context has none), or drop the row"
        )
    fault = (
        f"{where}: the answers {show_cell(cell)} are not {{text: [...], answer_start: [...]}} (empty lists: no answer)"
    )
    try:
        found = parse_json(cell) if isinstance(cell, str) else cell
        if isinstance(found, dict):
            found = [
                {"text": text, "answer_start": start}
                for text, start in zip(found["text"], found["answer_start"], strict=True)
            ]
        answers = tuple(each["text"] for each in found)
        starts = tuple(int(each["answer_start"]) for each in found)
        if not all(isinstance(answer, str) for answer in answers):
            raise TypeError
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ValueError(f"{fault}; repair or drop the row") from None
    for answer, start in zip(answers, starts):
        there = context[start : start + len(answer)]
        if not answer or start < 0 or there != answer:
            raise ValueError(
                f"{where}: the answer {show_cell(answer)} is not at character {start} of its context, "
                f"where {show_cell(there)} stands; correct answer_start, or drop the row"
            )
    return answers, starts


class Window(NamedTuple):
    """A question with a part of its context as token ids."""

    ids: NDArray[np.int32]
    second_from: int
    """Position of the first token after the question."""
    context: tuple[int, int]
    """Positions of the first context token and of the token after the last."""
    answer: tuple[int, int]
    """Positions of the first and last answer token. (0, 0) if the answer is not in this part."""
    offsets: NDArray[np.int32]
    """Character spans of the context tokens, (tokens x 2,): start and end in the context."""


def tokenize_questions(
    rows: Sequence[Question], tokenizer: "PreTrainedTokenizerBase", max_length: int, doc_stride: int, *, progress: bool
) -> tuple[list[tuple[Window, ...]], int]:
    """Return the windows of each question, and the number of questions truncated to half a window.

    A context that is too long for one window is split into several. Neighboring windows share `doc_stride` tokens.
    """
    found: list[tuple[Window, ...]] = []
    num_cut = 0
    encode = plain_encoder(
        tokenizer,
        truncation="only_second",
        max_length=max_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    for _, part in parts_to_tokenize(rows, _QUESTIONS_PER_CALL, "questions", progress=progress):
        questions = [_cut(row.question, tokenizer, max_length // 2) for row in part]
        num_cut += sum(question != row.question for question, row in zip(questions, part))
        encoded = encode(questions, [row.context for row in part])
        windows: list[list[Window]] = [[] for _ in part]
        for number, row in enumerate(encoded["overflow_to_sample_mapping"]):
            windows[row].append(_window(encoded, number, part[row]))
        found += map(tuple, windows)
    return found, num_cut


def _cut(question: str, tokenizer: "PreTrainedTokenizerBase", most_tokens: int) -> str:
    """Return a question, truncated if its tokens would leave no room for a context."""
    # A token almost always has at least one character, so short questions need no tokenizing.
    if len(question) <= most_tokens:
        return question
    settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    offsets = tokenizer(question, return_offsets_mapping=True, **settings)["offset_mapping"]
    most = most_tokens - tokenizer.num_special_tokens_to_add(pair=True)
    return question if len(offsets) <= most else question[: offsets[most - 1][1]]


def _window(encoded: Any, number: int, row: Question) -> Window:
    ids = np.array(encoded["input_ids"][number], dtype=np.int32)
    parts = np.array([-1 if part is None else part for part in encoded.sequence_ids(number)])
    places = np.flatnonzero(parts == 1)
    first, after = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    offsets = np.array(encoded["offset_mapping"][number], dtype=np.int32).reshape(-1, 2)[first:after]
    answer = (0, 0)
    if row.answers and len(offsets):
        start = row.starts[0]
        end = start + len(row.answers[0])
        inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0]))
        if len(inside) and offsets[0, 0] <= start and end <= offsets[-1, 1]:
            answer = (first + int(inside[0]), first + int(inside[-1]))
    return Window(ids, second_from(encoded["token_type_ids"][number]), (first, after), answer, offsets.ravel())


def without_offsets(questions: Sequence[tuple[Window, ...]]) -> list[Window]:
    """Return the windows of questions as a flat list for training, without character offsets."""
    nothing = np.zeros(0, dtype=np.int32)
    return [window._replace(offsets=nothing) for windows in questions for window in windows]


def collate_windows(
    samples: Sequence[Window] | Sequence[tuple[Window, ...]], *, with_types: bool, **padding: int
) -> Collated:
    """Return a batch of windows, padded on the right by `padded_pairs`.

    Samples are windows (training) or whole questions. The batch has:

    - `input_ids`, `attention_mask` and optionally `token_type_ids`, (W, T) int64
    - `start_positions`, `end_positions`, (W,): first and last answer token, or 0 if the window has no answer
    - `num_targets`: W

    For whole questions, also:

    - `context` (W, T): 1 for tokens of the context
    - `offsets` (W, T, 2): character spans of the context tokens
    - `windows` (N, most windows of a question): window numbers of each question, padded with -1
    """
    questions = [(sample,) if isinstance(sample, Window) else sample for sample in samples]
    every = [window for question in questions for window in question]
    ids, begins, _, answers, _ = zip(*every)
    batch = padded_pairs(ids, begins, with_types=with_types, **padding)
    batch |= dict(zip(("start_positions", "end_positions"), map(torch.tensor, zip(*answers))))
    if not isinstance(samples[0], Window):
        shape = batch["input_ids"].shape
        context, offsets = np.zeros(shape, np.int64), np.zeros((*shape, 2), np.int64)
        for row, window in enumerate(every):
            place = slice(*window.context)
            offsets[row, place] = window.offsets.reshape(-1, 2)
            context[row, place] = offsets[row, place, 1] > offsets[row, place, 0]
        numbers = np.split(np.arange(len(every)), np.cumsum([*map(len, questions)])[:-1])
        batch |= {"context": torch.from_numpy(context), "offsets": torch.from_numpy(offsets)}
        batch["windows"] = padded(numbers, max(map(len, numbers)), -1)
    return {**batch, "num_targets": len(every)}
