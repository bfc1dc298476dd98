"""`prepare_rows`: the fine-tuning rows of a recipe as tokens in memory, training and evaluation apart."""

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from accel_train.data.chats import chat_encoder
from accel_train.data.conversations import (
    Encoder,
    Example,
    Oddities,
    check_row,
    columns_of,
    completion_encoder,
    texts_of,
)
from accel_train.data.documents import Document
from accel_train.data.packing import TokenRows
from accel_train.data.sources import Source, describe, resolve_sources
from accel_train.data.split import choose_split, text_hash
from accel_train.data.stdlib_docstrings import NAME as STDLIB_DOCSTRINGS
from accel_train.data.stdlib_docstrings import stdlib_docstrings
from accel_train.data.tables import read_rows
from accel_train.data.tokenizers import TextTokenizer, prepare_tokenizer, pretrained_tokenizer, train_bpe
from accel_train.recipe import Recipe
from accel_train.recipe_data import Data, TrainedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class RowCorpus:
    """Rows to fine-tune on, tokenised."""

    train: TokenRows
    eval: TokenRows | None
    tokenizer: "PreTrainedTokenizerBase"
    vocab_size: int
    """Rows that an embedding needs; every id is below it."""
    separator_id: int
    fingerprint: str
    """Hex; of the tokens, and of which of them are targets."""
    facts: dict[str, Any]


def prepare_rows(recipe: Recipe, *, progress: bool) -> RowCorpus:
    """Read and tokenise a recipe's fine-tuning rows, each at most `sequence_length` targets long.

    Raises:
        ValueError: a source, row, tokenizer or chat template is wrong, or nothing is left to train on.
    """
    data = recipe.data
    sources = _sources(data.train, data, "data.train")
    held_out_sources = () if data.eval is None else _sources(data.eval, data, "data.eval")
    notes = [note for source in (*sources, *held_out_sources) for note in source.notes]
    rows = _read(sources, data, progress)
    if not rows:
        raise ValueError(f"data.train holds no rows: {describe(sources)}")
    if held_out_sources:
        held_out = _read(held_out_sources, data, progress)
        if not held_out:
            raise ValueError(f"data.eval holds no rows: {describe(held_out_sources)}")
    else:
        rows, held_out = _hold_out(rows, data.eval_fraction, notes)
    tokenizer = _tokenizer(recipe, rows)
    oddities = Oddities()
    make_encoder = chat_encoder if data.format == "chat" else completion_encoder
    encode = make_encoder(tokenizer, data, oddities)
    train = _encode(rows, encode, "data.train", data.sequence_length, notes, progress)
    evaluation = _encode(held_out, encode, "data.eval", data.sequence_length, notes, progress)
    if not len(train):
        raise ValueError(
            f"no training row keeps a target: all {len(rows):,} are longer than data.sequence_length="
            f"{data.sequence_length} tokens before their completion begins; raise it"
        )
    return RowCorpus(
        train=train,
        eval=evaluation if len(evaluation) else None,
        tokenizer=tokenizer.tokenizer,
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id,
        fingerprint=_fingerprint(train, evaluation),
        facts={
            "sources": describe(sources) + (f"; evaluation: {describe(held_out_sources)}" if held_out_sources else ""),
            "num_train_rows": len(train),
            "num_eval_rows": len(evaluation),
            "train_targets": len(train.targets),
            "eval_targets": len(evaluation.targets),
            "unigram_perplexity": _unigram_perplexity(train, evaluation, tokenizer.vocab_size),
            "notes": [*notes, *oddities.notes()],
        },
    )


def _sources(names: str | tuple[str, ...], data: Data, leaf: str) -> tuple[Source, ...]:
    found: list[Source] = []
    for name in (names,) if isinstance(names, str) else names:
        if name == STDLIB_DOCSTRINGS:
            dataset = stdlib_docstrings()
            shown = f"{name} of Python {platform.python_version()}: {len(dataset):,} rows"
            found.append(Source(name, shown, dataset=dataset))
        else:
            found += resolve_sources(name, data, leaf=leaf)
    return tuple(found)


def _read(sources: Sequence[Source], data: Data, progress: bool) -> list[Example]:
    rows = (row for source in sources for row in read_rows(source, columns_of(data), data))
    return [check_row(row, data) for row in _bar(rows, "reading rows", progress)]


def _bar(items: Iterable[Any], title: str, shown: bool) -> Iterator[Any]:
    yield from tqdm(items, desc=title, unit=" rows", disable=None if shown else True, leave=False)


def _hold_out(rows: list[Example], fraction: float, notes: list[str]) -> tuple[list[Example], list[Example]]:
    """Rows to train on and rows to evaluate on: the same row lands on the same side in every run."""

    def document(row: Example) -> Document:
        text = json.dumps(row.parts, sort_keys=True)
        return Document(text, text.encode(), 0, row.where)

    split = choose_split(map(document, rows), fraction)
    if split.cut_tail:
        notes.append("all rows are the same: none is held out for evaluation; name some in data.eval")
        return rows, []
    if split.note:
        notes.append(split.note)
    sides: tuple[list[Example], list[Example]] = ([], [])
    for row in rows:
        sides[fraction > 0 and split.holds_out(text_hash(document(row)))].append(row)
    return sides


def _tokenizer(recipe: Recipe, rows: Sequence[Example]) -> TextTokenizer:
    spec = recipe.tokenizer_in_use
    if isinstance(spec, TrainedTokenizer):
        return prepare_tokenizer(train_bpe(texts_of(rows), spec.train_bpe.vocab_size))
    return pretrained_tokenizer(spec, trust_remote_code=recipe.model.trust_remote_code)


def _encode(
    rows: Sequence[Example], encode: Encoder, leaf: str, sequence_length: int, notes: list[str], progress: bool
) -> TokenRows:
    """Tokens of all rows, cut at `sequence_length` targets; rows without a target in them are left out."""
    tokens, is_target, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)], [0]
    num_cut = num_dropped = 0
    for start in _bar(range(0, len(rows), _ROWS_AT_ONCE), f"tokenising {leaf}", progress):
        for row in encode(rows[start : start + _ROWS_AT_ONCE]):
            kept = slice(sequence_length + 1)
            if not row.is_target[kept].any():
                num_dropped += 1
                continue
            num_cut += len(row.ids) > sequence_length + 1
            tokens.append(row.ids[kept])
            is_target.append(row.is_target[kept])
            lengths.append(len(tokens[-1]))
    if num_cut:
        notes.append(
            f"{leaf}: {num_cut:,} of {len(rows):,} rows are cut at data.sequence_length={sequence_length} tokens"
        )
    if num_dropped:
        notes.append(
            f"{leaf}: {num_dropped:,} of {len(rows):,} rows are left out, because nothing of their completion lies within "
            f"data.sequence_length={sequence_length} tokens"
        )
    return TokenRows(np.concatenate(tokens), np.concatenate(is_target), np.cumsum(lengths))


def _fingerprint(*sides: TokenRows) -> str:
    digest = hashlib.sha256()
    for rows in sides:
        for array in (rows.starts.astype("<i8"), rows.tokens.astype("<i4"), rows.is_target):
            digest.update(array.tobytes())
    return digest.hexdigest()


def _unigram_perplexity(train: TokenRows, evaluation: TokenRows, vocab_size: int) -> float | None:
    """Of the evaluation targets, given the training targets' frequencies (with 1 added to each) and no context at all."""
    if not len(evaluation):
        return None
    counts = np.bincount(train.targets, minlength=vocab_size) + 1
    return float(np.exp(-np.log(counts / counts.sum())[evaluation.targets].mean()))
