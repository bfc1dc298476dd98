"""Pack whole token rows into windows of one length. Each row in a window behaves as if it were alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.text.sharded_rows import ESTIMATED, RowShards, ShardedRows
from accel_train.data.text.shards import sharded
from accel_train.data.text.tokens import document_lengths, joined, parts_of
from accel_train.model.kernels.attention import CAUSAL_SDPA, choose_attention
from accel_train.recipe.schema import Recipe
from accel_train.task import Collated, TaskData
from accel_train.tasks.causal_lm.config import CausalLMData

if TYPE_CHECKING:
    from accel_train.tasks.causal_lm.data import RowCorpus

# Indices of the rows of a sample.
INPUTS, LABELS, POSITIONS, DOCUMENTS = range(4)


@dataclass(frozen=True)
class TokenRows:
    """Token rows, concatenated in two flat arrays."""

    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    """Whether the loss counts the prediction of a token. False for the first token of a row, without context."""
    starts: NDArray[np.int64]
    """Start of each row, plus the end of the last row."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the positions that each row takes in a window. The last token is predicted but never read."""
        return np.diff(self.starts) - 1

    @property
    def targets(self) -> NDArray[np.int32]:
        """Return the tokens whose prediction counts."""
        return self.tokens[self.is_target]


Windows = Sequence[NDArray[np.int64]]
"""Row numbers of each window, ascending."""


def pack(lengths: NDArray[np.int64], capacity: int) -> Windows:
    """Return windows that hold the rows, packed by best-fit decreasing.

    Longest rows go first, each into the window with the least remaining room. The result depends only on the lengths.
    The cost is O(n log n): a million rows take a few seconds. The number of windows is at most 11/9 of the optimum
    (Johnson 1973), and windows are nearly full if lengths vary. Windows are ordered by their first rows.
    """
    windows: list[list[int]] = []
    windows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set if a window has room for r more positions.
    rooms = 0
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


@dataclass(eq=False)
class PackedRows(Dataset[NDArray[np.int64]]):
    """Windows of `sequence_length` positions with whole rows, in memory. A token takes 5 bytes."""

    rows: TokenRows
    windows: Windows
    sequence_length: int
    padding_id: int
    """Any token id works: no row attends to padding, and padding has no targets."""

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def fill(self) -> float:
        """Return the fraction of positions that hold a token of a row."""
        return float(self.rows.lengths.sum() / max(1, len(self) * self.sequence_length))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return window `index`, (4, T) int64: `INPUTS`, `LABELS`, `POSITIONS`, `DOCUMENTS`.

        Documents of a window are numbered from 0. Trailing padding is document -1.

        Raises:
            IndexError: the window does not exist.
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


def collate_packed(
    samples: Sequence[NDArray[np.int64]], *, pad_to_multiple_of: int | None = None, compiled: bool = False
) -> Collated:
    """Return a language model batch from windows of `PackedRows`, with the names of `collate_windows`.

    `input_ids`, `labels` (-100: no target), `position_ids` and `document_ids` are (B, T) int64. `document_lengths` is
    (B, D) int64 and includes the padding as a document; `compiled` is for `document_lengths`. `num_targets` is an int.

    Set `pad_to_multiple_of` for windows of one row each. The batch is then cut to the longest row, rounded up. It has
    no positions or documents, because causal attention never sees padding on the right.
    """
    windows = torch.from_numpy(np.stack(samples, axis=1))
    num_targets = int((windows[LABELS] != IGNORED_LABEL).sum())
    if pad_to_multiple_of is None:
        names = {"input_ids": INPUTS, "labels": LABELS, "position_ids": POSITIONS, "document_ids": DOCUMENTS}
        lengths = document_lengths((windows[POSITIONS] == 0).numpy(), compiled=compiled)
        batch = {name: windows[row] for name, row in names.items()}
        return {**batch, "document_lengths": lengths, "num_targets": num_targets}
    longest = int((windows[DOCUMENTS] >= 0).sum(dim=1).max())
    length = min(-(-longest // pad_to_multiple_of) * pad_to_multiple_of, windows.shape[2])
    inputs, labels = windows[INPUTS, :, :length].contiguous(), windows[LABELS, :, :length].contiguous()
    return {"input_ids": inputs, "labels": labels, "num_targets": num_targets}


def rows_as_samples(recipe: Recipe, corpus: "RowCorpus", config: PreTrainedConfig, progress: bool = False) -> TaskData:
    """Return the data of a run on tokenized rows, packed or one row per sample.

    Rows in shards are packed within a shard. The facts on them are of the first shard with a sample.
    """
    packed, data = can_keep_rows_apart(recipe, config), CausalLMData.of(recipe.data)
    length = data.sequence_length

    def rows_in(columns: Sequence[Any]) -> TokenRows:
        return TokenRows(*(each.chunk(0).values.to_numpy(zero_copy_only=False) for each in columns))

    def windows(rows: TokenRows) -> PackedRows:
        rows_of = pack(rows.lengths, length) if packed.value else list(np.arange(len(rows))[:, None])
        return PackedRows(rows, rows_of, sequence_length=length, padding_id=corpus.separator_id)

    held_out, in_first = joined([*map(windows, parts_of(corpus.eval))]), ""
    if isinstance(corpus.train, RowShards):
        train: Any = ShardedRows(replace(corpus.train, samples_of=lambda columns: windows(rows_in(columns))))
        parts, in_first = [train.opened(train.shown)], f"estimated from shard {train.shown}: "
        if not train.count_needed(recipe, progress):
            corpus.facts.notes.append(ESTIMATED)
    else:
        parts = [*map(windows, parts_of(corpus.train))]
        train = joined(parts)
    num_rows, num_samples = sum(len(each.rows) for each in parts), sum(map(len, parts))
    multiple = None if packed.value else data.pad_to_multiple_of
    num_read = sum(int(each.rows.lengths.sum()) for each in parts)
    num_positions = num_samples * length if packed.value else num_read
    fill = num_read / max(1, num_samples * length)
    note = f"each row is a separate sample, padded: {packed.reason}"
    if packed.value:
        note = (
            f"{in_first}{format_count(num_rows, 'row')} packed into {format_count(num_samples, 'window')} of {length} "
            f"tokens, {fill:.1%} full; attention and positions stay within a row"
        )
    facts = corpus.facts
    facts.num_train, facts.num_eval = len(train), 0 if held_out is None else len(held_out)
    num_targets = sum(each.rows.is_target.sum() for each in parts)
    facts.positions_per_target = num_positions / num_targets
    facts.train_targets = int(num_targets * len(train) / num_samples)
    facts.others["fill"] = fill if packed.value else None
    facts.notes.append(note)
    return TaskData(
        train=train,
        eval=held_out,
        collate=partial(collate_packed, pad_to_multiple_of=multiple, compiled=recipe.precision.compile is not False),
        fingerprint=corpus.fingerprint,
        facts=facts,
        reading_is_free=True,
        source=corpus,
        lengths_vary=not packed.value,
        large_files=corpus.large_files,
        **sharded(train),
    )


def shares_windows(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """Return whether documents or fine-tuning rows share windows and are masked from each other."""
    data = CausalLMData.of(recipe.data)
    return data.mask_documents if data.format == "text" else can_keep_rows_apart(recipe, config).value


def can_keep_rows_apart(recipe: Recipe, config: PreTrainedConfig) -> Choice[bool]:
    """Return whether rows may share a window. This requires attention and positions known to separate them exactly."""
    implementation = recipe.model.attn_implementation
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return Choice(False, f"{config.model_type} is not among the models checked for packing")
    if implementation not in ("auto", "sdpa"):
        return Choice(False, f"attn_implementation {implementation} is not checked for packing")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    choice = choose_attention("auto", model_class, config, CausalLMData.of(recipe.data).sequence_length)
    return Choice(choice.value == CAUSAL_SDPA, choice.reason)
