"""Pack rows of tokens whole into windows of one length, in which each row is as if it stood alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.text.tokens import document_lengths

INPUTS, LABELS, POSITIONS, DOCUMENTS = range(4)  # the rows of a sample


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens, one after the other in two flat arrays."""

    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    """True where the loss counts a token's prediction; never at the first of a row, which is predicted from nothing."""
    starts: NDArray[np.int64]
    """The start of each row, and the end of the last."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions each row takes in a window: its last token is predicted and never read."""
        return np.diff(self.starts) - 1

    @property
    def targets(self) -> NDArray[np.int32]:
        """The tokens whose prediction counts."""
        return self.tokens[self.is_target]


Windows = Sequence[NDArray[np.int64]]
"""The numbers of the rows in each window, rising."""


def pack(lengths: NDArray[np.int64], capacity: int) -> Windows:
    """Put rows into as few windows as best-fit decreasing finds: the longest first, each where the least room stays.

    A function of the lengths alone, and O(n log n): a million rows take a few seconds. At most 11/9 of the fewest possible
    windows, and with rows of many lengths nearly full ones (Johnson 1973). Windows come in the order of their first rows.
    """
    windows: list[list[int]] = []
    windows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: there are windows with room for r more positions
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
            room, window = capacity, len(windows)
            windows.append([])
        windows[window].append(row)
        if room > length:
            windows_by_room[room - length].append(window)
            rooms |= 1 << (room - length)
    return sorted([np.sort(rows) for rows in windows], key=lambda rows: int(rows[0]))


class PackedRows(Dataset[NDArray[np.int64]]):
    """Windows of `sequence_length` positions that hold whole rows, in memory: 5 bytes a token."""

    def __init__(self, rows: TokenRows, windows: Windows, *, sequence_length: int, padding_id: int) -> None:
        self.rows, self.windows, self.sequence_length = rows, windows, sequence_length
        self.padding_id = padding_id  # some token's id; nothing attends to it from a row, and it has no target

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def fill(self) -> float:
        """The fraction of all positions that hold a row's token."""
        return float(self.rows.lengths.sum() / max(1, len(self) * self.sequence_length))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return window `index`: (4, T) int64, see `INPUTS`, `LABELS`, `POSITIONS`, `DOCUMENTS`.

        The documents of a window are counted from 0; the padding behind them is document -1.

        Raises:
            IndexError: there is no such window.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        rows, starts = self.rows, self.rows.starts
        window = np.empty((4, self.sequence_length), np.int64)
        end = 0
        for document, row in enumerate(self.windows[index].tolist()):
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


def collate_packed(samples: Sequence[NDArray[np.int64]], *, pad_to_multiple_of: int | None = None) -> dict[str, Any]:
    """Return one batch of a language model from windows of `PackedRows`, with the names of `collate_windows`.

    `input_ids`, `labels` (-100: no target), `position_ids`, `document_ids`, all (B, T) int64; `document_lengths` (B, D) int64, of
    which the padding is one; `num_targets`, an int.
    `pad_to_multiple_of` is for windows with one row each: they need no mask, and so neither positions nor documents (causal
    attention never looks at padding on the right), and are cut to the longest row, rounded up.
    """
    windows = torch.from_numpy(np.stack(samples, axis=1))
    num_targets = int((windows[LABELS] != IGNORED_LABEL).sum())
    if pad_to_multiple_of is None:
        names = {"input_ids": INPUTS, "labels": LABELS, "position_ids": POSITIONS, "document_ids": DOCUMENTS}
        lengths = document_lengths((windows[POSITIONS] == 0).numpy())
        batch = {name: windows[row] for name, row in names.items()}
        return {**batch, "document_lengths": lengths, "num_targets": num_targets}
    longest = int((windows[DOCUMENTS] >= 0).sum(dim=1).max())
    length = min(-(-longest // pad_to_multiple_of) * pad_to_multiple_of, windows.shape[2])
    inputs, labels = windows[INPUTS, :, :length].contiguous(), windows[LABELS, :, :length].contiguous()
    return {"input_ids": inputs, "labels": labels, "num_targets": num_targets}
