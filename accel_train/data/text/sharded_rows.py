"""Rows in shards that are encoded when they are first read, as text is (`shards.py`).

A shard holds the encoded rows of `SHARD_BYTES` of the sources: arrays by name in one Arrow file, memory-mapped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from pyarrow.feather import read_table, write_feather

from accel_train.core.errors import setting_error
from accel_train.core.format import format_bytes
from accel_train.core.json_io import json_digest
from accel_train.core.version import __version__
from accel_train.data import cache
from accel_train.data.encoding import encoding_of, has_parts
from accel_train.data.sources import Source, file_kind, files_of, num_bytes_of
from accel_train.data.tables import resolve_both
from accel_train.data.text.documents import Split
from accel_train.data.text.kept import as_table
from accel_train.data.text.rows_cache import READ_LATER
from accel_train.data.text.shards import SHOWN, WINDOW_BITS, Cut, Read, ShardedWindows, Shards, cut
from accel_train.data.text.tokens import joined
from accel_train.recipe.data import BlockData, Data

ROWS_AT_ONCE_UP_TO_BYTES = 1 << 30
"""Rows up to which `data.order: auto` encodes everything before training. Chats take 20 times their size of memory."""
ESTIMATED = "the number of samples to train on is an estimate from the first shards of a source"

Encode = Callable[[Sequence[Source]], Iterable[tuple[Any, ...]]]


@dataclass(frozen=True)
class RowShards(Shards):
    """The shards of rows."""

    encode: Encode
    """Function that returns the encoded rows of sources that are for training, as tuples (`as_table`)."""
    samples_of: Callable[[Sequence[Any]], Any]
    """Function that returns the samples of encoded rows, with a length, from their columns."""

    def stream(self, number: int) -> Any:
        """Return the samples of a shard, memory-mapped."""
        return self.samples_of(read_table(arrow.BufferReader(self.content(number))).columns)

    def choose_encoder(self) -> None:
        """Do nothing: rows have their own encoder."""

    def _write(self, sources: Sequence[Source], building: Path) -> None:
        write_feather(as_table(self.encode(sources)), building, "uncompressed")


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

    def _count(self, number: int) -> int:
        return len(self.opened(number))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return samples in the order of `indices`."""
        return [self.opened(index >> WINDOW_BITS)[index & (1 << WINDOW_BITS) - 1] for index in indices]

    def first(self) -> Any:
        """Return the samples of some shards at equal distances."""
        count = len(self.shards.cut)
        return joined([self.opened(number) for number in range(0, count, -(-count // SHOWN))])


def cut_rows(data: Data, reasons: Mapping[str, bool], read: Read) -> tuple[Cut | None, list[str]]:
    """Return the training rows in shards, or None if they are not read in blocks, and a note on a choice.

    `reasons` are as for `choose_blocks`, `read` as for `Cut`.

    Raises:
        ValueError: as for `resolve_both`.
        SettingError: as for `choose_blocks`.
    """
    if not (isinstance(data, BlockData) and data.is_for_training):
        return None, []
    sources = resolve_both(data)[0]
    kinds = {"jsonl", "parquet", "csv", None}
    reasons = {
        **reasons,
        "data.group_column needs the groups of all rows": getattr(data, "group_column", None) is not None,
        "rows are read in blocks from jsonl, parquet, csv, and data sets alone": any(
            source.kind not in kinds for source in sources
        ),
    }
    is_cut, note = choose_blocks(data, sources, reasons, ROWS_AT_ONCE_UP_TO_BYTES)
    return cut(sources, data, read) if is_cut else None, note


def row_shards(
    data: BlockData,
    whole: Cut,
    first: str,
    contents: Sequence[object],
    encode: Encode,
    samples_of: Callable[[Sequence[Any]], Any],
) -> tuple[RowShards, str, dict[Path, Path]]:
    """Return the shards of rows, the fingerprint of all rows, and the files that keep the digests of their files.

    `first` is the fingerprint of the first encoded rows, which tell what settings change. `contents` is all else that
    determines the encoding.
    """
    digests = {file: cache.sample_digest(file) for file in files_of(whole.sources)}
    names = [source.dataset and source.dataset._fingerprint for source in whole.sources]
    fingerprint = json_digest([first, [*names, *digests.values(), *contents], whole.rule])
    root, settings = cache.cache_folder(data), data.model_dump(mode="json", exclude=READ_LATER)
    folder = root / json_digest([fingerprint, settings, __version__])[:32] / "shards"
    unused: Any = None
    shards = RowShards(folder, whole, unused, Split(), np.dtype(np.int32), encode, samples_of)
    return shards, fingerprint, {file: root / "pinned" / digest for file, digest in digests.items()}


def choose_blocks(
    data: BlockData, sources: Sequence[Source], reasons: Mapping[str, bool], most_bytes: int
) -> tuple[bool, list[str]]:
    """Return whether training data is read in blocks, and a note on a choice by its size.

    `reasons` are further reasons against it, as sentences with whether they hold.

    Raises:
        SettingError: `data.order` is blocks, or `data.max_broken` is set, and a reason holds.
    """
    most, files = data.max_broken if data.is_for_training else 0, files_of(sources)
    are_lines = all(source.files for source in sources)
    are_lines &= not most or all(file_kind(file) == "jsonl" and has_parts(encoding_of(file, data)) for file in files)
    reasons = {
        "it is for lines of jsonl, in UTF-8, UTF-16, or an encoding of one byte": most > 0 and not are_lines,
        f"data.last_batch is {data.last_batch}": data.last_batch != "carry",
        "data.group_by_length needs the lengths of all rows": data.group_by_length,
        **reasons,
    }
    reason = next((why for why, holds in reasons.items() if holds), None)
    if most:
        if reason or data.order == "shuffled":
            remedy = f"{reason}. Leave it out, and repair the lines"
            raise setting_error("data.max_broken", most, remedy if reason else "it needs data.order: blocks. Set that")
        why = "data.max_broken leaves out lines when they are read"
        return True, [f"data.order: blocks, because {why}"] if data.order == "auto" else []
    if data.order != "auto":
        if data.order == "blocks" and reason:
            raise setting_error("data.order", "blocks", f"{reason}. Set data.order: shuffled")
        return data.order == "blocks", []
    num_bytes = sum(map(num_bytes_of, sources))
    if reason or num_bytes <= most_bytes:
        return False, []
    size = f"{format_bytes(num_bytes)} of text (more than {format_bytes(most_bytes)})"
    return True, [f"data.order: blocks, because of {size}: it is tokenized while the run trains, and read in blocks"]
