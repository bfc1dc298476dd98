"""Tokenise a corpus once: documents in, two token shards and their facts out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from accel_train.data.documents import Document, read_documents, source_size_bytes
from accel_train.data.facts import Tally, corpus_facts
from accel_train.data.pieces import cut_text, document_pieces, piece_batches
from accel_train.data.sources import Source, describe, holds_tokens
from accel_train.data.split import Split, choose_split
from accel_train.data.token_files import (
    ShardWriter,
    TokenFile,
    Tokens,
    held_out_start,
    inspect_token_file,
    shard_dtype,
    token_chunks,
)
from accel_train.data.tokenizers import TextTokenizer, prepare_tokenizer, train_bpe
from accel_train.recipe_data import Data, TrainedTokenizer

_EVERYTHING = Split(eval_fraction=1.0)
# Above this a larger sample no longer changes the frequent pairs that become tokens, but takes minutes and gigabytes.
_BPE_LIMIT_CHARACTERS = 1 << 30


@dataclass(frozen=True)
class Inputs:
    """What the shards are made from."""

    data: Data
    train: tuple[Source, ...]
    eval: tuple[Source, ...]
    """Empty: a part of `train` is held out."""
    tokenizer: TextTokenizer | TrainedTokenizer
    progress: bool


def build_shards(folder: Path, inputs: Inputs) -> tuple[TextTokenizer, dict[str, Any]]:
    """Write train.bin, eval.bin and a trained tokenizer into a folder; returns the tokenizer and what meta.json says.

    Raises:
        ValueError: a document cannot be read, or none are left to train on.
    """
    tally = Tally(notes=[note for source in (*inputs.train, *inputs.eval) for note in source.notes])
    tally.notes += _leaks(inputs)
    split = _split_of(inputs, tally)
    tokenizer = inputs.tokenizer
    if isinstance(tokenizer, TrainedTokenizer):
        tokenizer = _train_tokenizer(tokenizer.train_bpe.vocab_size, inputs, split, tally)
        tokenizer.tokenizer.save_pretrained(str(folder / "tokenizer"))
    dtype = _dtype_of((*inputs.train, *inputs.eval), tokenizer.vocab_size)
    with (
        ShardWriter(folder / "train.bin", dtype, tokenizer.vocab_size) as train,
        ShardWriter(folder / "eval.bin", dtype, tokenizer.vocab_size) as held_out,
    ):
        if holds_tokens(inputs.train):
            _copy_training_tokens(inputs, tokenizer, train, held_out, tally)
        else:
            _tokenise(inputs.train, split, inputs, tokenizer, (train, held_out), tally)
        if not train.num_tokens:
            raise ValueError(f"data.train holds no documents: {describe(inputs.train)}; every file or row is empty")
        if holds_tokens(inputs.eval):
            for chunk in token_chunks(_token_files(inputs.eval), tokenizer.vocab_size):
                held_out.write(chunk)
        elif inputs.eval:
            _tokenise(inputs.eval, _EVERYTHING, inputs, tokenizer, (train, held_out), tally)
        if inputs.eval and not held_out.num_tokens:
            raise ValueError(f"data.eval holds no documents: {describe(inputs.eval)}; every file or row is empty")
    return tokenizer, {
        "dtype": dtype.name,
        "separator_id": tokenizer.separator_id,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_digest": tokenizer.digest,
        "facts": corpus_facts(inputs.train, inputs.eval, tokenizer.separator_id, train, held_out, tally),
    }


def _leaks(inputs: Inputs) -> list[str]:
    trained = {file.path.resolve() for source in inputs.train for file in source.files}
    both = sorted(trained & {file.path.resolve() for source in inputs.eval for file in source.files})
    return [f"{len(both)} files of data.eval are in data.train too ({both[0]}): they are trained on"] if both else []


def _split_of(inputs: Inputs, tally: Tally) -> Split:
    if inputs.eval or holds_tokens(inputs.train):
        return Split()
    split = choose_split(_documents(inputs.train, inputs), inputs.data.eval_fraction)
    if split.note:
        tally.notes.append(split.note)
    return split


def _train_tokenizer(vocab_size: int, inputs: Inputs, split: Split, tally: Tally) -> TextTokenizer:
    num_characters = 0

    def training_texts() -> Iterator[str]:
        nonlocal num_characters
        for document in _documents(inputs.train, inputs, title="training the tokenizer"):
            for piece in cut_text(split.parts(document)[0]):
                num_characters += len(piece)
                yield piece
            if num_characters > _BPE_LIMIT_CHARACTERS:
                tally.notes.append(f"the tokenizer was trained on the first {num_characters:,} characters")
                return

    tokenizer = prepare_tokenizer(train_bpe(training_texts(), vocab_size))
    if tokenizer.vocab_size < vocab_size:
        tally.notes.append(
            f"the training text supports {tokenizer.vocab_size} tokens, not tokenizer.vocab_size={vocab_size}"
        )
    return tokenizer


def _tokenise(
    sources: Sequence[Source],
    split: Split,
    inputs: Inputs,
    tokenizer: TextTokenizer,
    writers: tuple[ShardWriter, ShardWriter],
    tally: Tally,
) -> None:
    """Write the documents' tokens, each document after a separator, to the training or the held-out shard."""
    separator = np.array([tokenizer.separator_id])
    documents = _documents(sources, inputs, title="tokenising")
    for batch in piece_batches(document_pieces(documents, split, tally)):
        encoded = tokenizer.encode([piece.text for piece in batch])
        for held_out, writer in enumerate(writers):
            parts: list[Tokens] = []
            for piece, tokens in zip(batch, encoded):
                if piece.held_out == held_out:
                    parts += [separator, tokens] if piece.begins_document else [tokens]
            if parts:
                writer.write(np.concatenate(parts))


def _documents(sources: Sequence[Source], inputs: Inputs, title: str = "") -> Iterator[Document]:
    """All documents in order; with a title, and if progress is wanted, under a bar of the bytes read."""
    total = sum(source_size_bytes(source) for source in sources)
    with byte_bar(title, total, inputs.progress and bool(title)) as bar:
        for source in sources:
            for document in read_documents(source, inputs.data):
                yield document
                bar.update(document.num_source_bytes)


def byte_bar(title: str, total_bytes: float, shown: bool) -> "tqdm[Any]":
    """A progress bar of bytes on standard error."""
    return tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True, disable=None if shown else True, leave=False)


def _copy_training_tokens(
    inputs: Inputs, tokenizer: TextTokenizer, train: ShardWriter, held_out: ShardWriter, tally: Tally
) -> None:
    files = _token_files(inputs.train)
    total = sum(file.num_tokens for file in files)
    cut = total
    if not inputs.eval and inputs.data.eval_fraction > 0:
        cut, at_document = held_out_start(files, tokenizer.separator_id, inputs.data.eval_fraction)
        place = "from the beginning of a document" if at_document else "not at a separator: none is near"
        tally.notes.append(f"the last {total - cut:,} tokens are held out for evaluation, {place} (data.eval_fraction)")
    with byte_bar("copying tokens", total, inputs.progress) as bar:
        position = 0
        for chunk in token_chunks(files, tokenizer.vocab_size):
            here = min(max(cut - position, 0), len(chunk))
            train.write(chunk[:here])
            held_out.write(chunk[here:])
            position += len(chunk)
            bar.update(len(chunk))


def _token_files(sources: Sequence[Source]) -> list[TokenFile]:
    return [inspect_token_file(file.path) for source in sources for file in source.files]


def _dtype_of(sources: Sequence[Source], vocab_size: int) -> np.dtype[Any]:
    narrow = np.dtype("<u2")
    if all(source.holds_tokens for source in sources) and all(file.dtype == narrow for file in _token_files(sources)):
        return narrow
    return shard_dtype(vocab_size)
