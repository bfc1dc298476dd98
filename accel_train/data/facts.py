"""The facts of a corpus, and two marks that need no training: what a model should soon pass."""

import lzma
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.data.sources import Source, describe, holds_tokens
from accel_train.data.token_files import ShardWriter

XZ_LIMIT_BYTES = 8_000_000
"""xz reads at most this much of the evaluation text (a few seconds)."""


@dataclass(frozen=True)
class CorpusFacts:
    """What a corpus is, in numbers; every field can be written as JSON."""

    sources: str
    """What was read, for people."""
    num_documents: int
    """Documents with text, those for evaluation included; in token shards, the separators."""
    num_empty_documents: int
    """Documents without a character: left out."""
    num_eval_documents: int
    train_tokens: int
    eval_tokens: int
    train_bytes: int | None
    """UTF-8 bytes of the training text; None where the source holds tokens."""
    eval_bytes: int | None
    unigram_bits_per_byte: float | None
    """What the token frequencies of the training data give on the evaluation targets (no context at all)."""
    xz_bits_per_byte: float | None
    """What xz makes of the evaluation text, or of its first 8 MB."""
    notes: tuple[str, ...]
    """What a user should know: sentences."""
    cache_folder: str
    reused: bool
    """The shards were there already."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON has them."""
        return {**asdict(self), "notes": list(self.notes)}


@dataclass
class Tally:
    """What is counted while documents pass."""

    num_documents: int = 0
    num_empty_documents: int = 0
    num_eval_documents: int = 0
    train_bytes: int = 0
    eval_bytes: int = 0
    eval_start: bytearray = field(default_factory=bytearray)
    """The first megabytes of the evaluation text."""
    notes: list[str] = field(default_factory=list)


def corpus_facts(
    train: Sequence[Source],
    held_out: Sequence[Source],
    separator_id: int,
    train_shard: ShardWriter,
    eval_shard: ShardWriter,
    tally: Tally,
) -> dict[str, Any]:
    """The fields of `CorpusFacts` that a build decides, from what was counted."""
    train_is_text, eval_is_text = not holds_tokens(train), not holds_tokens(held_out or train)
    num_train_separators = int(train_shard.token_counts[separator_id])
    num_eval_separators = int(eval_shard.token_counts[separator_id])
    from_tokens = (0 if train_is_text else num_train_separators) + (0 if eval_is_text else num_eval_separators)
    unigram = None
    if eval_is_text and eval_shard.num_tokens > 1:
        targets = eval_shard.token_counts.copy()
        targets[separator_id] -= 1  # the first token of the stream is no target, for a model either
        unigram = unigram_bits(train_shard.token_counts, targets) / tally.eval_bytes
    return {
        "sources": describe(train) + (f"; evaluation: {describe(held_out)}" if held_out else ""),
        "num_documents": tally.num_documents + from_tokens,
        "num_empty_documents": tally.num_empty_documents,
        "num_eval_documents": tally.num_eval_documents if eval_is_text else num_eval_separators,
        "train_tokens": train_shard.num_tokens,
        "eval_tokens": eval_shard.num_tokens,
        "train_bytes": tally.train_bytes if train_is_text else None,
        "eval_bytes": tally.eval_bytes if eval_is_text else None,
        "unigram_bits_per_byte": unigram,
        "xz_bits_per_byte": xz_bits_per_byte(bytes(tally.eval_start)),
        "notes": tally.notes,
    }


def unigram_bits(train_counts: NDArray[np.int64], eval_counts: NDArray[np.int64]) -> float:
    """Bits that the token frequencies of the training data, with 1 added to each, need for the evaluation tokens."""
    probabilities = (train_counts + 1) / (train_counts.sum() + len(train_counts))
    return float(-(eval_counts * np.log2(probabilities)).sum())


def xz_bits_per_byte(text: bytes) -> float | None:
    """Size of the text compressed by xz (LZMA2, its default level) in bits per byte; None without text."""
    return 8 * len(lzma.compress(text)) / len(text) if text else None
