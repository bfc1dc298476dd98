"""Rows of tokens, packed whole into windows of one length, where each row is as if it stood alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from accel_train.data.windows import IGNORED_LABEL

INPUTS, LABELS, POSITIONS, DOCUMENTS = range(4)
"""What the rows of a sample are."""


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens, one after the other in two flat arrays."""

    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    """Whether the loss counts the prediction of this token; the first of a row is predicted from nothing, and never is."""
    starts: NDArray[np.int64]
    """Where each row begins; one more than there are rows: the last is where the last row ends."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions each row takes in a window: its last token is predicted and never read."""
        return np.diff(self.starts) - 1

    @property
    def targets(self) -> NDArray[np.int32]:
        """The tokens that are predicted."""
        return self.tokens[self.is_target]


@dataclass(frozen=True)
class Packing:
    """Which rows share a window."""

    rows: NDArray[np.int64]
    """Row numbers, window after window, rising within each."""
    starts: NDArray[np.int64]
    """Where each window begins in `rows`; one more than there are windows."""

    def __len__(self) -> int:
        return len(self.starts) - 1


def pack(lengths: NDArray[np.int64], capacity: int) -> Packing:
    """Put rows into as few windows as best-fit decreasing finds: the longest first, each where the least room stays.

    A function of the lengths alone, and O(n log n): a million rows take a few seconds. At most 11/9 of the fewest possible
    windows, and with rows of many lengths nearly full ones (Johnson 1973). Windows are numbered by their first row.
    """
    window_of = np.zeros(len(lengths), np.int64)
    windows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: there are windows with room for r more positions
    num_windows = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        assert 0 < length <= capacity, f"row {row} of length {length}"
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            window = windows_by_room[room].pop()
            if not windows_by_room[room]:
                rooms ^= 1 << room
        else:
            room, window = capacity, num_windows
            num_windows += 1
        window_of[row] = window
        if room > length:
            windows_by_room[room - length].append(window)
            rooms |= 1 << (room - length)
    return _in_order(window_of, num_windows)


def one_row_each(num_rows: int) -> Packing:
    """Every row in a window of its own."""
    return Packing(np.arange(num_rows), np.arange(num_rows + 1))


def _in_order(window_of: NDArray[np.int64], num_windows: int) -> Packing:
    _, first_rows = np.unique(window_of, return_index=True)
    number = np.empty(num_windows, np.int64)
    number[np.argsort(first_rows)] = np.arange(num_windows)
    window_of = number[window_of]
    counts = np.bincount(window_of, minlength=num_windows)
    return Packing(np.argsort(window_of, kind="stable"), np.concatenate(([0], np.cumsum(counts))).astype(np.int64))


class PackedRows(Dataset[NDArray[np.int64]]):
    """Windows of `sequence_length` positions that hold whole rows, in memory: 5 bytes a token."""

    def __init__(self, rows: TokenRows, packing: Packing, *, sequence_length: int, padding_id: int) -> None:
        self.rows = rows
        self.packing = packing
        self.sequence_length = sequence_length
        self.padding_id = padding_id
        """Some token's id; nothing attends to it from a row, and it has no target."""

    def __len__(self) -> int:
        return len(self.packing)

    @property
    def fill(self) -> float:
        """The fraction of all positions that hold a row's token."""
        return float(self.rows.lengths.sum() / max(1, len(self) * self.sequence_length))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Window `index`: (4, T) int64, see `INPUTS`, `LABELS`, `POSITIONS`, `DOCUMENTS`.

        The documents of a window are counted from 0; the padding behind them is document -1.

        Raises:
            IndexError: there is no such window.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        rows, starts = self.rows, self.rows.starts
        window = np.empty((4, self.sequence_length), np.int64)
        end = 0
        members = self.packing.rows[self.packing.starts[index] : self.packing.starts[index + 1]]
        for document, row in enumerate(members.tolist()):
            begin, first, last = end, starts[row], starts[row + 1] - 1
            end += int(last - first)
            targets = rows.tokens[first + 1 : last + 1]
            window[INPUTS, begin:end] = rows.tokens[first:last]
            window[LABELS, begin:end] = np.where(rows.is_target[first + 1 : last + 1], targets, IGNORED_LABEL)
            window[POSITIONS, begin:end] = np.arange(end - begin)
            window[DOCUMENTS, begin:end] = document
        window[:, end:] = np.array([[self.padding_id], [IGNORED_LABEL], [0], [-1]])
        window[POSITIONS, end:] = np.arange(self.sequence_length - end)
        return window


def collate_packed(samples: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    """Windows of `PackedRows` to one batch of a language model, with the names of `collate_windows`.

    `input_ids`, `labels` (-100: no target), `position_ids`, `document_ids`, all (B, T) int64; `num_targets`, an int.
    """
    windows = torch.from_numpy(np.stack(samples, axis=1))
    return {
        "input_ids": windows[INPUTS],
        "labels": windows[LABELS],
        "num_targets": _count(windows),
        "position_ids": windows[POSITIONS],
        "document_ids": windows[DOCUMENTS],
    }


def collate_alone(samples: Sequence[NDArray[np.int64]], *, pad_to_multiple_of: int) -> dict[str, Any]:
    """Windows with one row each to a batch that needs no mask: `input_ids` and `labels` (B, longest), and `num_targets`.

    Padding is on the right, and causal attention never looks there; the longest row is rounded up to the multiple.
    """
    windows = torch.from_numpy(np.stack(samples, axis=1))
    longest = int((windows[DOCUMENTS] >= 0).sum(dim=1).max())
    length = min(-(-longest // pad_to_multiple_of) * pad_to_multiple_of, windows.shape[2])
    return {
        "input_ids": windows[INPUTS, :, :length].contiguous(),
        "labels": windows[LABELS, :, :length].contiguous(),
        "num_targets": _count(windows),
    }


def _count(windows: torch.Tensor) -> int:
    return int((windows[LABELS] != IGNORED_LABEL).sum())
