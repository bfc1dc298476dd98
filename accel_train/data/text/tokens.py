"""Token ids on disk and windows over them. Reads raw (nanoGPT) and llm.c files, and writes raw files.

A raw file is little-endian uint16 without a header. An llm.c header is 256 int32: magic number, version, token count,
zeros.
"""

import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from accel_train.core.errors import DataError
from accel_train.core.state import JsonRecord
from accel_train.data.labels import IGNORED_LABEL

Tokens = NDArray[np.integer[Any]]

_HEADER_INTS = 256
# llm.c, dev/data/data_common.py: magic number -> version, token type. modded-nanogpt writes the first.
_HEADERS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_CHUNK_TOKENS = 1 << 22
# Fills a short last window. Never a token id.
PADDING = -1
LEAST_COMPILED = 16
"""Smallest number of documents that compiled code expects in a row. Rows with fewer have empty ones."""


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens and the position of the tokens in it."""

    path: Path
    dtype: np.dtype[Any]
    num_tokens: int
    offset_bytes: int = 0

    def map(self) -> Tokens:
        """Return the tokens as a plain array over the file's pages, without reading them."""
        if self.num_tokens == 0:
            return np.zeros(0, self.dtype)
        # Indexing the np.memmap subclass takes twice as long.
        pages = np.memmap(self.path, self.dtype, mode="r", offset=self.offset_bytes, shape=(self.num_tokens,))
        return np.asarray(pages)


def inspect_token_file(path: Path) -> TokenFile:
    """Return the format and size of a `.bin` file, detected from its first bytes.

    Raises:
        ValueError: the file size does not match whole tokens or the header.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = np.frombuffer(file.read(12), dtype="<i4") if num_bytes >= 12 else np.zeros(3, np.int32)
    magic, version, num_tokens = (int(value) for value in start)
    if magic not in _HEADERS:
        if num_bytes % 2:
            raise ValueError(
                f"{path}: its size in bytes, {num_bytes}, is not a whole number of uint16 tokens; is the file complete?"
            )
        return TokenFile(path, np.dtype("<u2"), num_bytes // 2)
    known_version, dtype = _HEADERS[magic]
    expected_bytes = _HEADER_INTS * 4 + num_tokens * dtype.itemsize
    if version != known_version or num_bytes != expected_bytes:
        raise ValueError(
            f"{path}: its header (magic {magic}, version {version}) says {num_tokens} tokens, {expected_bytes} bytes "
            f"in version {known_version}; the file has {num_bytes} bytes; write it again"
        )
    return TokenFile(path, dtype, num_tokens, _HEADER_INTS * 4)


def token_chunks(files: Sequence[TokenFile], vocab_size: int) -> Iterator[Tokens]:
    """Yield the tokens of all files in order, some millions at a time.

    Raises:
        ValueError: a token is not an id of the tokenizer; the message names file and position.
    """
    for file in files:
        tokens = file.map()
        for start in range(0, file.num_tokens, _CHUNK_TOKENS):
            chunk = tokens[start : start + _CHUNK_TOKENS]
            if int(chunk.max()) >= vocab_size:
                position = int(np.argmax(chunk >= vocab_size))
                raise ValueError(
                    f"{file.path}: token {int(chunk[position])} at position {start + position} is not below the "
                    f"tokenizer's vocabulary size {vocab_size}; set `tokenizer` to the one that wrote the file"
                )
            yield chunk


def tail_start(files: Sequence[TokenFile], separator_id: int, eval_fraction: float) -> tuple[int, bool]:
    """Return the start of the held-out tail of a token stream, and whether a document begins there.

    The start is the separator nearest to a tail of `eval_fraction`, if the tail is at most twice as long.
    """
    total = sum(file.num_tokens for file in files)
    target = int(total * (1 - eval_fraction))
    low, high, file_start = max(2 * target - total, 1), total - 1, 0
    found = [np.zeros(0, np.int64)]
    for file in files:
        start, stop = max(low - file_start, 0), min(high - file_start, file.num_tokens)
        for begin in range(start, stop, _CHUNK_TOKENS):
            chunk = file.map()[begin : min(begin + _CHUNK_TOKENS, stop)]
            found.append(file_start + begin + np.flatnonzero(chunk == separator_id))
        file_start += file.num_tokens
    separators = np.concatenate(found)
    if not len(separators):
        return target, False
    return int(separators[np.abs(separators - target).argmin()]), True


class ShardWriter:
    """A writer of a raw token file that counts the tokens."""

    def __init__(self, path: Path, dtype: np.dtype[Any], vocab_size: int) -> None:
        self.num_tokens = 0
        self.token_counts = np.zeros(vocab_size, np.int64)
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
        """Append token ids below the vocabulary size."""
        counts = np.bincount(tokens, minlength=len(self.token_counts))
        self.token_counts += counts
        self.num_tokens += len(tokens)
        self._file.write(np.ascontiguousarray(tokens, self._dtype).data)


class WindowDataset(Dataset[NDArray[np.int64]]):
    """Windows over a token stream: `sequence_length` inputs, and targets shifted by one token.

    Window i holds the T + 1 tokens from i*T to i*T + T. Each token but the first is a target exactly once. Each process
    maps the file on first use. The pickle for a DataLoader worker is only a path and three numbers.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: np.dtype[Any],
        num_tokens: int,
        sequence_length: int,
        vocab_size: int | None = None,
        first_token: int = 0,
    ) -> None:
        self.path, self.dtype, self.num_tokens, self.first_token = path, dtype, num_tokens, first_token
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self._tokens: Tokens | None = None
        # A view of the tokens: (whole windows, T + 1).
        self._whole: Tokens = np.zeros((0, 0), dtype)

    def __len__(self) -> int:
        return max(0, -(-(self.num_tokens - 1) // self.sequence_length))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None, "_whole": None}

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return window `index`: (T + 1,) int64."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return windows in the order of `indices`: (B, T + 1) int64. A short last window is padded with -1.

        Raises:
            IndexError: a window does not exist.
            DataError: a token is not below `vocab_size`.
        """
        last, length = max(indices, default=0), self.sequence_length
        if indices and not (last < len(self) and min(indices) >= 0):
            raise IndexError(f"windows {list(indices)} of {len(self)}")
        if self._tokens is None:
            start = self.first_token * self.dtype.itemsize
            self._tokens = tokens = TokenFile(self.path, self.dtype, self.num_tokens, start).map()
            self._whole = sliding_window_view(tokens, length + 1)[::length] if len(tokens) > length else tokens[:0]
        if last < len(self._whole):
            rows = self._whole[indices].astype(np.int64)
        else:
            positions = np.asarray(indices, np.int64)[:, None] * length + np.arange(length + 1)
            inside = np.minimum(positions, self.num_tokens - 1)
            rows = np.where(positions == inside, self._tokens[inside].astype(np.int64), PADDING)
        # An id without an embedding row would cause a device assertion or a wrong loss.
        if self.vocab_size is not None and rows.size and rows.max() >= self.vocab_size:
            number, column = np.argwhere(rows >= self.vocab_size)[0]
            raise DataError(
                f"{self.path}: token {rows[number, column]} at position "
                f"{self.first_token + indices[number] * length + column} is not "
                f"below the vocabulary size {self.vocab_size}, so the file is damaged; remove {self.path.parent}, "
                f"and run again: it will be made again"
            )
        return rows


Windows = WindowDataset | ConcatDataset[NDArray[np.int64]]
"""Windows of one token stream, or of one for each source of a mixture."""


def recut(windows: Windows, sequence_length: int) -> Windows:
    """Return the same tokens in windows of another length."""
    if isinstance(windows, ConcatDataset):
        return ConcatDataset([recut(each, sequence_length) for each in windows.datasets])  # type: ignore[arg-type]
    other = copy(windows)
    other.sequence_length, other._tokens = sequence_length, None
    return other


def samples_of(windows: Windows) -> tuple[range, ...]:
    """Return the numbers of the windows of each source of a mixture; empty for one token stream."""
    if not isinstance(windows, ConcatDataset):
        return ()
    return tuple(range(start, end) for start, end in pairwise([0, *windows.cumulative_sizes]))


def collate_windows(
    rows: NDArray[np.int64] | Sequence[NDArray[np.int64]],
    *,
    separator_id: int,
    mask_documents: bool,
    compiled: bool = False,
) -> JsonRecord:
    """Return a language model batch from rows of T + 1 tokens.

    `input_ids` and `labels` are (B, T) int64. labels[:, t] is the token after input t, or -100 without one.
    `num_targets` is the number of labels that count, an int. `mask_documents` adds:

    - `position_ids` (B, T), restarting at each separator
    - `document_ids` (B, T), the number of separators so far
    - `document_lengths`, see there (also for `compiled`)
    """
    tokens = rows if isinstance(rows, np.ndarray) else np.stack(rows)
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    num_targets = labels.size
    is_start = inputs == separator_id if mask_documents else None
    # Padding occurs only at the end.
    if tokens[:, -1].min() < 0:
        if is_start is not None:  # padding is a separate document
            is_start |= (inputs == PADDING) & (np.roll(inputs, 1, axis=1) != PADDING)
        num_targets -= int(np.count_nonzero(labels == PADDING))
        inputs[inputs == PADDING] = separator_id
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
