"""Token classification: read sentences with a tag per word from tables and CoNLL files, tokenize and batch them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.core.format import format_count
from accel_train.data.encoding import read_lines
from accel_train.data.labels import IGNORED_LABEL, LabelScheme, label_scheme
from accel_train.data.sources import Source, describe, file_kind
from accel_train.data.tables import class_names, read_rows, resolve_both, show_cell, text_cell
from accel_train.data.text.padding import joined_arrays, padded, padded_inputs
from accel_train.data.text.spans import SPAN_FORMS, Remarks, complete_tags, read_marked
from accel_train.data.text.tokenizers import parts_to_tokenize, plain_encoder
from accel_train.recipe.schema import Recipe
from accel_train.task import Collated
from accel_train.tasks.common.texts import Divided, hold_out, list_cell, repeated_texts
from accel_train.tasks.rows import file_by_file, given
from accel_train.tasks.token_classification.config import TokenClassificationData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTENCES_PER_CALL = 1000


class Sentence(NamedTuple):
    """One sentence and the tags of its words."""

    words: tuple[str, ...]
    tags: Any
    """Tag names or ids as read, empty without `data.tags_column`. In `TaggedSentences`: their ids (-100: unknown)."""
    where: str
    """File and line or row."""
    id: str
    """Name of the sentence in predictions: its id column, or `where`."""
    text: str | None = None
    """Text that the words are part of. None: the words joined by spaces."""
    text_places: tuple[tuple[int, int], ...] = ()
    """Start and end of each word in `text`."""

    @property
    def key(self) -> str:
        """Return the sentence as the model reads it."""
        return " ".join(self.words) if self.text is None else self.text

    @property
    def places(self) -> NDArray[np.int64]:
        """Return start and end (W, 2) of each word in `key`, in characters."""
        if self.text is not None:
            return np.array(self.text_places, dtype=np.int64).reshape(-1, 2)
        sizes = np.array([len(word) for word in self.words], dtype=np.int64)
        ends = np.cumsum(sizes + 1) - 1
        return np.stack([ends - sizes, ends], axis=1)


@dataclass(frozen=True)
class TaggedSentences(Divided[Sentence]):
    """Sentences in memory, with the ids of their tags."""

    scheme: LabelScheme
    num_train_of_label: dict[str, int]
    """Number of training words per tag."""
    most_words: int
    """Number of words in the longest evaluation sentence."""


def load_sentences(recipe: Recipe, known_names: tuple[str, ...] | None) -> TaggedSentences:
    """Return the sentences of `data.train` and `data.eval`. Without `data.eval`, a part of `data.train` is held out.

    `known_names` is passed to `label_scheme`.

    Raises:
        ValueError: a sentence cannot be read, or a tag is missing or unknown; the message names file, row and word.
    """
    data = TokenClassificationData.of(recipe.data)
    sources, eval_sources, notes = resolve_both(data)
    rows = read_sentences(sources, data, key=data.train_key, notes=notes)
    scheme = tag_scheme(rows, sources, data, known_names)
    train, evaluation, split_notes = hold_out(rows, data, sources, eval_sources)
    notes += [*scheme.notes, *split_notes]
    if eval_sources:
        evaluation = read_sentences(eval_sources, data, key="data.eval", notes=notes)
        notes += repeated_texts(train, evaluation, data) if data.is_labelled else []
    tags = [encode_tags(scheme, side) for side in (train, evaluation or [])]
    return TaggedSentences(
        [row._replace(tags=ids) for row, ids in zip(train, tags[0])],
        evaluation and [row._replace(tags=ids) for row, ids in zip(evaluation, tags[1])],
        describe(sources, eval_sources),
        notes,
        scheme,
        scheme.counts(np.concatenate(tags[0])),
        max((len(row.words) for row in evaluation or []), default=1),
    )


def tag_scheme(
    rows: Sequence[Sentence],
    sources: Sequence[Source],
    data: TokenClassificationData,
    known_names: tuple[str, ...] | None = None,
) -> LabelScheme:
    """Return the tags of training sentences. `known_names` is passed to `label_scheme`.

    Raises:
        ValueError: a tag is missing or unknown; the message names file, row and word.
    """
    tags = [tag for row in rows for tag in row.tags]
    if data.tag_format in SPAN_FORMS:
        tags += sorted(complete_tags({*tags}) - {*tags}) if tags else []
    return label_scheme(
        tags,
        lambda index: _place_of_word(rows, index),
        column=data.tags_column,
        problem_type="single_label",
        label_names=data.label_names,
        feature_names=class_names(sources[0], data.tags_column),
        known_names=known_names,
    )


def read_sentences(
    sources: Sequence[Source], data: TokenClassificationData, *, key: str, notes: list[str]
) -> list[Sentence]:
    """Return all sentences of sources, in memory. Sentences without words are left out. Adds to `notes`.

    Raises:
        ValueError: no sentences exist, or a sentence cannot be read; the message names file, row or line, and column.
    """
    sentences: list[Sentence] = []
    remarks = Remarks()
    for part in file_by_file(sources):
        form = data.tag_format
        if form == "auto" and part.files and file_kind(part.files[0]) in ("conll", "text"):
            form = "conll"
        if form == "conll" and part.files:
            found = _conll_sentences(part.files[0], data)
        elif form in SPAN_FORMS:
            found = _marked_sentences(part, data, remarks)
        elif data.sentence_column is not None:
            found = _sentences_of_word_rows(part, data, data.sentence_column)
        else:
            found = _table_sentences(part, data)
        sentences += (sentence for sentence in found if sentence.words)
    notes += remarks.notes
    if not sentences:
        raise ValueError(f"{key} holds no sentences: {describe(sources)}; name a file that has some")
    return sentences


def _table_sentences(source: Source, data: TokenClassificationData) -> Iterator[Sentence]:
    for row in read_rows(source, given(data.tokens_column, data.tags_column, data.id_column), data):
        cells = list_cell(row.cells[0], data.tokens_column, row.where)
        words = tuple(text_cell(cell, data.tokens_column, row.where, data) for cell in cells)
        tags: tuple[Any, ...] = ()
        if data.tags_column is not None:
            tags = tuple(list_cell(row.cells[1], data.tags_column, row.where))
            if len(tags) != len(words):
                raise ValueError(
                    f"{row.where}: column {data.tags_column!r} has {format_count(len(tags), 'tag')} for the "
                    f"{len(words)} words of column {data.tokens_column!r}; give one for each, or drop the row"
                )
        yield Sentence(words, tags, row.where, row.where if data.id_column is None else str(row.cells[-1]))


def _marked_sentences(source: Source, data: TokenClassificationData, remarks: Remarks) -> Iterator[Sentence]:
    """Yield texts with spans. Their words are the parts of the text, which stays as it is."""
    text_column, spans_column = data.tokens_column, data.tags_column
    for text, places, tags, where, name in read_marked(
        source, data, data.tag_format, text_column=text_column, spans_column=spans_column, remarks=remarks
    ):
        yield Sentence(tuple(text[start:end] for start, end in places), tags, where, name, text, places)


def _sentences_of_word_rows(source: Source, data: TokenClassificationData, numbers: str) -> Iterator[Sentence]:
    """Yield the sentences of a table with one word in each row. Another number begins another sentence."""
    sentence, number = Sentence((), (), "", ""), None
    for row in read_rows(source, given(numbers, data.tokens_column, data.tags_column), data):
        if row.cells[0] not in (None, "", number):
            yield sentence
            sentence, number = Sentence((), (), row.where, row.where), row.cells[0]
        if number is None:
            raise ValueError(f"{row.where}: column {numbers!r} is empty in the first row; number the first sentence")
        word = text_cell(row.cells[1], data.tokens_column, row.where, data)
        sentence = sentence._replace(words=(*sentence.words, word), tags=(*sentence.tags, *row.cells[2:]))
    yield sentence


def _conll_sentences(path: Path, data: TokenClassificationData) -> Iterator[Sentence]:
    """Yield the sentences of a file with one word per line, its tag in the last column, and blank lines in between.

    Lines that begin with # at the start of a sentence, and do not have the columns of its last word, are comments.
    """
    column_of_words, column_of_tags = _position(data.tokens_column, 0), _position(data.tags_column, -1)
    # Line of the first word, and its number of columns.
    first: tuple[int, int] | None = None
    block: list[tuple[int, list[str]]] = []
    for number, (line, _) in enumerate(chain(read_lines(path, data), [("", 0)]), start=1):
        fields = line.rstrip("\r\n").split("\t") if "\t" in line else re.split(" +", line.strip(" \r\n"))
        if line.strip() and fields[0] != "-DOCSTART-":
            block.append((number, fields))
            continue
        while len(block) > 1 and block[0][1][0].startswith("#") and len(block[0][1]) != len(block[-1][1]):
            del block[0]
        for place, each in block:
            if data.tags_column is not None and len(each) < 2:
                raise ValueError(
                    f"{path}:{place}: {show_cell(' '.join(each))} has no tag; write a word, a tab (or a blank) and its "
                    "tag on each line, and a blank line between sentences"
                )
            first = first or (place, len(each))
            if len(each) != first[1] or column_of_words >= len(each) or column_of_tags >= len(each):
                raise ValueError(
                    f"{path}:{place}: {show_cell(' '.join(each))} has {format_count(len(each), 'column')}, and line "
                    f"{first[0]} has {first[1]}; write as many for each word, and no comments"
                )
        words = tuple(each[column_of_words] for _, each in block)
        where = f"{path}:{block[0][0] if block else number}"
        if len(words) > 2 and words == tuple(str(place) for place in range(1, len(words) + 1)):
            raise ValueError(
                f"{where}: the first column numbers the words (CoNLL-U). Choose the columns of words and tags: "
                "data.tokens_column: '2', data.tags_column: '4'"
            )
        tags = () if data.tags_column is None else tuple(each[column_of_tags] for _, each in block)
        yield Sentence(words, tags, where, where)
        block = []


def _position(column: str | None, default: int) -> int:
    """Return the position of a column of a CoNLL file from its number, which counts from 1."""
    return int(column) - 1 if column is not None and column.isdigit() and int(column) else default


def encode_tags(scheme: LabelScheme, rows: Sequence[Sentence]) -> list[NDArray[np.int64]]:
    """Return the ids of each sentence's tags, or -100 if the scheme has no column.

    Raises:
        ValueError: a tag is unknown to the scheme; the message names file, row and word.
    """
    flat = [tag for row in rows for tag in (row.tags if scheme.column else row.words)]
    encoded = scheme.encode(flat, lambda index: _place_of_word(rows, index))
    return np.split(encoded, np.cumsum([len(row.words) for row in rows])[:-1]) if rows else []


def _place_of_word(rows: Sequence[Sentence], index: int) -> str:
    """Return file, row and word number of a word, by its index over all sentences."""
    for row in rows:
        if index < len(row.words):
            return f"{row.where}, word {index + 1}"
        index -= len(row.words)
    raise AssertionError("the sentence has fewer words")


class Sample(NamedTuple):
    """One sentence as token ids, with the labels of its words."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    """Position of the first token of each word. Truncated words and words without tokens are left out."""
    words: NDArray[np.int32]
    """Index of each of these words in the sentence."""
    labels: NDArray[np.int64]
    """Label of each of these words. -100: unknown."""


def tokenize_sentences(
    rows: Sequence[Sentence],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    *,
    progress: bool,
) -> list[Sample]:
    """Return sentences as token ids with the tokenizer's special tokens. Longer sentences are truncated.

    A sentence is encoded as its text, or as its words joined by spaces, so that a pipeline on plain text gives the same
    tokens. A token belongs to the word in which it ends. Special tokens in a word are encoded as plain characters.
    """
    samples: list[Sample] = []
    encode = plain_encoder(tokenizer, max_length=max_length, return_offsets_mapping=True)
    for _, part in parts_to_tokenize(rows, _SENTENCES_PER_CALL, "sentences", progress=progress):
        encoded = encode([row.key for row in part])
        for row, ids, offsets in zip(part, encoded["input_ids"], encoded["offset_mapping"]):
            words, starts = first_tokens(row.places, np.array(offsets, dtype=np.int64).reshape(-1, 2))
            samples.append(Sample(np.array(ids, dtype=np.int32), starts, words, row.tags[words]))
    return samples


def first_tokens(places: NDArray[np.int64], offsets: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the indices of the words that have tokens, and the position of the first token of each.

    `places` (W, 2) and `offsets` (T, 2) are the character spans of words and tokens in the text. Start and end are
    equal for a token without characters.
    """
    last = offsets[:, 1] - 1
    word_of = np.searchsorted(places[:, 1], last, side="right")
    begin = np.append(places[:, 0], np.iinfo(np.int64).max)[word_of]
    tokens = np.flatnonzero((offsets[:, 1] > offsets[:, 0]) & (begin <= last))
    found, first = np.unique(word_of[tokens], return_index=True)
    return found.astype(np.int32), tokens[first].astype(np.int32)


def collate_sentences(samples: Sequence[Sample], **padding: int) -> Collated:
    """Return a batch of `padded_inputs`, and `word_starts` and `labels` (N, W), all int64.

    `word_starts` are the positions of the words' first tokens, padded with 0. `labels` are padded with -100.
    `num_targets` is the number of words with a label.
    """
    ids, starts, _, every = zip(*samples)
    width = max(1, *map(len, starts))
    labels = padded(every, width, IGNORED_LABEL)
    return {
        **padded_inputs(ids, **padding),
        "word_starts": padded(starts, width, 0),
        "labels": labels,
        "num_targets": int((labels != IGNORED_LABEL).sum()),
    }


def arrays_of(samples: Sequence[Sample]) -> list[NDArray[Any]]:
    """Return samples as arrays, for a digest."""
    ids, starts, _, labels = zip(*samples)
    return [array for column in (ids, starts, labels) for array in joined_arrays(column)]
