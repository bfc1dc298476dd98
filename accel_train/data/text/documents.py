"""Which documents are held out for evaluation: decided by each document's text alone.

The same text lands on the same side in every run, on every machine, in any order and whatever the seed, so copies of a
document are never on both sides.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from accel_train.data.documents import Document

_NUM_HASHES = 1 << 64


@dataclass(frozen=True)
class Split:
    """How documents are held out."""

    eval_fraction: float = 0.0
    """Documents whose hash lies in this lowest fraction of all hashes are held out."""
    moved_hash: int | None = None
    """The hash of a text that is held out although it lies higher."""
    cut_tail: bool = False
    """Not whole documents, but the last `eval_fraction` of each document's characters."""
    note: str = ""
    """What a user should know of this choice, if anything."""

    def parts(self, document: Document) -> tuple[str, str]:
        """The text to train on and the text held out; either may be empty."""
        text = document.text
        if self.cut_tail:
            num_kept = min(max(int(len(text) * (1 - self.eval_fraction)), 1), max(len(text) - 1, 1))
            return text[:num_kept], text[num_kept:]
        return ("", text) if self.holds_out(text_hash(document)) else (text, "")

    def holds_out(self, value: int) -> bool:
        """Whether the document with this hash is for evaluation."""
        return value < self.eval_fraction * _NUM_HASHES or value == self.moved_hash


def text_hash(document: Document) -> int:
    """64 bits of the text's BLAKE2b digest: the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(document.utf8, digest_size=8).digest(), "big")


def choose_split(documents: Iterable[Document], eval_fraction: float) -> Split:
    """Hold out `eval_fraction` of the documents, and at least one; of a single document, its tail.

    Reads documents until both sides have one: all of a small corpus, about 1 / eval_fraction of a large one.

    Raises:
        ValueError: no document is left to train on.
    """
    split = Split(eval_fraction)
    if eval_fraction == 0:
        return split
    first = last = None
    one_text = True
    num_held_out = num_trained = 0
    for document in documents:
        if not document.text:
            continue
        last = text_hash(document)
        first = last if first is None else first
        one_text = one_text and last == first
        num_held_out += split.holds_out(last)
        num_trained += not split.holds_out(last)
        if num_held_out and num_trained:
            return split
    if one_text:
        note = (
            f"the corpus is one document: its last {eval_fraction:.3g} is held out for evaluation (data.eval_fraction)"
        )
        return replace(split, cut_tail=True, note=note)
    if num_held_out:
        raise ValueError(
            f"no training documents are left: all {num_held_out} fall into data.eval_fraction={eval_fraction}; "
            "lower it, or name other files in data.eval"
        )
    note = f"data.eval_fraction={eval_fraction} of {num_trained} documents is less than one: the last one is held out"
    return replace(split, moved_hash=last, note=note)
