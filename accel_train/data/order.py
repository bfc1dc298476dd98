"""The data order: which samples make up a step, as a pure function of seed, epoch, step and global batch size.

Nothing is stored and nothing is skipped by reading it: the order of an epoch is a keyed bijection, computed for the
positions that are needed. Position 9 x 10^8 of 10^9 costs what position 0 costs, and so does a resume.
World size, workers and history do not enter, so the same samples make the same step on any number of GPUs.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 2**62
BLOCK_SIZE = 4096
"""Positions computed at once: 32 KiB per buffer, which stays in the cache, and 16 blocks are kept: 512 KiB."""
STEPS_PER_LENGTH_GROUP = 50  # as many batches as transformers sorts at once for `group_by_length`
NUM_ROUNDS = 6
"""With 4 rounds the samples of neighbouring positions agree in low bits a little too often; with 6 it is not seen."""

Indices = NDArray[np.int64]
_Words = NDArray[np.integer[Any]]

# splitmix64: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA.
_WORD, _GAMMA, _MIX_1, _MIX_2 = 2**64 - 1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

LastBatch = Literal["carry", "short", "drop"]


@dataclass(frozen=True, eq=False)  # each is its own key of the cache of length groups
class DataOrder:
    """The samples of every step of a run: epochs one after the other, each a permutation of all samples.

    Where an epoch is no whole number of steps, its last step continues with the next epoch (`carry`), has fewer samples
    (`short`), or is left out (`drop`). Within an epoch no sample comes twice.

    A draw is epoch x num_samples + index; it seeds the augmentation of a sample.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    """False: every epoch in the order of the source."""
    last_batch: LastBatch = "carry"
    lengths: Indices | None = field(default=None, repr=False)
    """Of each sample: steps are then made of samples of like length, out of `STEPS_PER_LENGTH_GROUP` steps at a time."""
    epoch_order: Callable[[int], Indices] | None = field(default=None, repr=False)
    """The samples of an epoch in another order than ours: a permutation of all, as a pure function of the epoch."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which each sample comes once: a whole number, unless steps carry over."""
        return steps_per_epoch(self.num_samples, self.global_batch_size, self.last_batch)

    def step_samples(self, step: int) -> Indices:
        """Return the samples of a 0-based step, in order. About 5 us for 16 samples, at any step."""
        return self._unsorted(step, 0).copy() if self.lengths is None else self.step_draws(step) % self.num_samples

    def step_draws(self, step: int) -> Indices:
        """Return the samples of a 0-based step as draws."""
        if self.lengths is None:
            return self._unsorted(step, self.num_samples)
        group = self._length_group(step)
        return _sorted_by_length(self, group)[step - group.start]

    def _unsorted(self, step: int, per_epoch: int) -> Indices:
        """The step's samples, each plus epoch x `per_epoch`: 0 for indices, the number of samples for draws."""
        start, stop = self._span(step)
        parts = []
        while start < stop:
            epoch, position = divmod(start, self.num_samples)
            part = self._epoch_from(epoch, position, stop - start)
            parts.append(part + epoch * per_epoch if epoch * per_epoch else part)
            start += len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)  # one part, nearly always

    def _epoch_from(self, epoch: int, position: int, count: int) -> Indices:
        """Up to `count` samples of an epoch from a position on: at least one, and none of the next epoch."""
        if self.epoch_order is not None:
            return self.epoch_order(epoch)[position : position + count]
        if not self.shuffle:
            return np.arange(position, min(position + count, self.num_samples), dtype=np.int64)
        block_number, offset = divmod(position, BLOCK_SIZE)
        return _block(self.num_samples, self.seed, epoch, block_number)[offset : offset + count]

    def _span(self, step: int) -> tuple[int, int]:
        """Positions in the stream of epochs that a step covers."""
        if self.last_batch == "carry":
            return step * self.global_batch_size, (step + 1) * self.global_batch_size
        epoch, step_in_epoch = divmod(step, int(self.steps_per_epoch))
        start = step_in_epoch * self.global_batch_size
        stop = min(start + self.global_batch_size, self.num_samples)
        return epoch * self.num_samples + start, epoch * self.num_samples + stop

    def _length_group(self, step: int) -> range:
        """The steps among which samples of like length are gathered: all of one epoch, unless steps carry over."""
        per_epoch = sys.maxsize if self.last_batch == "carry" else int(self.steps_per_epoch)
        epoch, step_in_epoch = divmod(step, per_epoch)
        start = step_in_epoch - step_in_epoch % STEPS_PER_LENGTH_GROUP
        stop = min(start + STEPS_PER_LENGTH_GROUP, per_epoch)
        return range(epoch * per_epoch + start, epoch * per_epoch + stop)

    def epoch_at(self, step: int) -> float:
        """Return the epochs read before a 0-based step: 1.5 is the middle of the second epoch."""
        if self.last_batch == "carry":
            return step * self.global_batch_size / self.num_samples
        return step / self.steps_per_epoch

    def rank_micro_batches(
        self, step: int, rank: int, world_size: int, per_device_batch_size: int, *, as_draws: bool = False
    ) -> list[list[int]]:
        """Return one process's contiguous share of a step's samples, cut into micro-batches.

        Rank r of W reads positions r G / W up to (r + 1) G / W of the step's G samples. In a short step a share may be empty.
        """
        assert 0 <= rank < world_size, (rank, world_size)
        assert self.global_batch_size % (world_size * per_device_batch_size) == 0, self
        samples = self.step_draws(step) if as_draws else self.step_samples(step)
        share = samples[rank * len(samples) // world_size : (rank + 1) * len(samples) // world_size].tolist()
        return [share[start : start + per_device_batch_size] for start in range(0, len(share), per_device_batch_size)]


def steps_per_epoch(num_samples: int, global_batch_size: int, last_batch: LastBatch) -> float:
    """Return the steps in an epoch: a whole number, unless the last one carries over into the next epoch."""
    if last_batch == "short":
        return -(-num_samples // global_batch_size)
    return num_samples // global_batch_size if last_batch == "drop" else num_samples / global_batch_size


@lru_cache(maxsize=4)
def _sorted_by_length(order: DataOrder, steps: range) -> list[Indices]:
    """The draws of these steps, dealt out anew: each step has samples of like length, and the steps come in a random order.

    Samples move within the group only, so in an epoch every sample still comes once.
    """
    assert order.lengths is not None
    unsorted = [order._unsorted(step, order.num_samples) for step in steps]
    draws = np.concatenate(unsorted)
    by_length = draws[np.argsort(order.lengths[draws % order.num_samples], kind="stable")]
    cuts = np.cumsum([len(step) for step in unsorted])[:-1]
    sorted_steps = np.split(by_length, cuts)
    # A short step stays the last one of its epoch; the others trade places.
    full = sum(len(step) == order.global_batch_size for step in unsorted)
    places = permute(np.arange(full, dtype=np.int64), full, order.seed, steps.start).tolist() if full else []
    return [sorted_steps[place] for place in places] + sorted_steps[full:]


def evaluation_batches(num_samples: int, per_device_batch_size: int, rank: int, world_size: int) -> Iterator[list[int]]:
    """Yield one process's batches of an evaluation: over all ranks every sample comes exactly once, without padding.

    The samples are cut into batches in order, the last one short, and dealt out in turn: no rank has more than one batch
    more than another, and the batches are the same for any world size.
    """
    assert 0 <= rank < world_size, (rank, world_size)
    for start in range(rank * per_device_batch_size, num_samples, world_size * per_device_batch_size):
        yield list(range(start, min(start + per_device_batch_size, num_samples)))


def permute(positions: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Return the samples at these positions of an epoch: a permutation of range(n), the same on every machine and for ever.

    Up to 4096 samples are sorted by a keyed hash. More of them go through a Feistel network over left x right >= n,
    left a power of two and right = ceil(n / left); results outside range(n) go through it again until they are inside
    (cycle walking; Black & Rogaway 2002, "Ciphers with arbitrary finite domains", CT-RSA). Fewer than left <= sqrt(n)
    of the domain's elements are outside, so one pass is nearly always all.

    `positions` have any shape, each in range(n), 1 <= n <= 2^62; `seed` and `epoch`, integers >= 0, are taken modulo 2^64.
    """
    assert 1 <= n <= MAX_SAMPLES, n
    if n <= BLOCK_SIZE:
        return _block(n, seed, epoch, 0)[positions]
    flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
    return _feistel(flat, n, seed, epoch).reshape(positions.shape)


@lru_cache(maxsize=16)
def _block(n: int, seed: int, epoch: int, block_number: int) -> Indices:
    """The samples at the next BLOCK_SIZE positions, which many small steps in a row share. Read-only."""
    if n <= BLOCK_SIZE:
        block = _sorted_by_hash(n, seed, epoch)
    else:
        start = block_number * BLOCK_SIZE
        positions = np.arange(start, min(start + BLOCK_SIZE, n), dtype=np.int64)
        block = _feistel(positions, n, seed, epoch)
    block.flags.writeable = False
    return block


def _sorted_by_hash(n: int, seed: int, epoch: int) -> Indices:
    """Permute few samples, where a Feistel network has too few keys; the hashes are distinct, so the order is well defined."""
    state: _Words = np.arange(n, dtype=np.uint64)
    state = state * _GAMMA + _epoch_key(seed, epoch)
    state = (state ^ state >> 30) * _MIX_1
    state = (state ^ state >> 27) * _MIX_2
    return np.argsort(state ^ state >> 31).astype(np.int64)


def _feistel(positions: Indices, n: int, seed: int, epoch: int) -> Indices:
    keys = _round_keys(seed, epoch)
    result = _encipher(positions.view(np.uint64), n, keys)
    while result.max(initial=0) >= n:
        outside = np.flatnonzero(result >= n)
        result[outside] = _encipher(result[outside], n, keys)
    return result.view(np.int64)


@lru_cache(maxsize=4)  # an epoch's keys are used at each of its steps
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    keys = [_epoch_key(seed, epoch)]
    while len(keys) < NUM_ROUNDS:
        keys.append(_splitmix64(keys[-1]))
    return tuple(keys)


def _encipher(positions: _Words, n: int, keys: tuple[int, ...]) -> _Words:
    """One pass over the domain left x right, left = 2^left_bits and right = ceil(n / left), NUM_ROUNDS rounds in all.

    A round is left ^= F(right), or right = right + F(left) modulo the size of right.
    """
    left_bits = (n.bit_length() - 1) // 2
    right_size = -(-n >> left_bits)
    left, right = positions & ((1 << left_bits) - 1), positions >> left_bits
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ _mix(right, left_key) >> (64 - left_bits)
        # 32 random bits x size / 2^32: below size, without a division
        right = right + ((_mix(left, right_key) >> 32) * right_size >> 32)
        right = np.minimum(right, right - right_size)  # where right < right_size, the difference has wrapped round
    return right << left_bits | left


def _mix(half: _Words, key: int) -> _Words:
    """The round function F: a 64-bit hash whose high bits are good (splitmix64's, less its outer shifts)."""
    mixed = (half ^ key) * _MIX_1
    return (mixed ^ mixed >> 32) * _MIX_2


def _epoch_key(seed: int, epoch: int) -> int:
    return _splitmix64(_splitmix64(seed & _WORD) ^ (epoch & _WORD))


def _splitmix64(state: int) -> int:
    state = (state + _GAMMA) & _WORD
    state = (state ^ state >> 30) * _MIX_1 & _WORD
    state = (state ^ state >> 27) * _MIX_2 & _WORD
    return state ^ state >> 31
