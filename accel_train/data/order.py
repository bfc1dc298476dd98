"""The data order: which samples make up a step, as a pure function of seed, epoch, step and global batch size.

Nothing is stored and nothing is skipped by reading it: the order of an epoch is a keyed bijection, computed for the
positions that are asked for. Position 9 x 10^8 of 10^9 costs what position 0 costs, and so does a resume.
World size, workers and history do not enter, so the same samples make the same step on any number of GPUs.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 2**62
BLOCK_SIZE = 4096
"""Positions computed at once: 32 KiB per buffer, which stays in the cache, and 16 blocks are kept: 512 KiB."""
STEPS_PER_LENGTH_GROUP = 50
"""As many batches as transformers sorts at once for `group_by_length`."""
NUM_ROUNDS = 6
"""With 4 rounds the samples of neighbouring positions agree in low bits a little too often; with 6 it is not seen."""

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

_WORD = 2**64 - 1


def _word(value: int) -> _Words:
    """A 0-d array: numpy takes one as an operand in half the time of a scalar."""
    return np.array(value & _WORD, dtype=np.uint64)


# splitmix64: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA.
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GAMMA_WORD, _MIX_1_WORD, _MIX_2_WORD, _27, _30, _31, _32 = map(_word, (_GAMMA, _MIX_1, _MIX_2, 27, 30, 31, 32))


LastBatch = Literal["carry", "short", "drop"]


@dataclass(frozen=True, eq=False)  # each is its own key of the cache of length groups
class DataOrder:
    """The samples of every step of a run: epochs one after the other, each a permutation of all samples.

    Where an epoch is no whole number of steps, its last step goes on with the next epoch (`carry`), has fewer samples
    (`short`), or is left out (`drop`). Within an epoch no sample comes twice.

    Samples travel as draws, epoch x num_samples + index: what seeds the augmentation of a sample.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    """Off: every epoch in the order of the source."""
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
        """The samples of a 0-based step, in order. About 5 us for 16 samples, at any step."""
        return self.step_draws(step) % self.num_samples

    def step_draws(self, step: int) -> Indices:
        """The same as draws: epoch x num_samples + index."""
        if self.lengths is None:
            return self._unsorted(step)
        group = self._length_group(step)
        return _sorted_by_length(self, group)[step - group.start]

    def _unsorted(self, step: int) -> Indices:
        start, stop = self._span(step)
        epoch, position = divmod(start, self.num_samples)
        piece = self._epoch_from(epoch, position, stop - start)
        if len(piece) == stop - start:  # nearly always
            return piece + epoch * self.num_samples if epoch else piece
        pieces = []
        while start < stop:
            epoch, position = divmod(start, self.num_samples)
            piece = self._epoch_from(epoch, position, stop - start)
            pieces.append(piece + epoch * self.num_samples)
            start += len(piece)
        return np.concatenate(pieces)

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
        """Epochs read before a 0-based step: 1.5 is the middle of the second epoch."""
        if self.last_batch == "carry":
            return step * self.global_batch_size / self.num_samples
        return step / self.steps_per_epoch

    def rank_micro_batches(
        self, step: int, rank: int, world_size: int, per_device_batch_size: int, *, as_draws: bool = False
    ) -> list[list[int]]:
        """What one process forwards in a step: its contiguous share of the step's samples, cut into micro-batches.

        Rank r of W reads positions r G / W up to (r + 1) G / W of the step's G samples. In a short step a share may be empty.
        """
        assert 0 <= rank < world_size, (rank, world_size)
        assert self.global_batch_size % (world_size * per_device_batch_size) == 0, self
        samples = self.step_draws(step) if as_draws else self.step_samples(step)
        share = samples[rank * len(samples) // world_size : (rank + 1) * len(samples) // world_size].tolist()
        return [share[start : start + per_device_batch_size] for start in range(0, len(share), per_device_batch_size)]


def steps_per_epoch(num_samples: int, global_batch_size: int, last_batch: LastBatch) -> float:
    """Steps in an epoch: a whole number, unless the last one carries over into the next epoch."""
    if last_batch == "short":
        return -(-num_samples // global_batch_size)
    return num_samples // global_batch_size if last_batch == "drop" else num_samples / global_batch_size


@lru_cache(maxsize=4)
def _sorted_by_length(order: DataOrder, steps: range) -> list[Indices]:
    """The draws of these steps, dealt out anew: each step has samples of like length, and the steps come in a random order.

    Samples move within the group only, so in an epoch every sample still comes once.
    """
    assert order.lengths is not None
    unsorted = [order._unsorted(step) for step in steps]
    draws = np.concatenate(unsorted)
    by_length = draws[np.argsort(order.lengths[draws % order.num_samples], kind="stable")]
    cuts = np.cumsum([len(step) for step in unsorted])[:-1]
    sorted_steps = np.split(by_length, cuts)
    # A short step stays the last one of its epoch; the others trade places.
    full = sum(len(step) == order.global_batch_size for step in unsorted)
    places = permute(np.arange(full, dtype=np.int64), full, order.seed, steps.start).tolist() if full else []
    return [sorted_steps[place] for place in places] + sorted_steps[full:]


def evaluation_batches(num_samples: int, per_device_batch_size: int, rank: int, world_size: int) -> Iterator[list[int]]:
    """One process's batches of an evaluation: over all ranks every sample comes exactly once, in no padding.

    The samples are cut into batches in order, the last one short, and dealt out in turn: no rank has more than one batch
    more than another, and the batches are the same for any world size.
    """
    assert 0 <= rank < world_size, (rank, world_size)
    for start in range(rank * per_device_batch_size, num_samples, world_size * per_device_batch_size):
        yield list(range(start, min(start + per_device_batch_size, num_samples)))


def permute(positions: Indices, n: int, seed: int, epoch: int) -> Indices:
    """The samples at these positions of an epoch: a permutation of range(n), the same on every machine and for ever.

    Up to 4096 samples are sorted by a keyed hash. More of them go through a Feistel network over left x right >= n,
    left a power of two and right = ceil(n / left); results outside range(n) go through it again until they are inside
    (cycle walking; Black & Rogaway 2002, "Ciphers with arbitrary finite domains", CT-RSA). Fewer than left <= sqrt(n)
    of the domain's elements are outside, so one pass is nearly always all.

    Args:
        positions: any shape, each in range(n); not modified.
        n: samples in an epoch, 1 to 2^62.
        seed, epoch: integers >= 0, taken modulo 2^64; each pair has an order of its own.
    """
    assert 1 <= n <= MAX_SAMPLES, n
    if n <= BLOCK_SIZE:
        return _block(n, seed, epoch, 0)[positions]
    flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
    chunks = [_feistel(flat[i : i + BLOCK_SIZE], n, seed, epoch) for i in range(0, flat.size, BLOCK_SIZE)]
    return np.concatenate(chunks or [flat]).reshape(positions.shape)


@lru_cache(maxsize=16)
def _block(n: int, seed: int, epoch: int, block_number: int) -> Indices:
    """The samples at the next BLOCK_SIZE positions: what many small steps in a row share. Read-only."""
    if n <= BLOCK_SIZE:
        block = _sorted_by_hash(n, seed, epoch)
    else:
        start = block_number * BLOCK_SIZE
        positions = np.arange(start, min(start + BLOCK_SIZE, n), dtype=np.int64)
        block = _feistel(positions, n, seed, epoch)
    block.flags.writeable = False
    return block


def _sorted_by_hash(n: int, seed: int, epoch: int) -> Indices:
    """For few samples, where a Feistel network has too few keys; the hashes are distinct, so the order is well defined."""
    state = np.arange(n, dtype=np.uint64) * _GAMMA_WORD + _word(_epoch_key(seed, epoch))
    state = (state ^ state >> _30) * _MIX_1_WORD
    state = (state ^ state >> _27) * _MIX_2_WORD
    return np.argsort(state ^ state >> _31).astype(np.int64)


def _feistel(positions: Indices, n: int, seed: int, epoch: int) -> Indices:
    network = _network(n, seed, epoch)
    result = _encipher(positions.view(np.uint64), network)
    while result.max(initial=0) >= n:
        outside = np.flatnonzero(result >= n)
        result[outside] = _encipher(result[outside], network)
    return result.view(np.int64)


@dataclass(frozen=True)
class _Network:
    """The constants of one epoch's order: the domain left x right with left = 2^left_bits, and a key per round."""

    left_bits: _Words
    left_mask: _Words
    left_shift: _Words
    right_size: _Words
    keys: tuple[_Words, ...]


@lru_cache(maxsize=4)  # an epoch's constants are used at each of its steps
def _network(n: int, seed: int, epoch: int) -> _Network:
    left_bits = (n.bit_length() - 1) // 2
    keys = [_epoch_key(seed, epoch)]
    while len(keys) < NUM_ROUNDS:
        keys.append(_splitmix64(keys[-1]))
    return _Network(
        left_bits=_word(left_bits),
        left_mask=_word((1 << left_bits) - 1),
        left_shift=_word(64 - left_bits),
        right_size=_word(-(-n >> left_bits)),
        keys=tuple(_word(key) for key in keys),
    )


def _encipher(positions: _Words, network: _Network) -> _Words:
    """One pass: left ^= F(right), then right = right + F(left) modulo right_size, NUM_ROUNDS rounds in all."""
    left, right = positions & network.left_mask, positions >> network.left_bits
    mixed, scratch = np.empty_like(left), np.empty_like(left)
    for left_key, right_key in zip(network.keys[::2], network.keys[1::2], strict=True):
        _mix(right, left_key, mixed, scratch)
        np.right_shift(mixed, network.left_shift, mixed)
        np.bitwise_xor(left, mixed, left)

        _mix(left, right_key, mixed, scratch)
        np.right_shift(mixed, _32, mixed)
        np.multiply(mixed, network.right_size, mixed)  # 32 random bits x size / 2^32: below size, without a division
        np.right_shift(mixed, _32, mixed)
        np.add(right, mixed, right)
        np.subtract(right, network.right_size, mixed)
        np.minimum(right, mixed, out=right)  # where right < right_size, mixed has wrapped round to a huge number
    np.left_shift(right, network.left_bits, right)
    return np.bitwise_or(right, left, right)


def _mix(half: _Words, key: _Words, mixed: _Words, scratch: _Words) -> None:
    """The round function F: a 64-bit hash whose high bits are good (splitmix64's, less its outer shifts)."""
    np.bitwise_xor(half, key, mixed)
    np.multiply(mixed, _MIX_1_WORD, mixed)
    np.right_shift(mixed, _32, scratch)
    np.bitwise_xor(mixed, scratch, mixed)
    np.multiply(mixed, _MIX_2_WORD, mixed)


def _epoch_key(seed: int, epoch: int) -> int:
    return _splitmix64(_splitmix64(seed & _WORD) ^ (epoch & _WORD))


def _splitmix64(state: int) -> int:
    state = (state + _GAMMA) & _WORD
    state = (state ^ state >> 30) * _MIX_1 & _WORD
    state = (state ^ state >> 27) * _MIX_2 & _WORD
    return state ^ state >> 31
