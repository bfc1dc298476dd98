"""Files of token ids: raw ones (nanoGPT) and those with llm.c's header are read, raw ones are written.

A raw file is little-endian uint16 and nothing else. A header is 256 int32: magic number, version, token count, zeros.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]

_HEADER_INTS = 256
# llm.c, dev/data/data_common.py: magic number -> version, type of the tokens. modded-nanogpt writes the first.
_HEADERS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenFile:
    """Where the tokens of a file lie."""

    path: Path
    dtype: np.dtype[Any]
    num_tokens: int
    offset_bytes: int = 0

    def map(self) -> Tokens:
        """The tokens as an array over the file's pages; nothing is read yet."""
        return map_tokens(self.path, self.dtype, self.num_tokens, self.offset_bytes)


def map_tokens(path: Path, dtype: np.dtype[Any], num_tokens: int, offset_bytes: int = 0) -> Tokens:
    """A file's tokens as a plain array over its pages (indexing an np.memmap costs twice as much: its subclass)."""
    if num_tokens == 0:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset_bytes, shape=(num_tokens,)))


def inspect_token_file(path: Path) -> TokenFile:
    """Find out which kind a `.bin` file is, by its first bytes.

    Raises:
        ValueError: its size is not that of whole tokens, or not what its header says.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = np.frombuffer(file.read(12), dtype="<i4") if num_bytes >= 12 else np.zeros(3, np.int32)
    magic, version, num_tokens = (int(value) for value in start)
    if magic not in _HEADERS:
        if num_bytes % 2:
            raise ValueError(f"{path}: {num_bytes} bytes are no whole number of uint16 tokens; is the file complete?")
        return TokenFile(path, np.dtype("<u2"), num_bytes // 2)
    known_version, dtype = _HEADERS[magic]
    expected_bytes = _HEADER_INTS * 4 + num_tokens * dtype.itemsize
    if version != known_version or num_bytes != expected_bytes:
        raise ValueError(
            f"{path}: its header (magic {magic}, version {version}) says {num_tokens} tokens, {expected_bytes} bytes in "
            f"version {known_version}; the file has {num_bytes} bytes; write it again"
        )
    return TokenFile(path, dtype, num_tokens, _HEADER_INTS * 4)


def token_chunks(files: Sequence[TokenFile], vocab_size: int) -> Iterator[Tokens]:
    """The tokens of all files in order, some millions at a time.

    Raises:
        ValueError: a token is no id of the tokenizer; the text names file and position.
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


def held_out_start(files: Sequence[TokenFile], separator_id: int, eval_fraction: float) -> tuple[int, bool]:
    """Where the held-out tail of a token stream begins, and whether a document begins there.

    The separator nearest to a tail of `eval_fraction` is taken, if the tail is then at most twice as long.
    """
    total = sum(file.num_tokens for file in files)
    target = int(total * (1 - eval_fraction))
    nearest: int | None = None
    file_start = 0
    for file in files:
        tokens = file.map()
        low = max(2 * target - total, 1) - file_start
        high = min(total - 1 - file_start, file.num_tokens)
        for start in range(max(low, 0), high, _CHUNK_TOKENS):
            found = (
                file_start + start + np.flatnonzero(tokens[start : min(start + _CHUNK_TOKENS, high)] == separator_id)
            )
            for position in found[np.argsort(np.abs(found - target))[:1]].tolist():
                if nearest is None or abs(position - target) < abs(nearest - target):
                    nearest = position
        file_start += file.num_tokens
    return (target, False) if nearest is None else (nearest, True)


class ShardWriter:
    """A raw token file being written, with what is counted on the way."""

    def __init__(self, path: Path, dtype: np.dtype[Any], vocab_size: int) -> None:
        self.num_tokens = 0
        self.token_counts = np.zeros(vocab_size, np.int64)
        self._dtype = dtype
        self._file = path.open("wb")

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            if error is None:  # on the disk before the folder is published
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, tokens: Tokens) -> None:
        """Append token ids; they must be below the vocabulary size."""
        counts = np.bincount(tokens, minlength=len(self.token_counts))
        self.token_counts += counts
        self.num_tokens += len(tokens)
        self._file.write(np.ascontiguousarray(tokens, self._dtype).data)


def shard_dtype(vocab_size: int) -> np.dtype[Any]:
    """Two bytes a token where the vocabulary allows it, else four; little-endian."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
