"""Labeled texts: read table rows with one text or a pair, tokenize and batch them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from accel_train.core.terminal import is_main
from accel_train.data.labels import IGNORED_LABEL, LabelScheme, columns_scheme, is_missing, label_scheme, labels_in
from accel_train.data.sources import Source, describe
from accel_train.data.tables import class_names, read_rows, resolve_both
from accel_train.data.text.padding import joined_arrays
from accel_train.data.text.shards import Cut
from accel_train.data.text.tokenizers import parts_to_tokenize, plain_encoder
from accel_train.recipe.schema import Recipe
from accel_train.task import Collated
from accel_train.tasks.common.texts import Divided, TextRow, hold_out, repeated_texts, text_rows
from accel_train.tasks.rows import given, padded_pairs, second_from
from accel_train.tasks.text_classification.config import TextClassificationData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS_PER_CALL = 1000
_MOST_LABELS = 100_000


@dataclass(frozen=True)
class LabelledTexts(Divided[TextRow]):
    """Texts in memory, with labels encoded by `LabelScheme.encode`."""

    scheme: LabelScheme
    train_labels: NDArray[Any]
    eval_labels: NDArray[Any]

    @property
    def num_train_of_label(self) -> dict[str, int]:
        """Return the number of training texts per class. Empty for regression."""
        return {} if self.scheme.problem_type == "regression" else self.scheme.counts(self.train_labels)


def without_labels(texts: LabelledTexts) -> LabelledTexts:
    """Return texts whose rows have the label None. The arrays have the labels."""
    train, evaluation = ([row._replace(label=None) for row in side or ()] for side in (texts.train, texts.eval))
    return replace(texts, train=train, eval=evaluation or None)


def load_labelled_texts(recipe: Recipe, known_names: tuple[str, ...] | None, whole: Cut | None = None) -> LabelledTexts:
    """Return the labeled texts of `data.train` and `data.eval`.

    Without `data.eval`, a part of `data.train` is held out. `known_names` is passed to `label_scheme`. Of training data
    in shards (`whole`), the first rows are returned, and all labels are read unless the classes have names.

    Raises:
        ValueError: a row cannot be read, or its label is missing or unknown; the message names file, row and column.
    """
    data = TextClassificationData.of(recipe.data)
    problem_type = recipe.model.problem_type
    sources, eval_sources, notes = resolve_both(data)
    first, key = (whole.sample(), f"first rows of {data.train_key}") if whole else (sources, data.train_key)
    rows, dropped = _with_labels(read_text_rows(first, data, key=data.train_key), data, key)
    notes += dropped
    cells, names = [(row.label, row.where) for row in rows], class_names(sources[0], data.label_column)
    is_known = (data.label_names or data.label_columns or names) is not None or problem_type == "regression"
    if whole and not is_known:
        cells = every_label(whole.readable(range(len(whole))), data)
        notes.append("all labels were read before step 1, to find the classes. data.label_names makes that unnecessary")
    labels = [label for label, _ in cells]

    def where(index: int) -> str:
        return cells[index][1]

    if data.label_columns is not None:
        scheme = columns_scheme(labels, where, data.label_columns, data.label_names)
    else:
        scheme = label_scheme(
            labels,
            where,
            column=data.label_column,
            problem_type=problem_type,
            label_names=data.label_names,
            feature_names=names,
            known_names=known_names,
            first_id=data.label_ids_from,
            may_drop=whole is None,
        )
    labels_of, classes = partial(encode_labels, scheme), None
    if data.stratify and not eval_sources and scheme.problem_type == "single_label":
        classes = labels_of(rows).tolist()
    train, evaluation, split_notes = hold_out(rows, data, sources, eval_sources, classes)
    notes += [*scheme.notes, *split_notes]
    if eval_sources:
        evaluation, dropped = _with_labels(read_text_rows(eval_sources, data, key="data.eval"), data, "data.eval")
        notes += dropped
        notes += repeated_texts(train, evaluation, data) if data.is_labelled else []
    notes += shared_sides(train, evaluation or [], data.text_columns)

    texts = LabelledTexts(
        scheme=scheme,
        train=train,
        train_labels=labels_of(train),
        eval=evaluation,
        eval_labels=labels_of(evaluation or []),
        description=describe(sources, eval_sources),
        notes=notes,
    )
    empty = [row.where for row in train if not any(map(str.strip, row.texts))]
    if empty and data.is_for_training:
        notes.append(
            f"{len(empty):,} of {len(train):,} training texts are empty ({empty[0]} is the first), and trained on as "
            "they are"
        )
    missing = [name for name, count in texts.num_train_of_label.items() if count == 0]
    if missing and data.is_labelled and data.is_for_training and whole is None:
        notes.append(f"no training text has the label {', '.join(missing)}: it cannot be learned")
    return texts


def every_label(sources: Sequence[Source], data: TextClassificationData) -> list[tuple[Any, str]]:
    """Return the different labels of all rows, each with the place of its first one. Reads their column alone.

    Raises:
        ValueError: a row cannot be read, or too many labels differ to be classes.
    """
    found: dict[str, tuple[Any, str]] = {}
    rows = (row for source in sources for row in read_rows(source, given(data.label_column), data))
    for row in tqdm(rows, "reading labels", unit=" rows", delay=1, disable=not is_main(), leave=False):
        cell = row.cells[0]
        if is_missing(cell, data.words_for_missing) and data.missing_labels != "error":
            continue
        for label in [[label] for label in labels_in(cell) or ()] or [cell]:
            found.setdefault(repr(label), (label, row.where))
        if len(found) > _MOST_LABELS:
            raise ValueError(
                f"data.label_column has more than {_MOST_LABELS:,} different labels. To predict numbers, set "
                "model.problem_type: regression; otherwise, name the classes in data.label_names"
            )
    return [*found.values()]


def encode_labels(scheme: LabelScheme, rows: Sequence[TextRow]) -> NDArray[Any]:
    """Return the labels of rows, encoded."""
    return scheme.encode([row.label for row in rows], lambda index: rows[index].where)


def read_text_rows(sources: Sequence[Source], data: TextClassificationData, *, key: str) -> list[TextRow]:
    """Return all rows of sources with the texts of `data.text_columns`, in memory.

    Raises:
        ValueError: the number of columns is not one or two, or `text_rows` fails.
    """
    num_texts = len(data.text_columns)
    if num_texts not in (1, 2):
        raise ValueError(
            f"data.text_columns={list(data.text_columns)} has {num_texts} columns; give one text, or two as a pair"
        )
    return text_rows(sources, data, data.text_columns, data.label_columns or data.label_column, key=key)


def shared_sides(train: Sequence[TextRow], evaluation: Sequence[TextRow], columns: Sequence[str]) -> list[str]:
    """Return a note for each pair column in which evaluation pairs share a text with a different training pair."""
    notes = []
    trained_pairs = {row.texts for row in train}
    others = [row.texts for row in evaluation if row.texts not in trained_pairs]
    for side, column in enumerate(columns if len(columns) == 2 else ()):
        trained = {row.texts[side] for row in train}
        count = sum(texts[side] in trained for texts in others)
        if count:
            notes.append(
                f"{count:,} of {len(evaluation):,} evaluation pairs have a {column!r} that another pair in data.train "
                "has too, so their score says little about new ones"
            )
    return notes


def _with_labels(rows: list[TextRow], data: TextClassificationData, key: str) -> tuple[list[TextRow], list[str]]:
    """Return the rows that have a label, and a note on the others unless `data.missing_labels` is error."""
    if data.missing_labels == "error" or not data.is_labelled:
        return rows, []
    lacks = [_is_left_out(row, data) for row in rows]
    kept = [row for row, is_without in zip(rows, lacks) if not is_without]
    if not kept:
        setting, columns = "label_column", repr(data.label_column)
        if data.label_columns is not None:
            setting, columns = "label_columns", ", ".join(data.label_columns)
        raise ValueError(f"{key}: no row has a label in column {columns}; name another data.{setting}")
    missing = [row.where for row, is_without in zip(rows, lacks) if is_without]
    note = (
        f"{key}: {len(missing):,} of {len(rows):,} rows have no label and are left out ({', '.join(missing[:1])} is "
        "the first)"
    )
    return kept, [note] if missing else []


def _is_left_out(row: TextRow, data: TextClassificationData) -> bool:
    cells = row.label if data.label_columns else (row.label,)
    return data.missing_labels != "error" and any(is_missing(cell, data.words_for_missing) for cell in cells)


class Sample(NamedTuple):
    """One tokenized text or pair with its label."""

    ids: NDArray[np.int32]
    second_from: int
    """Position of the first token of a pair's second text. For a single text, the number of tokens."""
    label: Any
    """Class id, number, or row of zeros and ones."""


def collate_texts(samples: Sequence[Sample], *, with_types: bool, **padding: int) -> Collated:
    """Return a batch of `padded_pairs`, (N, T) int64, `labels` (N, ...), and `num_targets`.

    `num_targets` is the number of texts with a known class.
    """
    ids, begins, every = zip(*samples)
    labels = np.stack([*map(np.asarray, every)])
    num_targets = int((labels != IGNORED_LABEL).sum()) if labels.ndim == 1 else len(samples)
    batch = padded_pairs(ids, begins, with_types=with_types, **padding)
    return {**batch, "labels": torch.from_numpy(labels), "num_targets": num_targets}


def arrays_of(samples: Sequence[Sample]) -> list[NDArray[Any]]:
    """Return samples as arrays, for a digest."""
    ids, begins, labels = zip(*samples)
    return [*joined_arrays(ids), np.array(begins, dtype=np.int32), np.array(labels)]


def tokenize_rows(
    rows: Sequence[TextRow],
    labels: NDArray[Any],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    *,
    progress: bool,
) -> list[Sample]:
    """Return rows as token ids with the tokenizer's special tokens.

    Rows over `max_length` are truncated, in a pair the longer text first. Special tokens in a text are encoded as plain
    characters.

    Raises:
        ValueError: a text has no tokens.
    """
    samples: list[Sample] = []
    encode = plain_encoder(tokenizer, max_length=max_length, return_token_type_ids=True)
    for start, part in parts_to_tokenize(rows, _TEXTS_PER_CALL, "texts", progress=progress):
        # One list of texts, or two for pairs.
        encoded = encode(*map(list, zip(*(row.texts for row in part))))
        for row, (ids, types) in enumerate(zip(encoded["input_ids"], encoded["token_type_ids"]), start=start):
            if not ids:
                raise ValueError(
                    f"{rows[row].where}: the text is empty, and the tokenizer adds no tokens; drop the row"
                )
            samples.append(Sample(np.array(ids, dtype=np.int32), second_from(types), labels[row]))
    return samples


def encode_rows(
    rows: Sequence[TextRow],
    data: TextClassificationData,
    scheme: LabelScheme,
    tokenize: Callable[..., list[Sample]],
) -> list[Sample]:
    """Return the samples of rows by `tokenize`, without those that `data.missing_labels` leaves out."""
    kept = [row for row in rows if not _is_left_out(row, data)]
    return tokenize(kept, encode_labels(scheme, kept))
