"""Rows of texts that belong together, or scored pairs: read table rows, tokenize and batch them."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train.core.files import digest64
from accel_train.data.sources import Source
from accel_train.data.tables import show_cell
from accel_train.data.text.padding import joined_arrays, padded_inputs
from accel_train.data.text.shards import Cut
from accel_train.data.text.tokenizers import parts_to_tokenize, plain_encoder
from accel_train.recipe.schema import Recipe
from accel_train.task import Collated
from accel_train.tasks.common.texts import Divided, TextRow, read_both, text_rows
from accel_train.tasks.sentence_embedding.config import SentenceEmbeddingData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_PER_CALL = 500
_MOST_FOUND = 10
"""Number of documents that recall_at_10 looks at."""


class AnchorRow(TextRow):
    """Texts of one row: anchor, positive, negatives, or the two texts of a scored pair (`label` is the score)."""

    @property
    def key(self) -> str:
        """Return the anchor. Rows with equal anchors are on the same side of a split."""
        return self.texts[0]


def load_rows(recipe: Recipe, whole: Cut | None = None) -> Divided[AnchorRow]:
    """Return the rows of `data.train` and `data.eval`, all with the same number of texts.

    Of training data in shards (`whole`), the first rows are returned.

    Raises:
        ValueError: a row cannot be read, a text is empty, or a score is not a number; the message names the row.
    """
    data = SentenceEmbeddingData.of(recipe.data)
    if data.is_for_training and len(data.pair_columns) < 2:
        raise ValueError(
            f"data.pair_columns=[{data.pair_columns[0]}] names one column, which leaves nothing to learn from; name "
            "the columns of the anchor and its positive"
        )

    def read(sources: Sequence[Source], key: str, _: object) -> list[AnchorRow]:
        return read_anchor_rows(whole.sample() if whole and key == data.train_key else sources, data, key=key)

    found = read_both(data, read)
    if not data.is_for_training:
        return found
    if data.score_column is not None and len({row.label for row in found.train}) == 1:
        raise ValueError(
            f"{data.train_key}: column {data.score_column!r} is {found.train[0].label:g} in all training rows, so no "
            "pair is closer than another; give other scores, or leave data.score_column out for pairs that belong "
            "together"
        )
    if data.score_column is None and found.eval:
        number = len({row.texts[1] for row in found.eval})
        if number <= _MOST_FOUND:
            found.notes.append(
                f"recall_at_10 says nothing: the evaluation has {number} different positives. Raise "
                "data.eval_fraction, or give data.eval"
            )
    return found


def read_anchor_rows(sources: Sequence[Source], data: SentenceEmbeddingData, *, key: str) -> list[AnchorRow]:
    """Return all rows of sources with the texts of `data.pair_columns` and their score, in memory.

    Raises:
        ValueError: no rows exist, a column is missing, a text is empty, or a score is not a number.
    """
    rows = []
    for row in text_rows(sources, data, data.pair_columns, data.score_column, key=key):
        empty = [column for column, text in zip(data.pair_columns, row.texts) if not text.strip()]
        if empty:
            raise ValueError(f"{row.where}: column {empty[0]!r} is empty, and needs a text; fill it, or drop the row")
        score = None if data.score_column is None else _score(row.label, data.score_column, row.where)
        rows.append(AnchorRow(row.texts, score, row.where, row.id))
    return rows


def _score(cell: Any, column: str, where: str) -> float:
    try:
        score = float(cell)
    except (TypeError, ValueError):
        score = np.nan
    if not np.isfinite(score):
        raise ValueError(
            f"{where}: column {column!r} holds {show_cell(cell)}, not a number; correct it, or drop the row"
        )
    return score


class Sample(NamedTuple):
    """One row, each text tokenized on its own."""

    ids: tuple[NDArray[np.int32], ...]
    texts: tuple[int, ...]
    """A signed 64-bit hash of each text."""
    score: float


def tokenize_rows(
    rows: Sequence[AnchorRow],
    prompts: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    *,
    progress: bool,
) -> list[Sample]:
    """Return rows as token ids with the tokenizer's special tokens. `prompts` begin the texts of each column.

    Raises:
        ValueError: a text has no tokens.
    """
    samples: list[Sample] = []
    encode = plain_encoder(tokenizer, max_length=max_length)
    for _, part in parts_to_tokenize(rows, _ROWS_PER_CALL, "rows", progress=progress):
        encoded = encode([prompt + text for row in part for prompt, text in zip(prompts, row.texts, strict=True)])
        found = iter(encoded["input_ids"])
        for row in part:
            ids = tuple(np.array(next(found), dtype=np.int32) for _ in row.texts)
            if not all(map(len, ids)):
                raise ValueError(f"{row.where}: a text has no tokens; drop the row")
            samples.append(Sample(ids, tuple(map(text_hash, row.texts)), row.label or 0.0))
    return samples


def text_hash(text: str) -> int:
    """Return a signed 64-bit hash of a text."""
    number = digest64(text.encode(errors="surrogatepass"))
    return number - (1 << 64) if number >= 1 << 63 else number


def collate_rows(samples: Sequence[Sample], **padding: int) -> Collated:
    """Return a batch of `padded_inputs` (N, K, T) int64, `texts` (N, K), `scores`, and `num_targets`, the rows."""
    ids, texts, scores = zip(*samples)
    batch = padded_inputs([*chain(*ids)], **padding)
    return {
        **{name: tensor.unflatten(0, (len(samples), -1)) for name, tensor in batch.items()},
        "texts": torch.from_numpy(np.array(texts)),
        "scores": torch.tensor(scores, dtype=torch.float32),
        "num_targets": len(samples),
    }


def arrays_of(samples: Sequence[Sample]) -> list[NDArray[Any]]:
    """Return samples as arrays, for a digest."""
    ids, texts, scores = zip(*samples)
    return [*joined_arrays([*chain(*ids)]), np.array(texts), np.array(scores)]
