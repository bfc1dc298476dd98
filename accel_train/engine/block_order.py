"""The order of text that is tokenized while a run trains: blocks of shards, and samples shuffled within a block.

The shards of an epoch are a keyed permutation, cut into blocks: small ones first, so that training starts at once. How
many samples a shard has is known once it is made. Positions therefore count through the blocks from the first one on:
the same samples for any number of processes, and for any state of the cache.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from accel_train.core.errors import DataError, setting_error
from accel_train.core.format import format_bytes
from accel_train.data.order import DataOrder, Indices, permute
from accel_train.data.text.shards import WINDOW_BITS, ShardedWindows
from accel_train.recipe.schema import Recipe

FIRST_SHARDS, NUM_DOUBLINGS = 8, 5
"""Number of shards of the first block. Each of the next blocks has twice as many, until it is doubled often enough."""

SHARDS_AHEAD = 2 * FIRST_SHARDS << NUM_DOUBLINGS
"""Number of shards after those that are read which other processes may make: two of the largest blocks."""


class Block(NamedTuple):
    """Some shards of an epoch, in order."""

    epoch: int
    first: int
    """Place of the first shard in the epoch."""
    shards: Indices
    starts: Indices
    """Samples before each shard, and in all: (shards + 1,)."""


@dataclass(frozen=True, eq=False)
class BlockOrder(DataOrder):
    """The samples of every step, shard << 32 | number in the shard. `num_samples` only bounds these numbers."""

    num_shards: int = 0
    first_shard: int = 0
    about_samples: int = 0
    """Estimate of the number of samples in an epoch."""
    counts: Callable[[Indices], Indices] = field(default=np.ones_like, repr=False)
    """Function that returns the number of samples of shards, and waits until they are made."""

    @cached_property
    def _ends(self) -> list[int]:
        """Positions after the blocks that have been read."""
        return []

    @property
    def num_read(self) -> int:
        """Number of shards in the blocks that have been read, in all epochs."""
        epoch, block = divmod(len(self._ends), self.num_blocks)
        return epoch * self.num_shards + _first_of(block)

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks in an epoch."""
        return next(block for block in range(self.num_shards + 1) if _first_of(block) >= self.num_shards)

    @property
    def steps_per_epoch(self) -> float:
        """About how many steps an epoch has."""
        return self.about_samples / self.global_batch_size

    def shards_from(self, first: int, last: int, epoch: int) -> Indices:
        """Return the shards at these places of an epoch, from `first` up to `last`."""
        places = np.arange(first, min(last, self.num_shards), dtype=np.int64)
        return (permute(places, self.num_shards, self.seed, epoch) if self.shuffle else places) + self.first_shard

    def block(self, number: int) -> Block:
        """Return a block, counted over all epochs. Waits until its shards are made."""
        epoch, block = divmod(number, self.num_blocks)
        shards = self.shards_from(_first_of(block), _first_of(block + 1), epoch)
        return Block(epoch, _first_of(block), shards, np.append(0, np.cumsum(self.counts(shards))))

    def _number_at(self, position: int) -> int:
        """Return the number of the block with a position. Reads all blocks before it."""
        while not self._ends or self._ends[-1] <= position:
            number = len(self._ends)
            self._ends.append((self._ends or [0])[-1] + int(_opened(self, number).starts[-1]))
            if self._ends[-1] == 0 and len(self._ends) == self.num_blocks:
                raise DataError("data.train has no text for a sample. Name other text")
        return bisect_right(self._ends, position)

    def _unsorted(self, step: int, per_epoch: int) -> Indices:
        return self.between(*self._span(step), per_epoch)

    def between(self, start: int, stop: int, per_epoch: int) -> Indices:
        """Return the samples at positions from `start` up to `stop`, each plus epoch x `per_epoch`."""
        parts = []
        while start < stop:
            number = self._number_at(start)
            block, end = _opened(self, number), self._ends[number]
            places = np.arange(start, min(stop, end), dtype=np.int64) - end + block.starts[-1]
            if self.shuffle:
                # The first key shuffles shards.
                key = self.seed + (block.first + 1 << 40)
                places = permute(places, int(block.starts[-1]), key, block.epoch)
            at = np.searchsorted(block.starts, places, "right") - 1
            parts.append((block.shards[at] << WINDOW_BITS) + places - block.starts[at] + block.epoch * per_epoch)
            start = min(stop, end)
        return np.concatenate(parts)

    def epoch_at(self, step: int) -> float:
        """Return the number of epochs before a step: by the shards of blocks that have been read, and an estimate."""
        position = step * self.global_batch_size
        number = bisect_left(self._ends, position)
        begin = self._ends[number - 1] if number else 0
        if number == len(self._ends):
            return self._epochs(number) + (position - begin) / self.about_samples
        share = (position - begin) / max(1, self._ends[number] - begin)
        return self._epochs(number) * (1 - share) + self._epochs(number + 1) * share

    def _epochs(self, number: int) -> float:
        epoch, block = divmod(number, self.num_blocks)
        return epoch + _first_of(block) / self.num_shards


def block_orders(recipe: Recipe, windows: ShardedWindows, global_batch_size: int) -> tuple[BlockOrder, ...]:
    """Return the order of text in shards; of each source, if they have weights.

    Raises:
        SettingError: `data.cache_limit` is too small.
    """
    cut, sizes = windows.shards.cut, map(len, windows.samples_by_source or [windows])
    limit, num_bytes = cut.data.limit_bytes, windows.num_tokens * windows.shards.dtype.itemsize
    # Shards made ahead must outlive those that are read before them.
    if limit and limit < (needed := num_bytes * min(1, 3 * SHARDS_AHEAD * len(cut.spans) / len(cut))):
        problem = f"the shards that are read next have {format_bytes(needed)}. Give more"
        raise setting_error("data.cache_limit", format_bytes(limit), problem)
    return tuple(
        BlockOrder(
            len(cut) << WINDOW_BITS,
            global_batch_size,
            recipe.seed + (number << 40),
            recipe.data.shuffle,
            num_shards=len(span),
            first_shard=span.start,
            about_samples=size,
            counts=windows.counts,
        )
        for number, (span, size) in enumerate(zip(cut.spans, sizes, strict=True))
    )


def _first_of(block: int) -> int:
    """Return the place of the first shard of a block."""
    doublings = min(block, NUM_DOUBLINGS)
    return FIRST_SHARDS * (2**doublings - 1 + (block - doublings) * 2**NUM_DOUBLINGS)


# One block of each source of a mixture is in use.
@lru_cache(maxsize=64)
def _opened(order: BlockOrder, number: int) -> Block:
    return order.block(number)
