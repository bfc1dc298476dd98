"""Documents in pieces that are encoded together: the unit of work of a tokenizer."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from accel_train.data.documents import Document
from accel_train.data.facts import XZ_LIMIT_BYTES, Tally
from accel_train.data.split import Split

# A long document is encoded in pieces of this many characters, so that one file keeps all cores busy and the encodings
# (about 100 bytes a token) stay small.
_PIECE_CHARACTERS = 1 << 17
_BATCH_CHARACTERS = 1 << 21


class Piece(NamedTuple):
    """A part of one document that goes to one side."""

    text: str
    begins_document: bool
    held_out: bool


def document_pieces(documents: Iterable[Document], split: Split, tally: Tally) -> Iterator[Piece]:
    """The pieces of all documents in order, counted on the way; empty documents have none."""
    for document in documents:
        if not document.text:
            tally.num_empty_documents += 1
            continue
        tally.num_documents += 1
        texts = split.parts(document)
        tally.num_eval_documents += bool(texts[1])
        for held_out, text in enumerate(texts):
            num_bytes = len(document.utf8) if text is document.text else len(text.encode())
            if held_out:
                tally.eval_bytes += num_bytes
                if len(tally.eval_start) < XZ_LIMIT_BYTES:
                    tally.eval_start += text.encode()[: XZ_LIMIT_BYTES - len(tally.eval_start)]
            else:
                tally.train_bytes += num_bytes
            for index, piece in enumerate(cut_text(text)):
                yield Piece(piece, index == 0, bool(held_out))


def cut_text(text: str, limit: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """A text in pieces of at most `limit` characters; nothing for an empty one.

    The cut is before a line that follows a line, without other white space at the seam, where there is such a place:
    the pre-tokenizers of GPT-2, Llama 3 and their kin cut there too, so the tokens stay what they were.
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


def piece_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about two million characters."""
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
