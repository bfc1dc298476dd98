"""Text pairs (source and target): read table rows, tokenize and batch them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.sources import Source, describe, file_kind, files_of
from accel_train.data.tables import MissingColumn, show_cell, text_cell
from accel_train.data.text.aligned import read_aligned
from accel_train.data.text.padding import joined_arrays, padded, padded_inputs
from accel_train.data.text.shards import Cut
from accel_train.data.text.tokenizers import parts_to_tokenize, plain_encoder
from accel_train.recipe.schema import Recipe
from accel_train.task import Collated
from accel_train.tasks.common.texts import Divided, TextRow, read_both, text_rows, text_tokenizer
from accel_train.tasks.rows import given
from accel_train.tasks.seq2seq.config import Seq2SeqData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS_PER_CALL = 1000


class Pair(NamedTuple):
    """A source and its target as token ids, each with the tokenizer's special tokens."""

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    """Target tokens. Empty if unknown."""
    row: int
    """Index of an evaluation row that a text is generated for. -1 for all other rows."""


def load_pairs(recipe: Recipe, whole: Cut | None = None) -> Divided[TextRow]:
    """Return the pairs of `data.train` and `data.eval`: `texts` holds the source, `label` the target or None.

    The source's hash decides the side, so equal sources stay together. Of training data in shards (`whole`), the first
    pairs are returned.

    Raises:
        ValueError: a row cannot be read, or a cell is not text; the message names file, row and column.
    """
    data = Seq2SeqData.of(recipe.data)

    def read(sources: Sequence[Source], key: str, notes: list[str]) -> list[TextRow]:
        return read_pairs(whole.sample() if whole and key == data.train_key else sources, data, key=key, notes=notes)

    return read_both(data, read, is_labelled=data.is_labelled)


def read_pairs(sources: Sequence[Source], data: Seq2SeqData, *, key: str, notes: list[str]) -> list[TextRow]:
    """Return all pairs of sources, in memory. Adds to `notes`.

    Raises:
        ValueError: no rows exist, a column is missing, a cell is not text, or aligned files differ in lines; the
            message names file, row and column.
    """
    column = data.target_column
    if data.target_suffix is not None and all(file_kind(file) in (None, "text") for file in files_of(sources)):
        suffix = None if column is None else data.target_suffix
        rows = [row for file in files_of(sources) for row in _aligned_rows(file, suffix, data, notes)]
        if not rows:
            raise ValueError(f"{key} holds no pairs of lines: {describe(sources)}; name a file with text")
        return rows
    if data.translation_column is not None:
        rows = text_rows(sources, data, (), data.translation_column, key=key)
        return [_translated(row, data, data.translation_column) for row in rows]
    rows = text_rows(sources, data, (data.source_column,), column, key=key)
    return [
        row if column is None else row._replace(label=text_cell(row.label, column, row.where, data)) for row in rows
    ]


def _aligned_rows(file: Path, suffix: str | None, data: Seq2SeqData, notes: list[str]) -> list[TextRow]:
    """Return the pairs of line-aligned files, without pairs that lack a text. Adds to `notes`."""
    lines = list(read_aligned(file, suffix, data))
    kept = [each for each in lines if each.target is None or (each.source.strip() and each.target.strip())]
    if len(kept) < len(lines):
        notes.append(f"{file}: {len(lines) - len(kept):,} of {len(lines):,} pairs have an empty line and are left out")
    return [TextRow((each.source,), each.target, each.where, each.where) for each in kept]


def _translated(row: TextRow, data: Seq2SeqData, column: str) -> TextRow:
    """Return a row whose label maps languages to texts as a pair of these texts."""
    texts = []
    for language in given(data.source_column, data.target_column):
        if not isinstance(row.label, Mapping):
            raise ValueError(
                f"{row.where}: column {column!r} holds {show_cell(row.label)}, not texts by language; repair or drop "
                "the row"
            )
        if language not in row.label:
            raise MissingColumn(
                language, f"{row.where}: column {column!r} has no {language!r}; it has {', '.join(row.label)}"
            )
        texts.append(text_cell(row.label[language], language, row.where, data))
    return row._replace(texts=(texts[0],), label=texts[1] if len(texts) > 1 else None)


def pair_tokenizer(recipe: Recipe, texts: Iterable[str]) -> tuple["PreTrainedTokenizerBase", list[str]]:
    """Return the recipe's tokenizer with padding and end-of-text tokens, and notes on its choice.

    `bytes` and a BPE trained here (on `texts`, sources and targets) end each text with `<|endoftext|>`.

    Raises:
        ValueError: a pretrained tokenizer has no end-of-text token.
    """
    from tokenizers.processors import TemplateProcessing

    tokenizer, notes, is_own = text_tokenizer(recipe, texts)
    if is_own:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"$A {tokenizer.eos_token}", special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)]
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer: {tokenizer.name_or_path!r} has no eos token, by which a generated text ends; add one to it "
            "and save it, or use another (bytes, say)"
        )
    return tokenizer, notes


def tokenize_pairs(
    rows: Sequence[TextRow],
    tokenizer: "PreTrainedTokenizerBase",
    max_lengths: tuple[int, int],
    *,
    prefix: str,
    generated: Sequence[int],
    progress: bool,
) -> list[Pair]:
    """Return rows as token ids. Sources and targets over `max_lengths` are truncated but keep their end tokens.

    `prefix` precedes each source. `generated` lists the rows that texts are generated for. Special tokens in a text are
    encoded as plain characters.
    """
    chosen = set(generated)
    pairs: list[Pair] = []
    encode = plain_encoder(tokenizer)
    for start, part in parts_to_tokenize(rows, _TEXTS_PER_CALL, "pairs", progress=progress):
        sources = encode([prefix + row.texts[0] for row in part], max_length=max_lengths[0])["input_ids"]
        targets: list[Any] = [[]] * len(part)
        if part[0].label is not None:
            targets = encode(text_target=[row.label for row in part], max_length=max_lengths[1])["input_ids"]
        for number, (source, target) in enumerate(zip(sources, targets), start=start):
            row = number if number in chosen else -1
            pairs.append(Pair(np.array(source, dtype=np.int32), np.array(target, dtype=np.int32), row))
    return pairs


def arrays_of(pairs: Sequence[Pair]) -> list[NDArray[Any]]:
    """Return pairs as arrays, for a digest."""
    return [*joined_arrays([pair.source for pair in pairs]), *joined_arrays([pair.target for pair in pairs])]


def collate_pairs(samples: Sequence[Pair], *, pad_id: int, multiple: int, max_lengths: tuple[int, int]) -> Collated:
    """Return a batch padded on the right: `input_ids`, `attention_mask` (N, S) and `labels` (N, T), int64.

    Labels are padded with -100. S and T are multiples of `multiple`, and at most `max_lengths`. `rows` (N,) int64 holds
    `Pair.row`. `num_targets` is the number of labels, an int.
    """
    sources, targets, rows = zip(*samples)
    longest = max(1, *map(len, targets))
    return {
        **padded_inputs(sources, pad_id=pad_id, multiple=multiple, max_length=max_lengths[0]),
        "labels": padded(targets, min(-(-longest // multiple) * multiple, max_lengths[1]), IGNORED_LABEL),
        "rows": torch.tensor(rows),
        "num_targets": sum(map(len, targets)),
    }
