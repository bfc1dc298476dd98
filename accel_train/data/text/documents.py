"""Read documents from text files, tables and data sets, and decide which are held out.

Memory holds one document or one batch of rows, for any source size. The text alone decides the side of a document. The
split is the same in every run, on every machine, in any order and with any `seed`, and copies stay together.
`data.split_seed` selects another split.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from accel_train.core.files import digest64
from accel_train.data.encoding import read_text
from accel_train.data.sources import Source, num_bytes_of
from accel_train.data.tables import columns_read, read_rows, text_of
from accel_train.recipe.data import WindowData

_NUM_HASHES = 1 << 64


Row = TypeVar("Row")


class Document(NamedTuple):
    """One text in the user's sense of a document. It may be empty."""

    text: str
    num_source_bytes: float


def read_documents(source: Source, data: WindowData) -> Iterator[Document]:
    """Yield the documents of a source in source order. Line ends are kept; a byte order mark is removed.

    Raises:
        ValueError: a row is broken, not text, or not UTF-8; the message names file, line or row, and byte.
    """
    for part in source.parts():
        if part.kind == "text":
            yield Document(read_text(part.files[0], data, part.span), num_bytes_of(part))
            continue
        for row in read_rows(part, columns_read(data.text_column), data):
            yield Document(text_of(data.text_column, iter(row.cells), row.where, data), row.num_source_bytes)


@dataclass(frozen=True)
class Split:
    """The rule that holds documents out for evaluation."""

    eval_fraction: float = 0.0
    """Fraction of the hash range that is held out, from the lowest hash."""
    hashes: frozenset[int] = frozenset()
    """Hashes of more held-out texts, above the fraction."""
    cut_tail: bool = False
    """Whether to hold out the last `eval_fraction` of each document's characters instead of whole documents."""
    seed: int = 0
    """Number that is hashed with each text (`data.split_seed`)."""
    note: str = ""
    """Note for the user about this split, or empty."""

    def divide(self, text: str) -> tuple[str, str]:
        """Return the training part and the held-out part of a document's text. Either may be empty."""
        if self.cut_tail:
            num_kept = min(max(int(len(text) * (1 - self.eval_fraction)), 1), max(len(text) - 1, 1))
            return text[:num_kept], text[num_kept:]
        return ("", text) if self.holds_out(text) else (text, "")

    def holds_out(self, text: str) -> bool:
        """Return whether a text is for evaluation."""
        value = digest64(text.encode(), self.seed)
        return value < self.eval_fraction * _NUM_HASHES or value in self.hashes


def choose_split(texts: Iterable[str], eval_fraction: float, unit: str = "documents", seed: int = 0) -> Split:
    """Return a split that holds out `eval_fraction` of the documents: at least one, or the tail of a single document.

    Notes call the documents `unit`.

    Reads documents until both sides have one. This is the whole of a small corpus, and about 1 / eval_fraction
    documents of a large one.

    Raises:
        ValueError: no training document is left.
    """
    split = Split(eval_fraction, seed=seed)
    if eval_fraction == 0:
        return split
    hashes: set[int] = set()
    last = 0
    num_trained = num_held_out = 0
    for text in filter(None, texts):
        last = digest64(text.encode(), seed)
        if len(hashes) < 2:
            hashes.add(last)
        is_held_out = split.holds_out(text)
        num_held_out += is_held_out
        num_trained += not is_held_out
        if num_held_out and num_trained:
            return split
    if len(hashes) < 2:
        note = (
            f"the corpus is one document: its last {eval_fraction:.3g} is held out for evaluation (data.eval_fraction)"
        )
        note += f"; data.split_seed={seed} has no effect on it" if seed else ""
        return replace(split, cut_tail=True, note=note)
    if num_held_out:
        raise ValueError(
            f"no training documents are left: all {num_held_out} fall into data.eval_fraction={eval_fraction}; "
            "lower it, or name other files in data.eval"
        )
    note = f"data.eval_fraction={eval_fraction} of {num_trained} {unit} is less than one: the last one is held out"
    return replace(split, hashes=frozenset([last]), note=note)


def divide_rows(
    rows: Sequence[Row], texts: Sequence[str], eval_fraction: float, unit: str, seed: int = 0
) -> tuple[list[Row], list[Row], Split]:
    """Return training rows, held-out rows and the split. Rows with equal texts are on the same side."""
    split = choose_split(texts, eval_fraction, unit, seed)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row, text in zip(rows, texts):
        sides[split.holds_out(text)].append(row)
    return *sides, split


# Size of the chunks that a long document is encoded in. One file then keeps all cores busy, and the encodings (about
# 100 bytes per token) stay small.
_CHUNK_CHARACTERS = 1 << 17


def cut_text(text: str, limit: int = _CHUNK_CHARACTERS) -> Iterator[str]:
    """Yield a text in chunks of at most `limit` characters. An empty text yields nothing.

    If possible, cuts fall before a line that directly follows another line, without other white space at the cut. The
    pre-tokenizers of GPT-2, Llama 3 and similar models split there too, so the tokens do not change.
    """
    start = 0
    while len(text) - start > limit:
        end = text.rfind("\n", start + 1, start + limit) + 1
        while end > 0 and (text[end - 2].isspace() or text[end].isspace()):
            end = text.rfind("\n", start + 1, end - 1) + 1
        end = end or start + limit
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
