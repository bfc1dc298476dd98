"""Windows over a token shard, and the batches that a language model trains on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch.utils.data import Dataset

from accel_train.data.token_files import Tokens, map_tokens
from accel_train.state import DataError

PADDING = -1
"""What fills a short last window: never the id of a token."""
IGNORED_LABEL = -100
"""A position that has no target, as `torch.nn.functional.cross_entropy` marks it."""


class WindowDataset(Dataset[NDArray[np.int64]]):
    """A token stream in windows of `sequence_length` inputs and, one token further, their targets.

    Window i holds tokens i*T to i*T + T, T + 1 of them, so that each token but the first is a target exactly once.
    The file is mapped on first use, in each process: pickled to a DataLoader's worker, it is a path and three numbers.
    """

    def __init__(
        self, path: Path, *, dtype: np.dtype[Any], num_tokens: int, sequence_length: int, vocab_size: int | None = None
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.num_tokens = num_tokens
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self._tokens: Tokens | None = None
        self._full_windows: Tokens | None = None

    def __len__(self) -> int:
        return max(0, -(-(self.num_tokens - 1) // self.sequence_length))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None, "_full_windows": None}

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Window `index`: (T + 1,) int64."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Windows in the order asked for: (B, T + 1) int64; a short last one ends in -1.

        Raises:
            IndexError: there is no such window.
            DataError: a token is not below `vocab_size`.
        """
        if self._full_windows is None:
            self._map()
        assert self._full_windows is not None
        wanted = np.asarray(indices, np.int64)
        if len(indices) and not (min(indices) >= 0 and max(indices) < len(self._full_windows)):
            return self._checked(self._with_short_window(wanted), wanted)
        return self._checked(self._full_windows[wanted].astype(np.int64), wanted)

    def _checked(self, rows: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows; an id that the embedding has no row for would be an assertion of the device, or a wrong loss."""
        if self.vocab_size is not None and rows.size and rows.max() >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0]
            raise DataError(
                f"{self.path}: token {rows[row, column]} at position {wanted[row] * self.sequence_length + column} is not below "
                f"the vocabulary size {self.vocab_size}, so the file is damaged; remove {self.path.parent}, and run again: it "
                "is made anew"
            )
        return rows

    def _map(self) -> None:
        self._tokens = map_tokens(self.path, self.dtype, self.num_tokens)
        if self.num_tokens > self.sequence_length:
            self._full_windows = sliding_window_view(self._tokens, self.sequence_length + 1)[:: self.sequence_length]
        else:
            self._full_windows = np.zeros((0, self.sequence_length + 1), self.dtype)

    def _with_short_window(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        assert self._tokens is not None
        assert self._full_windows is not None
        if wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"window {wanted.tolist()} of {len(self)}")
        num_full = len(self._full_windows)
        rows = np.full((len(wanted), self.sequence_length + 1), PADDING, np.int64)
        full = wanted < num_full
        rows[full] = self._full_windows[wanted[full]]
        rest = self._tokens[num_full * self.sequence_length :]
        rows[~full, : len(rest)] = rest
        return rows


def collate_windows(
    rows: NDArray[np.int64] | Sequence[NDArray[np.int64]], *, separator_id: int, mask_documents: bool
) -> dict[str, Any]:
    """Rows of T + 1 tokens to one batch of a language model.

    `input_ids` (B, T) int64; `labels` (B, T) int64, where labels[:, t] is the token after input t, or -100 where there
    is none; `num_targets`, the int number of labels that count. With `mask_documents` also `position_ids` (B, T), which
    restart at each separator, and `document_ids` (B, T), which count the separators of the row up to there.
    """
    tokens = rows if isinstance(rows, np.ndarray) else np.stack(rows)
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    num_targets = labels.size
    is_start = inputs == separator_id if mask_documents else None
    if tokens[:, -1].min() < 0:  # padding is at the end, if anywhere
        if is_start is not None:  # it is one document of its own
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
    return batch
