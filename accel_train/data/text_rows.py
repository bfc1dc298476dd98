"""Labelled texts: the rows of a table with one text or a pair, what is held out of them, and what should be known of them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accel_train.data.documents import Document
from accel_train.data.labels import LabelCell
from accel_train.data.lines import show_cell
from accel_train.data.sources import Source, describe
from accel_train.data.split import choose_split, text_hash
from accel_train.data.tables import read_rows
from accel_train.recipe_data import Data

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BETWEEN_TEXTS = "\x1e"  # a pair is hashed as one text; ASCII's record separator stands in no text that people write


@dataclass(frozen=True)
class TextRows:
    """Labelled texts in memory, in the order of their source."""

    texts: list[tuple[str, ...]]
    """One text a row, or two."""
    labels: list[LabelCell]
    """None in all of them without `data.label_column`."""
    ids: list[str]
    """What names a row in predictions and messages."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Iterable[int]) -> "TextRows":
        """Some of the rows."""
        chosen = list(indices)
        return TextRows(
            [self.texts[index] for index in chosen],
            [self.labels[index] for index in chosen],
            [self.ids[index] for index in chosen],
        )

    def joined(self) -> list[str]:
        """Each row's texts as one: what is hashed, and what a bag of words counts."""
        return [_BETWEEN_TEXTS.join(texts) for texts in self.texts]


def read_text_rows(sources: Sequence[Source], data: Data, *, leaf: str) -> TextRows:
    """The rows of sources, all of them in memory.

    Raises:
        ValueError: there are none, a column is missing, or a cell is no text; the text names file, row and column.
    """
    if len(data.text_columns) not in (1, 2):
        raise ValueError(
            f"data.text_columns={list(data.text_columns)} has {len(data.text_columns)} columns; give one text, or two as a pair"
        )
    further = [column for column in (data.label_column, data.id_column) if column is not None]
    columns, num_texts = (*data.text_columns, *further), len(data.text_columns)
    rows = TextRows([], [], [])
    for source in sources:
        for row in read_rows(source, columns, data):
            cells = zip(data.text_columns, row.cells[:num_texts])
            rows.texts.append(tuple(_text(cell, column, row.where, data) for column, cell in cells))
            rows.labels.append(LabelCell(None if data.label_column is None else row.cells[num_texts], row.where))
            rows.ids.append(row.where if data.id_column is None else str(row.cells[-1]))
    if not rows.texts:
        raise ValueError(f"{leaf} holds no rows: {describe(sources)}; name a table that has some")
    return rows


def hold_out(rows: TextRows, eval_fraction: float) -> tuple[TextRows, TextRows | None, list[str]]:
    """Training rows, evaluation rows (None where the fraction is 0), and notes; equal texts are on the same side.

    Raises:
        ValueError: one side would be empty.
    """
    if eval_fraction == 0:
        return rows, None, []
    documents = [Document(text, text.encode(), 0, "") for text in rows.joined()]
    split = choose_split(documents, eval_fraction)
    if split.cut_tail:
        raise ValueError(
            "data.train has one text only (repeated, perhaps), so none can be held out for evaluation; give more, or set "
            "data.eval, or data.eval_fraction: 0"
        )
    # An empty text has no hash of its own in `choose_split`; here it is a text like any other.
    held_out = [split.holds_out(text_hash(document)) for document in documents]
    train = rows.take(index for index, is_held_out in enumerate(held_out) if not is_held_out)
    evaluation = rows.take(index for index, is_held_out in enumerate(held_out) if is_held_out)
    return train, evaluation, [split.note.replace("documents", "texts")] if split.note else []


def repeated_texts(train: TextRows, evaluation: TextRows) -> list[str]:
    """A note where evaluation texts are trained on as well."""
    trained = set(train.texts)
    count = sum(texts in trained for texts in evaluation.texts)
    if not count:
        return []
    return [f"{count:,} of {len(evaluation):,} evaluation texts are in data.train too, so their score says little"]


def _text(cell: object, column: str, where: str, data: Data) -> str:
    if not isinstance(cell, str):
        fault = "is empty" if cell is None else f"is {show_cell(cell)}, not a string"
        raise ValueError(
            f"{where}, column {column!r}: the text {fault}; repair or drop the row, or set data.text_columns"
        )
    try:
        cell.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a UTF-16 pair: "\ud800"
        if data.encoding_errors == "replace":
            return _LONE_SURROGATE.sub("\ufffd", cell)
        raise ValueError(
            f"{where}, column {column!r}: character {error.start} is the lone surrogate {cell[error.start]!r}, which is not "
            "text; repair the row, or set data.encoding_errors: replace"
        ) from None
    return cell
