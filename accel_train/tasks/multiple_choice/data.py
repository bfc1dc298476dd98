"""Texts with several endings, one of them right: read table rows, tokenize and batch them."""

from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train.core.format import is_whole
from accel_train.data.labels import IGNORED_LABEL, label_name
from accel_train.data.sources import Source, describe
from accel_train.data.tables import read_rows, show_cell, text_cell
from accel_train.data.text.padding import joined_arrays
from accel_train.data.text.tokenizers import parts_to_tokenize, plain_encoder
from accel_train.recipe.schema import Recipe
from accel_train.task import Collated
from accel_train.tasks.common.texts import Divided, list_cell, read_both
from accel_train.tasks.multiple_choice.config import MultipleChoiceData
from accel_train.tasks.rows import given, padded_pairs, second_from

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_PER_CALL = 250


class ChoiceRow(NamedTuple):
    """One text with its endings."""

    text: str
    endings: tuple[str, ...]
    label: int
    """Index of the right ending, from 0. -100 without `data.label_column`."""
    where: str
    """File and line or row."""
    id: str
    """Name of the row in predictions: its id column, or `where`."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the text as a row of one text."""
        return (self.text,)

    @property
    def key(self) -> str:
        """Return the text. Rows with equal texts are on the same side of a split."""
        return self.text


def load_choices(recipe: Recipe) -> Divided[ChoiceRow]:
    """Return the rows of `data.train` and `data.eval`, all with the same number of endings.

    Raises:
        ValueError: a row cannot be read, its label is not an ending, or its number of endings differs from the first
            row. The message names the row.
    """
    data = MultipleChoiceData.of(recipe.data)
    found = read_both(data, lambda sources, key, _: read_choices(sources, data, key=key), is_labelled=data.is_labelled)
    _check_counts([found.train[0], *(found.eval or ())])
    return found


def _check_counts(rows: Sequence[ChoiceRow]) -> None:
    count = len(rows[0].endings)
    other = next((row for row in rows if len(row.endings) != count), None)
    if other is not None:
        raise ValueError(
            f"{other.where}: {len(other.endings)} endings, and {rows[0].where} has {count}; all rows need as many, so "
            "fill it up or drop it"
        )


def read_choices(sources: Sequence[Source], data: MultipleChoiceData, *, key: str) -> list[ChoiceRow]:
    """Return all rows of sources, in memory.

    If `data.text_columns` has two columns, the second is the beginning of each ending. `data.choices_columns` is one
    column of lists, or one column per ending.

    Raises:
        ValueError: no rows exist, a column is missing, or a cell has the wrong type; the message names file, row and
            column.
    """
    names, choices = data.text_columns, data.choices_columns
    if len(names) not in (1, 2):
        raise ValueError(
            f"data.text_columns={list(names)} has {len(names)} columns; give one, or two (text, begin of endings)"
        )
    rows = []
    for source in sources:
        for cells, where, _ in read_rows(source, given(*names, *choices, data.label_column, data.id_column), data):
            unread = iter(cells)
            text, *begin = (text_cell(cell, name, where, data) for name, cell in zip(names, unread))
            columns, own = choices, [*islice(unread, len(choices))]
            if len(choices) == 1:
                own = [*list_cell(own[0], choices[0], where)]
                columns *= len(own)
            endings = tuple(" ".join([*begin, text_cell(cell, name, where, data)]) for cell, name in zip(own, columns))
            if len(endings) < 2:
                raise ValueError(
                    f"{where}: column {choices[0]!r} has {len(endings)} endings; at least two are a choice"
                )
            label = IGNORED_LABEL
            if data.label_column is not None:
                label = _place(next(unread), len(endings), f"{where}, column {data.label_column!r}")
            rows.append(ChoiceRow(text, endings, label, where, where if data.id_column is None else str(next(unread))))
    if not rows:
        raise ValueError(f"{key} holds no rows: {describe(sources)}; name a table with rows")
    _check_counts(rows)
    return rows


def _place(cell: Any, count: int, where: str) -> int:
    """Return the index of the right ending from a number (from 0) or a letter (from A)."""
    name = label_name(cell) or ""
    if len(name) == 1 and "A" <= name <= "Z":
        name = str(ord(name) - ord("A"))
    if not is_whole(name) or not 0 <= int(name) < count:
        last = chr(ord("A") + count - 1)
        raise ValueError(
            f"{where}: {show_cell(cell)} is the place of no ending; there are {count}, 0 to {count - 1} or A to {last}"
        )
    return int(name)


class Sample(NamedTuple):
    """One text, tokenized with each of its endings."""

    ids: tuple[NDArray[np.int32], ...]
    second_from: tuple[int, ...]
    """Position of the first token of each ending."""
    label: int


def tokenize_choices(
    rows: Sequence[ChoiceRow], tokenizer: "PreTrainedTokenizerBase", max_length: int, *, progress: bool
) -> list[Sample]:
    """Return rows as tokenized pairs of text and ending, with special tokens.

    Pairs over `max_length` are truncated, the longer part first.
    """
    samples: list[Sample] = []
    encode = plain_encoder(tokenizer, max_length=max_length, return_token_type_ids=True)
    for _, part in parts_to_tokenize(rows, _ROWS_PER_CALL, "rows", progress=progress):
        encoded = encode(
            [row.text for row in part for _ in row.endings], [ending for row in part for ending in row.endings]
        )
        pairs = zip(encoded["input_ids"], encoded["token_type_ids"])
        for row in part:
            ids, types = zip(*(next(pairs) for _ in row.endings))
            arrays = tuple(np.array(each, dtype=np.int32) for each in ids)
            samples.append(Sample(arrays, tuple(map(second_from, types)), row.label))
    return samples


def collate_choices(samples: Sequence[Sample], *, with_types: bool, **padding: int) -> Collated:
    """Return a batch of `padded_pairs`, (N, choices, T) int64, `labels` (N,), and `num_targets`.

    `num_targets` is the number of samples with a known label.
    """
    ids, begins, every = zip(*samples)
    batch = padded_pairs([*chain(*ids)], chain(*begins), with_types=with_types, **padding)
    labels = torch.tensor(every)
    shaped = {name: tensor.unflatten(0, (len(samples), -1)) for name, tensor in batch.items()}
    return {**shaped, "labels": labels, "num_targets": int((labels != IGNORED_LABEL).sum())}


def arrays_of(samples: Sequence[Sample]) -> list[NDArray[Any]]:
    """Return samples as arrays, for a digest."""
    ids, begins, labels = zip(*samples)
    return [*joined_arrays([*chain(*ids)]), np.array(begins, dtype=np.int32), np.array(labels)]
