"""A billion samples on 1,024 processes: each once an epoch, at the cost of a handful.

The argument, in three steps. The order of an epoch is a bijection: run backwards, it leads from any sample to the one
position it stands at. The steps lay the positions out without gap or overlap. And the slices of the processes, put
together, are the step's samples. The same is counted through, sample by sample, for an epoch that is small enough.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

from accel_train.data import order as sampling
from accel_train.data.order import BLOCK_SIZE, DataOrder, permute
from tests.support.runs import REPOSITORY

BILLION = 10**9
WORLD_SIZE, PER_DEVICE = 1024, 4
GLOBAL_BATCH_SIZE = WORLD_SIZE * PER_DEVICE
SEED = 1337

WORDS = np.uint64


def decipher_once(samples: np.ndarray, n: int, keys: tuple[int, ...]) -> np.ndarray:
    """The network's rounds undone, last one first: what was added is taken away again, modulo the size."""
    left_bits = (n.bit_length() - 1) // 2
    left, right = samples & ((1 << left_bits) - 1), samples >> left_bits
    size = -(-n >> left_bits)
    for left_key, right_key in reversed(list(zip(keys[::2], keys[1::2], strict=True))):
        added = ((sampling._mix(left, right_key) >> WORDS(32)) * size) >> WORDS(32)
        right = (right + size - added) % size
        left = left ^ (sampling._mix(right, left_key) >> (64 - left_bits))
    return right << left_bits | left


def position_of(samples: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where each sample stands in an epoch's order: `permute` run backwards."""
    keys = sampling._round_keys(seed, epoch)
    result = decipher_once(samples.astype(WORDS), n, keys)
    while (outside := result >= WORDS(n)).any():
        result[outside] = decipher_once(result[outside], n, keys)
    return result.astype(np.int64)


@pytest.mark.parametrize("epoch", [0, 1, 1000])
def test_every_sample_of_a_billion_stands_at_one_position(epoch: int) -> None:
    rng = np.random.default_rng(epoch)
    starts = [0, BILLION - BLOCK_SIZE, *rng.integers(0, BILLION - BLOCK_SIZE, 30)]
    blocks = [np.arange(start, start + BLOCK_SIZE) for start in starts]
    for values in blocks:  # taken for positions, and then for samples: both ways lead back
        assert np.array_equal(position_of(permute(values, BILLION, SEED, epoch), BILLION, SEED, epoch), values)
        positions = position_of(values, BILLION, SEED, epoch)
        assert positions.min() >= 0
        assert positions.max() < BILLION
        assert np.array_equal(permute(positions, BILLION, SEED, epoch), values)


def test_steps_lay_out_a_billion_positions_without_gap_or_overlap() -> None:
    order = DataOrder(BILLION, GLOBAL_BATCH_SIZE, SEED)
    last_of_epoch = BILLION // GLOBAL_BATCH_SIZE
    for step in [0, last_of_epoch - 1, *np.random.default_rng(0).integers(0, last_of_epoch - 1, 40).tolist()]:
        positions = np.arange(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE)
        assert np.array_equal(order.step_draws(step), permute(positions, BILLION, SEED, 0))
    rest = BILLION - last_of_epoch * GLOBAL_BATCH_SIZE
    turn = order.step_draws(last_of_epoch)  # the end of the first epoch, and the beginning of the second
    assert np.array_equal(turn[:rest], permute(np.arange(BILLION - rest, BILLION), BILLION, SEED, 0))
    begin = permute(np.arange(GLOBAL_BATCH_SIZE - rest), BILLION, SEED, 1)
    assert np.array_equal(turn[rest:], BILLION + begin)


def slices(order: DataOrder, step: int, world_size: int = WORLD_SIZE, per_device: int = PER_DEVICE) -> list[int]:
    """What all processes read of a step, as draws, one after the other."""
    ranks = (order.rank_micro_batches(step, r, world_size, per_device, as_draws=True) for r in range(world_size))
    return [draw for micro_batches in ranks for micro_batch in micro_batches for draw in micro_batch]


def test_the_slices_of_1024_processes_are_the_samples_of_the_step() -> None:
    order = DataOrder(BILLION, GLOBAL_BATCH_SIZE, SEED)
    for step in np.random.default_rng(1).integers(0, 3 * BILLION // GLOBAL_BATCH_SIZE, 12).tolist():
        assert slices(order, step) == order.step_draws(step).tolist()


@pytest.mark.parametrize("n", [BLOCK_SIZE - 1, 50_021])
@pytest.mark.parametrize("last_batch", ["carry", "short"])
def test_1024_processes_read_every_sample_once_an_epoch(n: int, last_batch: sampling.LastBatch) -> None:
    order = DataOrder(n, GLOBAL_BATCH_SIZE // 2, SEED, last_batch=last_batch)
    num_steps = -(-3 * n // order.global_batch_size) if last_batch == "carry" else 3 * int(order.steps_per_epoch)
    draws = np.concatenate([slices(order, step, per_device=2) for step in range(num_steps)])
    assert np.array_equal(np.sort(draws)[: 3 * n], np.arange(3 * n))  # epoch x n + sample: each of three epochs, whole


START_UP = """
import json, resource, sys, time
from pathlib import Path
from accel_train.data.order import DataOrder

def peak_bytes():
    # The kernel hands getrusage's figure on from the process that started this one; VmHWM is of this program alone.
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

before, began = peak_bytes(), time.perf_counter()
order = DataOrder(10**9, 4096, 1337)
batches = order.rank_micro_batches(200_000_000, int(sys.argv[1]), 1024, 4)
seconds, num_bytes = time.perf_counter() - began, peak_bytes() - before
print(json.dumps({"seconds": seconds, "before": before, "bytes": num_bytes, "samples": batches[0]}))
"""


@pytest.mark.parametrize("rank", [0, 1023])
def test_a_process_finds_its_samples_anywhere_in_a_second_and_100_mb(rank: int) -> None:
    root = REPOSITORY
    command = [sys.executable, "-c", START_UP, str(rank)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(found)
    assert found["seconds"] < 1.0
    assert found["bytes"] < 100 * 10**6
    order = DataOrder(BILLION, GLOBAL_BATCH_SIZE, SEED)
    assert found["samples"] == order.step_samples(200_000_000)[rank * PER_DEVICE : (rank + 1) * PER_DEVICE].tolist()
