"""Token ids on disk, read where they lie: streams of parts of files, and windows over them.

`token_files.py` has the formats of files.
"""

import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from accel_train.core.errors import DataError
from accel_train.core.state import JsonRecord
from accel_train.data.labels import IGNORED_LABEL

Tokens = NDArray[np.integer[Any]]

CHUNK_TOKENS = 1 << 22
# Fills a short last window. Never a token id.
PADDING = -1
# Is added to the first token of a document, where the format of a file says where documents begin.
BEGINS = 1 << 40
LEAST_COMPILED = 16
"""Smallest number of documents that compiled code expects in a row. Rows with fewer have empty ones."""


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Token ids in parts of files, one after another. Each process maps a file on first use.

    A pickle is the names of the files and the table of parts, without tokens.
    """

    files: tuple[Path, ...]
    dtypes: tuple[np.dtype[Any], ...]
    """Type of the tokens of each file."""
    parts: NDArray[np.int64]
    """File (an index), first byte, and number of tokens of each part: (parts, 3)."""
    documents: NDArray[np.int64] | None = None
    """Positions at which documents begin, sorted. None: a separator token says it."""
    remedy: str = ""
    """What to do if a token is not an id. Default: the files were made here, and can be made again."""
    _maps: dict[int, NDArray[np.uint8]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, path: Path, dtype: np.dtype[Any], num_tokens: int, offset_bytes: int = 0) -> "TokenStream":
        """Return the stream of one part of one file."""
        return cls((path,), (dtype,), np.array([[0, offset_bytes, num_tokens]]))

    @classmethod
    def join(cls, streams: Sequence["TokenStream"]) -> "TokenStream":
        """Return streams one after another. Documents are known if all streams know them."""
        files, dtypes = (tuple(each for it in streams for each in getattr(it, name)) for name in ("files", "dtypes"))
        first_files = np.cumsum([0, *(len(each.files) for each in streams)])
        starts = np.cumsum([0, *(each.num_tokens for each in streams)])
        parts = [each.parts + np.array([first, 0, 0]) for each, first in zip(streams, first_files)]
        known = [each.documents + start for each, start in zip(streams, starts) if each.documents is not None]
        return cls(files, dtypes, np.concatenate(parts), np.concatenate(known) if len(known) == len(streams) else None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Position after each part: (parts,)."""
        return np.cumsum(self.parts[:, 2])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all parts."""
        return int(self.parts[:, 2].sum())

    def cut(self, start: int, stop: int) -> "TokenStream":
        """Return the tokens from `start` up to `stop` as a stream."""
        parts, ends = self.parts.copy(), self.ends
        begins = ends - parts[:, 2]
        skipped = np.clip(start - begins, 0, parts[:, 2])
        sizes = np.array([dtype.itemsize for dtype in self.dtypes])
        parts[:, 1] += skipped * sizes[parts[:, 0]]
        parts[:, 2] = np.clip(stop - begins, skipped, parts[:, 2]) - skipped
        inside = None
        if self.documents is not None:
            low, high = np.searchsorted(self.documents, [start, stop])
            inside = self.documents[low:high] - start
        return replace(self, parts=parts[parts[:, 2] > 0], documents=inside, _maps={})

    def locate(self, position: int) -> tuple[Path, int]:
        """Return the file of a token, and its position in the file's part."""
        part = int(np.searchsorted(self.ends, position, "right"))
        return self.files[self.parts[part, 0]], int(position - self.ends[part] + self.parts[part, 2])

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, Tokens]]:
        """Yield the tokens from `start` up to `stop` without a copy, some millions at a time, with their position."""
        while start < stop:
            part = int(np.searchsorted(self.ends, start, "right"))
            tokens = self._overlapping(part, 1)[:, 0]
            skipped = start - int(self.ends[part]) + len(tokens)
            chunk = tokens[skipped : skipped + min(stop - start, CHUNK_TOKENS)]
            yield start, chunk
            start += len(chunk)

    def rows(self, positions: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return `width` tokens from each position on: (N, width) int64. What is after the end is padded with -1."""
        first, last = (np.searchsorted(self.ends, at, "right") for at in (positions, positions + width - 1))
        if len(positions) and first.min() == last.max() < len(self.parts):
            part = int(first[0])
            return self._overlapping(part, width)[positions - self._begin(part)].astype(np.int64)
        rows = np.full((len(positions), width), PADDING, np.int64)
        for part in np.unique(first[first == last]).tolist():
            if part < len(self.parts):
                inside = np.flatnonzero((first == part) & (last == part))
                rows[inside] = self._overlapping(part, width)[positions[inside] - self._begin(part)]
        # Rows that go over the end of a part.
        for number in np.flatnonzero(first != last).tolist():
            start = int(positions[number])
            for position, chunk in self.chunks(start, min(start + width, self.num_tokens)):
                rows[number, position - start :][: len(chunk)] = chunk
        return rows

    def _begin(self, part: int) -> int:
        return int(self.ends[part] - self.parts[part, 2])

    def _overlapping(self, part: int, width: int) -> Tokens:
        """Return a view of all runs of `width` tokens of a part: (tokens - width + 1, width)."""
        file, offset, count = self.parts[part].tolist()
        if file not in self._maps:
            # Indexing the np.memmap subclass takes twice as long.
            self._maps[file] = np.asarray(np.memmap(self.files[file], np.uint8, mode="r"))
        dtype = self.dtypes[file]
        return np.ndarray((count - width + 1, width), dtype, self._maps[file], offset, (dtype.itemsize, dtype.itemsize))


def tail_start(stream: TokenStream, separator_id: int, eval_fraction: float) -> tuple[int, bool]:
    """Return the start of the held-out tail of a token stream, and whether a document begins there.

    The start is the beginning of a document nearest to a tail of `eval_fraction`, if the tail is at most twice as long.
    """
    total = stream.num_tokens
    target = int(total * (1 - eval_fraction))
    low, high = max(2 * target - total, 1), total - 1
    reach = 0
    while target - reach > low or target + reach < high:
        found = []
        # Further and further away, so that the end of a file of terabytes is not read.
        for start, stop in (
            (target - reach - CHUNK_TOKENS, target - reach),
            (target + reach, target + reach + CHUNK_TOKENS),
        ):
            start, stop = max(start, low), min(stop, high)
            if stream.documents is None:
                found += [at + np.flatnonzero(chunk == separator_id) for at, chunk in stream.chunks(start, stop)]
            else:
                found.append(stream.documents[slice(*np.searchsorted(stream.documents, [start, max(start, stop)]))])
        begins = np.concatenate([np.zeros(0, np.int64), *found])
        if len(begins):
            return int(begins[np.abs(begins - target).argmin()]), True
        reach += CHUNK_TOKENS
    return target, False


class Tally:
    """Counts of tokens, by id and in all, and of documents."""

    def __init__(self, vocab_size: int) -> None:
        self.num_tokens = 0
        self.num_documents: int | None = None
        """Number of documents in files that are read where they lie. None: not known."""
        self.token_counts = np.zeros(vocab_size, np.int64)

    def write(self, tokens: Tokens) -> None:
        """Count token ids below the vocabulary size."""
        self.token_counts += np.bincount(tokens.astype(np.int64), minlength=len(self.token_counts))
        self.num_tokens += len(tokens)


class ShardWriter(Tally):
    """A writer of a raw token file that counts the tokens."""

    def __init__(self, path: Path, dtype: np.dtype[Any], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._dtype = dtype
        self._file = path.open("wb")

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            # The file must be on disk before the folder is published.
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, tokens: Tokens) -> None:
        super().write(tokens)
        self._file.write(np.ascontiguousarray(tokens, self._dtype).data)


class WindowDataset(Dataset[NDArray[np.int64]]):
    """Windows over a token stream: `sequence_length` inputs, and targets shifted by one token.

    Window i holds the T + 1 tokens from i*T to i*T + T. Each token but the first is a target exactly once.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        sequence_length: int,
        vocab_size: int | None = None,
        marks_documents: bool = False,
    ) -> None:
        """Take windows of a stream. With `marks_documents`, BEGINS is added to the first token of each document."""
        self.stream, self.num_tokens = stream, stream.num_tokens
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self.marks_documents = marks_documents

    def __len__(self) -> int:
        return max(0, -(-(self.num_tokens - 1) // self.sequence_length))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return window `index`: (T + 1,) int64."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return windows in the order of `indices`: (B, T + 1) int64. A short last window is padded with -1.

        Raises:
            IndexError: a window does not exist.
            DataError: a token is not below `vocab_size`.
        """
        if indices and not (max(indices) < len(self) and min(indices) >= 0):
            raise IndexError(f"windows {list(indices)} of {len(self)}")
        positions, width = np.asarray(indices, np.int64) * self.sequence_length, self.sequence_length + 1
        rows = self.stream.rows(positions, width)
        # An id without an embedding row would cause a device assertion or a wrong loss.
        if self.vocab_size is not None and rows.size and rows.max() >= self.vocab_size:
            number, column = np.argwhere(rows >= self.vocab_size)[0]
            path, position = self.stream.locate(int(positions[number] + column))
            remedy = self.stream.remedy or (
                f", so the file is damaged; remove {path.parent}, and run again: it will be made again"
            )
            raise DataError(
                f"{path}: token {rows[number, column]} at position {position} is not below the vocabulary size "
                f"{self.vocab_size}{remedy}"
            )
        if self.marks_documents and self.stream.documents is not None:
            bounds = np.searchsorted(self.stream.documents, [positions, positions + width])
            for row, position, (low, high) in zip(rows, positions, bounds.T):
                row[self.stream.documents[low:high] - position] += BEGINS
        return rows


Windows = WindowDataset | ConcatDataset[NDArray[np.int64]]
"""Windows of one token stream, or of one for each source of a mixture."""


def recut(windows: Windows, sequence_length: int) -> Windows:
    """Return the same tokens in windows of another length."""
    if isinstance(windows, ConcatDataset):
        return ConcatDataset([recut(each, sequence_length) for each in windows.datasets])  # type: ignore[arg-type]
    other = copy(windows)
    other.sequence_length = sequence_length
    return other


def by_source(windows: WindowDataset, ends: Sequence[int]) -> ConcatDataset[NDArray[np.int64]]:
    """Return windows of one source each. `ends` are the positions after each source in the stream."""
    parts = [copy(windows) for _ in ends]
    for part, (start, end) in zip(parts, pairwise([0, *ends])):
        part.stream, part.num_tokens = windows.stream.cut(start, end), end - start
    return ConcatDataset(parts)


def marks_documents(windows: Windows) -> bool:
    """Return whether rows mark the first token of each document."""
    first = windows.datasets[0] if isinstance(windows, ConcatDataset) else windows
    return getattr(first, "marks_documents", False)


def samples_of(windows: Windows) -> tuple[range, ...]:
    """Return the numbers of the windows of each source of a mixture; empty for one token stream."""
    if not isinstance(windows, ConcatDataset):
        return getattr(windows, "samples_by_source", ())
    return tuple(range(start, end) for start, end in pairwise([0, *windows.cumulative_sizes]))


def joined(sets: Sequence[Any]) -> Any:
    """Return sets of samples as one, with a part for each. One set is itself, and None is for no set."""
    return ConcatDataset(sets) if len(sets) > 1 else next(iter(sets), None)


def parts_of(samples: Any) -> Sequence[Any]:
    """Return the sets that `joined` has joined."""
    return [] if samples is None else getattr(samples, "datasets", [samples])


def collate_windows(
    rows: NDArray[np.int64] | Sequence[NDArray[np.int64]],
    *,
    separator_id: int,
    mask_documents: bool,
    compiled: bool = False,
    marked: bool = False,
) -> JsonRecord:
    """Return a language model batch from rows of T + 1 tokens.

    `input_ids` and `labels` are (B, T) int64. labels[:, t] is the token after input t, or -100 without one.
    `num_targets` is the number of labels that count, an int. `marked` rows are from windows that mark documents; in
    others, the separator begins a document. `mask_documents` adds:

    - `position_ids` (B, T), restarting at each document
    - `document_ids` (B, T), the number of documents begun so far
    - `document_lengths`, see there (also for `compiled`)
    """
    tokens = rows if isinstance(rows, np.ndarray) else np.stack(rows)
    is_start = None
    if mask_documents:
        begins = tokens >= BEGINS if marked else tokens == separator_id
        tokens, is_start = tokens - BEGINS * (begins & marked), begins[:, :-1]
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    num_targets = labels.size
    # Padding occurs only at the end.
    if tokens[:, -1].min() < 0:
        if is_start is not None:  # padding is a separate document
            is_start |= (inputs == PADDING) & (np.roll(inputs, 1, axis=1) != PADDING)
        num_targets -= int(np.count_nonzero(labels == PADDING))
        # Ids without a tokenizer may have no separator.
        inputs[inputs == PADDING] = max(separator_id, 0)
        labels[labels == PADDING] = IGNORED_LABEL
    batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels), "num_targets": num_targets}
    if is_start is not None:
        steps = np.arange(inputs.shape[1])
        starts = np.maximum.accumulate(np.where(is_start, steps, 0), axis=1)
        batch["position_ids"] = torch.from_numpy(steps - starts)
        batch["document_ids"] = torch.from_numpy(np.cumsum(is_start, axis=1, dtype=np.int64))
        batch["document_lengths"] = document_lengths(is_start, compiled=compiled)
    return batch


def document_lengths(is_start: NDArray[np.bool_], *, compiled: bool = False) -> torch.Tensor:
    """Return the lengths of each row's documents, (B, D) int64. Rows with fewer than D documents are padded with 0.

    `is_start` (B, T) is True at the start of a document. The start of a row always counts. Each row sums to T.

    With `compiled`, D is a power of two, so that compiled code sees few shapes, and usually one. Powers of two waste at
    most half of the bounds. The kernel pays for each of them, so a fixed D for any row, which is T, would be slow.
    """
    num_rows, length = is_start.shape
    is_start = is_start.copy()
    is_start[:, 0] = True
    counts = is_start.sum(axis=1)
    most = int(counts.max())
    if compiled:
        most = max(LEAST_COMPILED, 1 << (most - 1).bit_length())
    lengths = np.zeros((num_rows, most), np.int64)
    is_document = np.arange(most) < counts[:, None]
    lengths[is_document] = np.diff(np.flatnonzero(is_start), append=num_rows * length)
    return torch.from_numpy(lengths)
