"""Rows in shards that are encoded when they are first read, as text is (`shards.py`).

A shard holds the encoded rows of `SHARD_BYTES` of the sources: arrays by name in one Arrow file, memory-mapped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow.feather import read_table, write_feather

from accel_train.core.errors import setting_error
from accel_train.core.format import format_bytes
from accel_train.data.sources import Source, num_bytes_of
from accel_train.data.text.shards import SHOWN, WINDOW_BITS, ShardedWindows, Shards
from accel_train.data.text.tokens import joined
from accel_train.recipe.data import WindowData

ROWS_AT_ONCE_UP_TO_BYTES = 1 << 30
"""Rows up to which `data.order: auto` encodes everything before training. Chats take 20 times their size of memory."""

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RowShards(Shards):
    """The shards of rows."""

    encode: Callable[[Sequence[Source]], Arrays]
    """Function that returns the encoded rows of sources that are for training, as arrays. Of bool, a copy is read."""
    samples_of: Callable[[Arrays], Any] = len
    """Function that returns the samples of encoded rows, with a length."""

    def stream(self, number: int) -> Any:
        """Return the samples of a shard, memory-mapped."""
        table = read_table(arrow.BufferReader(self.content(number)))
        columns = {name: table[name].chunk(0).values.to_numpy(zero_copy_only=False) for name in table.column_names}
        return self.samples_of(columns)

    def choose_encoder(self) -> None:
        """Do nothing: rows have their own encoder."""

    def _write(self, sources: Sequence[Source], building: Path) -> None:
        columns = {name: [array] for name, array in self.encode(sources).items()}
        write_feather(arrow.table(columns), building, "uncompressed")


class ShardedRows(ShardedWindows):
    """Samples of rows. Sample i of shard s is sample s << 32 | i."""

    def __init__(self, shards: RowShards) -> None:
        """Take the samples of shards. Makes those up to the first with a sample, for an estimate of their number."""
        super().__init__(shards, 1, [])
        self.shown = self.first_sample() >> WINDOW_BITS
        """First shard with a sample."""
        self.sizes = [*map(self._estimate, shards.cut.spans)]

    def _estimate(self, span: range) -> int:
        counts = ((number - span.start + 1, len(self.opened(number))) for number in span)
        return next((count * len(span) // read for read, count in counts if count), 0)

    def counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of samples of each shard, once all of them are made."""
        self.shards.make_all(numbers.tolist())
        return np.array([len(self.opened(number)) for number in numbers.tolist()])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return samples in the order of `indices`."""
        return [self.opened(index >> WINDOW_BITS)[index & (1 << WINDOW_BITS) - 1] for index in indices]

    def first(self) -> Any:
        """Return the samples of some shards at equal distances."""
        count = len(self.shards.cut)
        return joined([self.opened(number) for number in range(0, count, -(-count // SHOWN))])


def choose_blocks(
    data: WindowData, sources: Sequence[Source], reasons: Mapping[str, bool], most_bytes: int
) -> tuple[bool, list[str]]:
    """Return whether training data is read in blocks, and a note on a choice by its size.

    `reasons` are further reasons against it, as sentences with whether they hold.

    Raises:
        SettingError: `data.order` is blocks, and a reason holds.
    """
    reasons = {
        f"data.last_batch is {data.last_batch}": data.last_batch != "carry",
        **reasons,
    }
    reason = next((why for why, holds in reasons.items() if holds), None)
    if data.order != "auto":
        if data.order == "blocks" and reason:
            raise setting_error("data.order", "blocks", f"{reason}. Set data.order: shuffled")
        return data.order == "blocks", []
    num_bytes = sum(map(num_bytes_of, sources))
    if reason or num_bytes <= most_bytes:
        return False, []
    size = f"{format_bytes(num_bytes)} of text (more than {format_bytes(most_bytes)})"
    return True, [f"data.order: blocks, because of {size}: it is tokenized while the run trains, and read in blocks"]
