"""Pad batches of token ids of different lengths, and digest samples that are kept in memory."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def padded(rows: Sequence[NDArray[Any]], width: int, fill: int) -> Tensor:
    """Return rows of integers as (N, width) int64, padded on the right."""
    table = np.full((len(rows), width), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return torch.from_numpy(table)


def padded_inputs(ids: Sequence[NDArray[Any]], *, pad_id: int, multiple: int, max_length: int) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, (N, T) int64.

    T is the longest length, rounded up to a multiple of `multiple`, and at most `max_length`.
    """
    longest = max(map(len, ids))
    width = min(-(-longest // multiple) * multiple, max_length)
    return {
        "input_ids": padded(ids, width, pad_id),
        "attention_mask": padded([np.ones(len(row), dtype=np.int64) for row in ids], width, 0),
    }


def joined_arrays(rows: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return rows of different lengths as two arrays: the concatenated rows and their offsets."""
    offsets = np.cumsum([0, *map(len, rows)])
    return [np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64), offsets]


def samples_digest(names: Iterable[str], arrays: Iterable[NDArray[Any]]) -> str:
    """Return a hex digest of names and of arrays with their shapes and types."""
    digest = hashlib.blake2b(digest_size=16)
    for array in [np.frombuffer("\x1e".join(names).encode(), dtype=np.uint8), *arrays]:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
