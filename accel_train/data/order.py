"""The data order: the samples of a step as a pure function of seed, epoch, step and global batch size.

Nothing is stored, and reading does not skip samples. The order of an epoch is a keyed bijection, computed for the
needed positions only. Position 9 x 10^8 of 10^9 costs the same as position 0, so a resume costs nothing extra. The
order does not depend on world size, workers or history: a step has the same samples on any number of GPUs.
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
"""Number of positions computed at once. A block of 32 KiB fits the CPU cache. 16 blocks (512 KiB) are kept."""
# transformers sorts this number of batches at once for `group_by_length`.
STEPS_PER_LENGTH_GROUP = 50
NUM_ROUNDS = 6
"""Number of Feistel rounds. With 4 rounds, neighbors agree slightly too often in low bits. With 6, this is not seen."""

Indices = NDArray[np.int64]
_Words = NDArray[np.integer[Any]]

# splitmix64: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA.
_WORD, _GAMMA, _MIX_1, _MIX_2 = 2**64 - 1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

LastBatch = Literal["carry", "short", "drop"]


# eq=False: an instance is its own key in the cache of length groups.
@dataclass(frozen=True, eq=False)
class DataOrder:
    """The samples of every step of a run: consecutive epochs, each a permutation of all samples.

    If an epoch does not divide into full steps, `last_batch` decides. The last step continues with the next epoch
    (`carry`), has fewer samples (`short`), or is left out (`drop`). Within an epoch, no sample repeats.

    A draw is epoch x num_samples + index. It seeds the augmentation of a sample.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    """Whether to shuffle. False keeps every epoch in source order."""
    last_batch: LastBatch = "carry"
    lengths: Indices | None = field(default=None, repr=False)
    """Length of each sample. Default: None. If set, a step has samples of similar length.

    Samples are sorted within groups of `STEPS_PER_LENGTH_GROUP` steps.
    """
    epoch_order: Callable[[int], Indices] | None = field(default=None, repr=False)
    """Custom order: returns a permutation of all samples as a pure function of the epoch."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps per epoch: a whole number, unless steps carry over."""
        return steps_per_epoch(self.num_samples, self.global_batch_size, self.last_batch)

    def step_samples(self, step: int) -> Indices:
        """Return the samples of a 0-based step, in order. Takes about 5 us for 16 samples, at any step."""
        return self._unsorted(step, 0).copy() if self.lengths is None else self.step_draws(step) % self.num_samples

    def step_draws(self, step: int) -> Indices:
        """Return the samples of a 0-based step as draws."""
        if self.lengths is None:
            return self._unsorted(step, self.num_samples)
        group = self._length_group(step)
        return _sorted_by_length(self, group)[step - group.start]

    def _unsorted(self, step: int, per_epoch: int) -> Indices:
        """Return the samples of a step, each plus epoch x `per_epoch`.

        `per_epoch` is 0 for indices and num_samples for draws.
        """
        start, stop = self._span(step)
        parts = []
        while start < stop:
            epoch, position = divmod(start, self.num_samples)
            part = self._epoch_from(epoch, position, stop - start)
            parts.append(part + epoch * per_epoch if epoch * per_epoch else part)
            start += len(part)
        # Almost always, a step lies within one part.
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _epoch_from(self, epoch: int, position: int, count: int) -> Indices:
        """Return up to `count` samples of an epoch from a position on: at least one, and none from the next epoch."""
        if self.epoch_order is not None:
            return self.epoch_order(epoch)[position : position + count]
        if not self.shuffle:
            return np.arange(position, min(position + count, self.num_samples), dtype=np.int64)
        block_number, offset = divmod(position, BLOCK_SIZE)
        return _block(self.num_samples, self.seed, epoch, block_number)[offset : offset + count]

    def _span(self, step: int) -> tuple[int, int]:
        """Return the positions (start, stop) of a step in the stream of epochs."""
        if self.last_batch == "carry":
            return step * self.global_batch_size, (step + 1) * self.global_batch_size
        epoch, step_in_epoch = divmod(step, int(self.steps_per_epoch))
        start = step_in_epoch * self.global_batch_size
        stop = min(start + self.global_batch_size, self.num_samples)
        return epoch * self.num_samples + start, epoch * self.num_samples + stop

    def _length_group(self, step: int) -> range:
        """Return the steps that are sorted by length together. They are all in one epoch, unless steps carry over."""
        per_epoch = sys.maxsize if self.last_batch == "carry" else int(self.steps_per_epoch)
        epoch, step_in_epoch = divmod(step, per_epoch)
        start = step_in_epoch - step_in_epoch % STEPS_PER_LENGTH_GROUP
        stop = min(start + STEPS_PER_LENGTH_GROUP, per_epoch)
        return range(epoch * per_epoch + start, epoch * per_epoch + stop)

    def epoch_at(self, step: int) -> float:
        """Return the number of epochs read before a 0-based step. 1.5 is the middle of the second epoch."""
        if self.last_batch == "carry":
            return step * self.global_batch_size / self.num_samples
        return step / self.steps_per_epoch

    def rank_micro_batches(
        self, step: int, rank: int, world_size: int, per_device_batch_size: int, *, as_draws: bool = False
    ) -> list[list[int]]:
        """Return one process's contiguous share of a step's samples, cut into micro-batches.

        Of the step's G samples, rank r of W reads positions r G / W up to (r + 1) G / W. In a short step, a share may
        be empty.
        """
        assert 0 <= rank < world_size, (rank, world_size)
        assert self.global_batch_size % (world_size * per_device_batch_size) == 0, self
        samples = self.step_draws(step) if as_draws else self.step_samples(step)
        share = samples[rank * len(samples) // world_size : (rank + 1) * len(samples) // world_size].tolist()
        return [share[start : start + per_device_batch_size] for start in range(0, len(share), per_device_batch_size)]


def steps_per_epoch(num_samples: int, global_batch_size: int, last_batch: LastBatch) -> float:
    """Return the number of steps in an epoch: a whole number, unless steps carry over into the next epoch."""
    if last_batch == "short":
        return -(-num_samples // global_batch_size)
    return num_samples // global_batch_size if last_batch == "drop" else num_samples / global_batch_size


@lru_cache(maxsize=4)
def _sorted_by_length(order: DataOrder, steps: range) -> list[Indices]:
    """Return the draws of these steps, regrouped so that each step has samples of similar length.

    The steps come in random order. Samples move only within the group, so every sample still occurs once per epoch.
    """
    assert order.lengths is not None
    unsorted = [order._unsorted(step, order.num_samples) for step in steps]
    draws = np.concatenate(unsorted)
    by_length = draws[np.argsort(order.lengths[draws % order.num_samples], kind="stable")]
    cuts = np.cumsum([len(step) for step in unsorted])[:-1]
    sorted_steps = np.split(by_length, cuts)
    # A short step stays the last step of its epoch. The other steps trade places.
    full = sum(len(step) == order.global_batch_size for step in unsorted)
    places = permute(np.arange(full, dtype=np.int64), full, order.seed, steps.start).tolist() if full else []
    return [sorted_steps[place] for place in places] + sorted_steps[full:]


def evaluation_batches(num_samples: int, per_device_batch_size: int, rank: int, world_size: int) -> Iterator[list[int]]:
    """Yield one process's batches of an evaluation. Over all ranks, every sample occurs exactly once, without padding.

    Samples are cut into batches in order; the last batch may be short. Batches are dealt out in turn, so batch counts
    differ by at most one between ranks. The batches are the same for any world size.
    """
    assert 0 <= rank < world_size, (rank, world_size)
    for start in range(rank * per_device_batch_size, num_samples, world_size * per_device_batch_size):
        yield list(range(start, min(start + per_device_batch_size, num_samples)))


def permute(positions: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Return the samples at these positions of an epoch, a permutation of range(n).

    The result is the same on every machine and must never change. Up to 4096 samples are sorted by a keyed hash. Larger
    sets use a Feistel network over left x right >= n. Here left is a power of two, and right = ceil(n / left). Results
    outside range(n) pass through the network again until they are inside. This is cycle walking (Black & Rogaway 2002,
    "Ciphers with arbitrary finite domains", CT-RSA). Fewer than left <= sqrt(n) elements of the domain are outside, so
    one pass almost always suffices.

    `positions` may have any shape, with values in range(n) and 1 <= n <= 2^62. `seed` and `epoch` are integers >= 0,
    taken modulo 2^64.
    """
    assert 1 <= n <= MAX_SAMPLES, n
    if n <= BLOCK_SIZE:
        return _block(n, seed, epoch, 0)[positions]
    flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
    return _feistel(flat, n, seed, epoch).reshape(positions.shape)


@lru_cache(maxsize=16)
def _block(n: int, seed: int, epoch: int, block_number: int) -> Indices:
    """Return the samples at one block of BLOCK_SIZE positions, read-only. Consecutive small steps share a block."""
    if n <= BLOCK_SIZE:
        block = _sorted_by_hash(n, seed, epoch)
    else:
        start = block_number * BLOCK_SIZE
        positions = np.arange(start, min(start + BLOCK_SIZE, n), dtype=np.int64)
        block = _feistel(positions, n, seed, epoch)
    block.flags.writeable = False
    return block


def _sorted_by_hash(n: int, seed: int, epoch: int) -> Indices:
    """Return a permutation of a few samples, for which a Feistel network has too few keys.

    The hashes are distinct, so the order is well defined.
    """
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


# Every step of an epoch uses the same keys.
@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    keys = [_epoch_key(seed, epoch)]
    while len(keys) < NUM_ROUNDS:
        keys.append(_splitmix64(keys[-1]))
    return tuple(keys)


def _encipher(positions: _Words, n: int, keys: tuple[int, ...]) -> _Words:
    """Run one pass of NUM_ROUNDS rounds over the domain left x right.

    left = 2^left_bits and right = ceil(n / left). A round is left ^= F(right), or right = right + F(left) modulo the
    size of right.
    """
    left_bits = (n.bit_length() - 1) // 2
    right_size = -(-n >> left_bits)
    left, right = positions & ((1 << left_bits) - 1), positions >> left_bits
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ _mix(right, left_key) >> (64 - left_bits)
        # 32 random bits x size / 2^32: below size, without a division.
        right = right + ((_mix(left, right_key) >> 32) * right_size >> 32)
        # If right < right_size, the unsigned difference wraps around and the minimum keeps right.
        right = np.minimum(right, right - right_size)
    return right << left_bits | left


def _mix(half: _Words, key: int) -> _Words:
    """Return the round function F: a 64-bit hash with good high bits (splitmix64 without its outer shifts)."""
    mixed = (half ^ key) * _MIX_1
    return (mixed ^ mixed >> 32) * _MIX_2


def _epoch_key(seed: int, epoch: int) -> int:
    return _splitmix64(_splitmix64(seed & _WORD) ^ (epoch & _WORD))


def _splitmix64(state: int) -> int:
    state = (state + _GAMMA) & _WORD
    state = (state ^ state >> 30) * _MIX_1 & _WORD
    state = (state ^ state >> 27) * _MIX_2 & _WORD
    return state ^ state >> 31
