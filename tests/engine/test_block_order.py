"""The order of blocks: every sample once in an epoch, the same for any number of processes, and found at any step."""

from typing import Any

import numpy as np
import pytest

from accel_train.core.errors import DataError
from accel_train.engine import block_order
from accel_train.engine.block_order import BlockOrder

SIZES = np.random.default_rng(0).integers(0, 40, 50)


def order(batch: int = 12, shuffle: bool = True, sizes: Any = SIZES, **settings: Any) -> BlockOrder:
    return BlockOrder(
        len(sizes) << 32,
        batch,
        3,
        shuffle,
        num_shards=len(sizes),
        about_samples=900,
        counts=lambda numbers: sizes[numbers],
        **settings,
    )


def pairs(samples: Any) -> list[tuple[int, int]]:
    return [(int(sample) >> 32, int(sample) & (1 << 32) - 1) for sample in samples]


EVERY = [(shard, sample) for shard, size in enumerate(SIZES) for sample in range(size)]


def test_every_epoch_has_every_sample_once_and_another_order() -> None:
    total = int(SIZES.sum())
    found = pairs(np.concatenate([order(1).step_samples(step) for step in range(3 * total)]))
    epochs = [found[start : start + total] for start in range(0, 3 * total, total)]
    for epoch in epochs:
        assert sorted(epoch) == EVERY
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != EVERY
    shards = [order().shards_from(0, len(SIZES), epoch).tolist() for epoch in range(2)]
    assert shards[0] != shards[1]
    assert sorted(shards[0]) == sorted(shards[1]) == [*range(len(SIZES))]


def test_blocks_of_one_size_are_not_shuffled_alike() -> None:
    # The blocks from the sixth on have 256 shards, here with one sample each.
    sizes = np.ones(8 + 16 + 32 + 64 + 128 + 256 + 256, np.int64)
    whole, mixed = order(1, sizes=sizes), []
    for number, start in ((5, 248), (6, 504)):
        places = {shard: place for place, shard in enumerate(whole.block(number).shards.tolist())}
        mixed.append([places[int(whole.step_samples(step)[0]) >> 32] for step in range(start, start + 256)])
    assert sorted(mixed[0]) == sorted(mixed[1]) == [*range(256)]
    assert mixed[0] != mixed[1]


def test_a_batch_of_any_size_and_any_number_of_processes_reads_the_same_stream() -> None:
    stream = np.concatenate([order(1).step_samples(step) for step in range(720)])
    for batch in (2, 12, 72, 360):
        steps = [order(batch).step_samples(step) for step in range(720 // batch)]
        assert np.array_equal(np.concatenate(steps), stream)
    for world in (1, 2, 3, 4):
        found = [order().rank_micro_batches(step, rank, world, 1) for step in range(60) for rank in range(world)]
        assert [sample for share in found for part in share for sample in part] == stream.tolist()


def test_a_step_found_alone_is_that_of_the_whole_run() -> None:
    whole = order()
    steps = [whole.step_samples(step).tolist() for step in range(200)]
    for step in (199, 57, 0, 131):
        assert order().step_samples(step).tolist() == steps[step]
        assert whole.step_samples(step).tolist() == steps[step], "back, after a rollback"


def test_only_the_shards_of_the_blocks_up_to_a_step_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_order, "FIRST_SHARDS", 4)
    monkeypatch.setattr(block_order, "NUM_DOUBLINGS", 2)
    asked: list[int] = []

    def counts(numbers: Any) -> Any:
        asked.extend(numbers.tolist())
        return SIZES[numbers]

    lazy = BlockOrder(50 << 32, 12, 3, num_shards=50, about_samples=900, counts=counts)
    lazy.step_samples(0)
    assert len(asked) == 4
    assert lazy.num_read == 4
    read = [4]
    for step in range(1, 90):
        lazy.step_samples(step)
        if read[-1] != lazy.num_read:
            read.append(lazy.num_read)
    assert read[:6] == [4, 12, 28, 44, 50, 54], "blocks of 4, 8, 16, 16, and what is left"
    assert sorted(asked[:50]) == [*range(50)]


def test_samples_of_a_block_are_mixed_and_blocks_are_not() -> None:
    first = [
        shard for shard, _ in pairs(np.concatenate([order(1).step_samples(step) for step in range(int(SIZES.sum()))]))
    ]
    of_block = {*order().shards_from(0, 8, 0).tolist()}
    count = int(SIZES[[*of_block]].sum())
    assert {*first[:count]} == {shard for shard in of_block if SIZES[shard]}
    assert not {*first[count:]} & of_block
    assert len({*first[:24]}) > 4


def test_without_shuffling_the_order_is_that_of_the_sources() -> None:
    samples = [sample for step in range(30) for sample in pairs(order(shuffle=False).step_samples(step))]
    assert samples == EVERY[:360]


def test_draws_count_epochs_and_leave_the_sample() -> None:
    whole = order()
    for step in (0, 70, 100, 199):
        draws, samples = whole.step_draws(step), whole.step_samples(step)
        assert (draws % whole.num_samples).tolist() == samples.tolist()
        positions = np.arange(step * 12, step * 12 + 12)
        assert (draws // whole.num_samples).tolist() == (positions // SIZES.sum()).tolist()


def test_epochs_are_exact_at_their_ends_and_never_fall() -> None:
    whole, total = order(1), int(SIZES.sum())
    assert whole.epoch_at(450) == pytest.approx(0.5), "an estimate, before anything is read"
    values = []
    for step in range(2 * total + 1):
        whole.step_samples(step)
        values.append(whole.epoch_at(step))
    assert values == sorted(values)
    assert [values[0], values[total], values[2 * total]] == [0, 1, 2]
    assert values[total - 1] < 1


def test_text_without_a_sample_is_refused() -> None:
    with pytest.raises(DataError):
        order(sizes=np.zeros(5, np.int64)).step_samples(0)
