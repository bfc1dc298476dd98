"""Mix weighted sources: the source of each sample of a step is a pure function of the step, as the order within it is.

Weights become whole shares, for example 7 and 3, whose pattern repeats after 10 samples. Within a pattern the samples
are scheduled as jobs with a release and a deadline (Baruah et al. 1996, "Proportionate progress"), so that no source is
ever a whole sample ahead of or behind its share. Nothing is stored: position and pattern give the count of each source.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from accel_train.data.order import DataOrder, Indices
from accel_train.engine.block_order import BlockOrder

MOST_SHARES = 2**16
"""Largest sum of whole shares. Weights that need more are rounded to it, so the pattern of a mixture takes 0.1 s."""


@dataclass(frozen=True)
class MixedSource:
    """A source of a mixture."""

    name: str
    samples: Indices | range
    """Numbers of its samples in the training data."""
    weights: Mapping[int, float]
    """Weight by the 0-based step from which on it counts. Only the ratio to the other weights matters."""
    max_epochs: float | None = None
    """Number of its epochs after which the other sources take its share."""

    @property
    def limit(self) -> int | None:
        """Return the number of samples after which the source ends."""
        return None if self.max_epochs is None else math.floor(Fraction(repr(self.max_epochs)) * len(self.samples))


@dataclass(frozen=True)
class Stretch:
    """Positions of the stream of samples over which the shares of all sources are constant."""

    start: int
    shares: tuple[int, ...]
    """Whole share of each source; 0 for one that has ended. All zero: there is nothing left to draw."""
    drawn: tuple[int, ...]
    """Number of samples that each source has given before `start`."""

    def drawn_before(self, position: int) -> list[int]:
        """Return the number of samples that each source has given before a position of the stretch, or its end."""
        cycles, rest = divmod(position - self.start, sum(self.shares) or 1)
        within = np.bincount(pattern(self.shares)[:rest], minlength=len(self.shares)).tolist()
        return [old + cycles * share + more for old, share, more in zip(self.drawn, self.shares, within, strict=True)]


@dataclass(frozen=True, eq=False)
class MixedOrder(DataOrder):
    """The samples of every step of a run on weighted sources.

    An epoch is as many samples as all sources have, whichever they are. A draw counts the epochs of its source.
    """

    sources: tuple[MixedSource, ...] = field(default=(), repr=False)
    blocks: tuple[BlockOrder, ...] = field(default=(), repr=False)
    """Order of each source, if they are text in shards. The number of their samples is then an estimate."""

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The stretches of the stream, in order. The last one has no end."""
        return list(_stretches(self.sources, self.global_batch_size))

    @cached_property
    def _parts(self) -> Sequence[DataOrder]:
        return self.blocks or [
            DataOrder(len(source.samples), 1, self.seed + (number << 40), self.shuffle)
            for number, source in enumerate(self.sources)
        ]

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which a run reads as many samples as all sources have."""
        return sum(len(source.samples) for source in self.sources) / self.global_batch_size

    def epoch_at(self, step: int) -> float:
        return step / self.steps_per_epoch

    def epochs_of(self, number: int, drawn: int) -> float:
        """Return the number of epochs of a source that `drawn` of its samples are."""
        return self._parts[number].epoch_at(drawn)

    @property
    def num_steps(self) -> int | None:
        """Number of steps until all sources have ended, or None if one never does."""
        last = self.stretches[-1]
        return None if any(last.shares) else last.start // self.global_batch_size

    def _unsorted(self, step: int, per_epoch: int) -> Indices:
        begin, end = self._span(step)
        drawn = self._drawn_before(begin)
        found = self._sources_at(begin, end)
        result = np.empty(end - begin, np.int64)
        for number in np.unique(found).tolist():
            places = np.flatnonzero(found == number)
            result[places] = self._draw(number, drawn[number], len(places), per_epoch)
        return result

    def drawn_before(self, step: int) -> list[int]:
        """Return the number of samples that each source has given before a 0-based step."""
        return self._drawn_before(step * self.global_batch_size)

    def shares_at(self, step: int) -> tuple[int, ...]:
        """Return the whole share of each source at the start of a 0-based step."""
        return self.stretches[self._stretch_at(step * self.global_batch_size)].shares

    def end_of(self, number: int) -> float:
        """Return the step after which a source has given all that `max_epochs` allows; infinite if it never ends."""
        limit = self.sources[number].limit
        ends = (each.start for each in self.stretches if limit is not None and each.drawn[number] == limit)
        return math.ceil(next(ends, math.inf) / self.global_batch_size) if limit is not None else math.inf

    def _draw(self, number: int, start: int, count: int, per_epoch: int) -> Indices:
        """Return `count` samples of a source from its `start`-th draw on, each plus its epoch x `per_epoch`."""
        if self.blocks:
            return self.blocks[number].between(start, start + count, per_epoch)
        own, order, parts = self.sources[number].samples, self._parts[number], []
        while count > 0:
            epoch, position = divmod(start, order.num_samples)
            rows = order._epoch_from(epoch, position, count)
            rows = rows + own.start if isinstance(own, range) else own[rows]
            parts.append(rows + epoch * per_epoch)
            start, count = start + len(rows), count - len(rows)
        return np.concatenate(parts)

    def _stretch_at(self, position: int) -> int:
        return bisect_right(self.stretches, position, key=lambda each: each.start) - 1

    def _drawn_before(self, position: int) -> list[int]:
        return self.stretches[self._stretch_at(position)].drawn_before(position)

    def _sources_at(self, begin: int, end: int) -> NDArray[np.intp]:
        parts = []
        for number in range(self._stretch_at(begin), self._stretch_at(end - 1) + 1):
            stretch, after = self.stretches[number], self.stretches[number + 1 : number + 2]
            stop = min([end, *(each.start for each in after)])
            cycle = pattern(stretch.shares)
            assert len(cycle), "a run ends before its sources do"
            parts.append(cycle[(np.arange(max(begin, stretch.start), stop) - stretch.start) % len(cycle)])
        return np.concatenate(parts)


def _stretches(sources: Sequence[MixedSource], global_batch_size: int) -> Iterator[Stretch]:
    changes = sorted({step * global_batch_size for source in sources for step in source.weights})
    position, drawn = 0, [0] * len(sources)
    while True:
        step = position // global_batch_size
        weights = [
            0.0 if drawn[number] == source.limit else source.weights[max(at for at in source.weights if at <= step)]
            for number, source in enumerate(sources)
        ]
        stretch = Stretch(position, whole_shares(weights), tuple(drawn))
        yield stretch
        cycle, stops = pattern(stretch.shares), [at for at in changes if at > position][:1]
        for number, (source, share) in enumerate(zip(sources, stretch.shares, strict=True)):
            if source.limit is not None and share:
                cycles, rest = divmod(source.limit - drawn[number] - 1, share)
                last = np.flatnonzero(cycle == number)[rest]
                stops.append(position + cycles * len(cycle) + int(last) + 1)
        if not stops or not len(cycle):
            return
        position = min(stops)
        drawn = stretch.drawn_before(position)


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the ratio of the weights, or near it if their sum were too large.

    A weight counts as the decimal that was written: 0.7 and 0.3 are 7 and 3.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    if not total:
        return (0,) * len(exact)
    scale = math.lcm(*(each.denominator for each in exact))
    shares = [int(each * scale) for each in exact]
    shares = [share // math.gcd(*shares) for share in shares]
    if sum(shares) > MOST_SHARES:
        shares = [max(round(each / total * MOST_SHARES), each > 0) for each in exact]
    return tuple(shares)


@lru_cache(maxsize=16)
def pattern(shares: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the numbers of the sources of one cycle, as many of each as its share: (sum of shares,).

    Up to each position, a source has less than one sample more or less than its share of the positions. Of the samples
    that are due, the one that must come first is taken.
    """
    total, waiting = sum(shares), [(0, number, 1) for number, share in enumerate(shares) if share]
    due: list[tuple[int, int, int]] = []
    cycle = np.empty(total, np.intp)
    heapq.heapify(waiting)
    for position in range(total):
        while waiting and waiting[0][0] <= position:
            _, number, ordinal = heapq.heappop(waiting)
            heapq.heappush(due, (-(-ordinal * total // shares[number]), number, ordinal))
        _, number, ordinal = heapq.heappop(due)
        cycle[position] = number
        if ordinal < shares[number]:
            heapq.heappush(waiting, (ordinal * total // shares[number], number, ordinal + 1))
    cycle.flags.writeable = False
    return cycle
