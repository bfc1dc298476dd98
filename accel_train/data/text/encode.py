"""Encode documents: their texts in batches, the side of each, and counts of what passes (`write_tokens`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from accel_train.data.sources import Source, num_bytes_of
from accel_train.data.text.documents import Split, cut_text, read_documents
from accel_train.data.text.tokenizers import TokenIds
from accel_train.data.text.tokens import Tally, Tokens
from accel_train.recipe.data import WindowData

_BATCH_CHARACTERS = 1 << 21
# Most evaluation text that xz reads (takes a few seconds).
_XZ_LIMIT_BYTES = 8_000_000


@dataclass
class Counts:
    """Counters that are updated as documents pass."""

    num_documents: int = 0
    num_empty_documents: int = 0
    num_eval_documents: int = 0
    train_bytes: int = 0
    eval_bytes: int = 0
    eval_start: bytearray = field(default_factory=bytearray)
    """First megabytes of the evaluation text."""
    notes: list[str] = field(default_factory=list)


class Chunk(NamedTuple):
    """A part of one document, encoded in one call."""

    text: str
    begins_document: bool
    held_out: bool


def byte_bar(title: str, total_bytes: float, shown: bool) -> "tqdm[Any]":
    """Return a progress bar in bytes on standard error."""
    return tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True, disable=None if shown else True, leave=False)


Writers = tuple[Tally | None, Tally | None]
"""Writers of training and held-out documents. None: these documents are left out."""
EncodeAll = Callable[[Iterable[list[Chunk]]], Iterable[tuple[list[Chunk], list[TokenIds]]]]


def write_tokens(
    texts: Iterable[str], split: Split, separator_id: int, writers: Writers, counts: Counts, encode_all: EncodeAll
) -> None:
    """Write document tokens to the training or the held-out shard. A separator precedes each document."""
    separator = np.array([separator_id])
    for batch, encoded in encode_all(_batches(_chunks(texts, split, writers, counts))):
        sides: tuple[list[Tokens], list[Tokens]] = ([], [])
        for chunk, tokens in zip(batch, encoded):
            sides[chunk.held_out].extend([separator, tokens] if chunk.begins_document else [tokens])
        for writer, parts in zip(writers, sides):
            if writer and parts:
                writer.write(np.concatenate(parts))


def _chunks(texts: Iterable[str], split: Split, writers: Writers, counts: Counts) -> Iterator[Chunk]:
    """Yield the chunks of all documents in order and update the counts. Empty documents are skipped."""
    for text in texts:
        if not text:
            counts.num_empty_documents += 1
            continue
        counts.num_documents += 1
        train, held_out = split.divide(text)
        counts.train_bytes += len(train.encode())
        if held_out:
            utf8 = held_out.encode()
            counts.num_eval_documents += 1
            counts.eval_bytes += len(utf8)
            counts.eval_start += utf8[: _XZ_LIMIT_BYTES - len(counts.eval_start)]
        for is_held_out, side in enumerate((train, held_out)):
            for index, chunk in enumerate(cut_text(side) if writers[is_held_out] else ()):
                yield Chunk(chunk, index == 0, bool(is_held_out))


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Yield lists of chunks with about two million characters each."""
    batch: list[Chunk] = []
    num_characters = 0
    for chunk in chunks:
        batch.append(chunk)
        num_characters += len(chunk.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def texts_of(sources: Sequence[Source], data: WindowData, title: str, shown: bool) -> Iterator[str]:
    """Yield the texts of all documents in order, with a progress bar of the bytes read if it is to be `shown`."""
    with byte_bar(title, sum(map(num_bytes_of, sources)), shown) as bar:
        for source in sources:
            for document in read_documents(source, data):
                yield document.text
                bar.update(document.num_source_bytes)
