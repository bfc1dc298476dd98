"""The data order is a permutation per epoch, at constant cost, that world size and history do not enter."""

import itertools

import numpy as np
import pytest

from accel_train.data import order as sampling
from accel_train.data.order import DataOrder, permute

SIZES_OF_EPOCH_AND_BATCH = [(1, 4), (3, 8), (10, 4), (10, 10), (100, 32), (5000, 7), (5000, 4096), (9000, 10_000)]


def whole_epoch(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(n), n, seed, epoch)


def chi_square_z(counts: np.ndarray) -> float:
    """Chi-square against equal counts, as standard deviations from its mean: below 4 or 5 for a fair source."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 4096, 4097, 8191, 65_537, 10**6 + 3])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_holds_every_sample_exactly_once(n: int, epoch: int) -> None:
    assert np.array_equal(np.bincount(whole_epoch(n, seed=5, epoch=epoch), minlength=n), np.ones(n, dtype=int))


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    # A change of these numbers silently changes the data of every resumed run: it needs a new major version.
    assert whole_epoch(10, seed=0, epoch=0).tolist() == [1, 8, 9, 3, 6, 5, 0, 7, 4, 2]
    assert whole_epoch(10, seed=0, epoch=1).tolist() == [1, 0, 7, 8, 5, 4, 3, 2, 9, 6]
    assert permute(np.arange(6), 10**6, 42, 3).tolist() == [788949, 175694, 139807, 527783, 949416, 849070]
    assert permute(np.array([0, 1, 9 * 10**8]), 10**9, 1234, 0).tolist() == [62264390, 515969741, 768218551]
    assert permute(np.array([0, 2**62 - 1]), 2**62, 2**63 + 1, 7).tolist() == [2986431850858115821, 2174107332256966179]


@pytest.mark.parametrize("n", [100, 10_000])
def test_epochs_and_seeds_have_orders_of_their_own(n: int) -> None:
    orders = [whole_epoch(n, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]]
    for one, other in itertools.combinations(orders, 2):
        assert np.mean(one == other) < 0.1


@pytest.mark.parametrize("n", [3, 4])
def test_every_order_of_few_samples_is_equally_likely(n: int) -> None:
    orders = [tuple(whole_epoch(n, seed=1, epoch=epoch).tolist()) for epoch in range(3000)]
    counts = np.array([orders.count(order) for order in itertools.permutations(range(n))])
    assert chi_square_z(counts) < 4


@pytest.mark.parametrize("n", [10, 4096, 4097, 10**6, 10**9])
def test_each_sample_is_equally_likely_at_each_position_over_epochs(n: int) -> None:
    positions = np.array([0, 1, n // 2, n - 1])
    samples = np.array([permute(positions, n, 3, epoch) for epoch in range(2000)])
    for column in samples.T:
        assert chi_square_z(np.bincount(column * 10 // n, minlength=10)) < 4.5


@pytest.mark.parametrize("n", [4096, 5000, 10**6])
@pytest.mark.parametrize("lag", [1, 2, 64, 1024])
def test_neighbouring_positions_hold_unrelated_samples(n: int, lag: int) -> None:
    samples = whole_epoch(n, seed=9)
    here, there = samples[:-lag], samples[lag:]
    correlation = np.corrcoef(here, there)[0, 1]
    assert abs(correlation) * np.sqrt(len(here)) < 4
    cells = 8
    joint = np.bincount(here * cells // n * cells + there * cells // n, minlength=cells**2)
    assert chi_square_z(joint) < 5
    assert chi_square_z(np.bincount((there - here) % n * 50 // n, minlength=50)) < 5


@pytest.mark.parametrize("n", [4097, 5000])
def test_low_bits_of_neighbouring_samples_are_unrelated(n: int) -> None:
    # What 4 rounds fail, by 13 standard deviations and more.
    pairs = np.array([permute(np.array([0, 1, 2]), n, 7, epoch) for epoch in range(20_000)])
    for other in (1, 2):
        assert chi_square_z(np.bincount((pairs[:, 0] ^ pairs[:, other]) & 15, minlength=16)) < 4.5


def count_network_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the arrays that went through the network, from here on."""
    sizes: list[int] = []
    encipher = sampling._encipher

    def counting(positions: np.ndarray, n: int, keys: tuple[int, ...]) -> np.ndarray:
        sizes.append(len(positions))
        return encipher(positions, n, keys)

    monkeypatch.setattr(sampling, "_encipher", counting)
    return sizes


@pytest.mark.parametrize("n", [10**9, 10**9 + 1, 2**30 + 1, 2**31 - 1])
def test_a_step_deep_in_a_billion_samples_costs_what_the_first_costs(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = count_network_passes(monkeypatch)
    order = DataOrder(num_samples=n, global_batch_size=256, seed=0)
    for step in (0, 9 * 10**8 // 256):
        sizes.clear()
        sampling._block.cache_clear()
        order.step_samples(step)
        # At most two blocks (a step may lie across a border), and a handful of walks out of sqrt(n)-rare holes.
        assert sum(sizes) <= 2.01 * sampling.BLOCK_SIZE
        assert len(sizes) <= 6


@pytest.mark.parametrize("n", [4097, 8193, 10**5 + 1])
def test_few_positions_walk_more_than_once(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = count_network_passes(monkeypatch)
    whole_epoch(n)
    assert sum(sizes) < n * (1 + 2 / np.sqrt(n))


@pytest.mark.parametrize(("n", "global_batch_size"), SIZES_OF_EPOCH_AND_BATCH)
def test_every_epoch_of_the_stream_holds_every_sample_exactly_once(n: int, global_batch_size: int) -> None:
    order = DataOrder(n, global_batch_size, seed=3)
    num_steps = -(-3 * n // global_batch_size)
    stream = np.concatenate([order.step_samples(step) for step in range(num_steps)])
    assert len(stream) == num_steps * global_batch_size
    epochs = stream[: 3 * n].reshape(3, n)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (3, 1)))
    if n > 10:
        assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize(("n", "global_batch_size"), SIZES_OF_EPOCH_AND_BATCH)
def test_a_step_is_the_stretch_of_the_stream_that_the_design_names(n: int, global_batch_size: int) -> None:
    order = DataOrder(n, global_batch_size, seed=3)
    for step in (0, 1, 5):
        stream = step * global_batch_size + np.arange(global_batch_size)
        named = [permute(np.array([p % n]), n, 3, int(p // n))[0] for p in stream[:: max(1, len(stream) // 50)]]
        assert order.step_samples(step)[:: max(1, len(stream) // 50)].tolist() == named


def test_resuming_at_a_step_reads_what_an_unbroken_run_reads() -> None:
    unbroken = DataOrder(5003, 48, seed=1)
    steps = [unbroken.step_samples(step).tolist() for step in range(250)]
    sampling._block.cache_clear()
    sampling._round_keys.cache_clear()
    resumed = DataOrder(5003, 48, seed=1)
    assert [resumed.step_samples(step).tolist() for step in range(140, 250)] == steps[140:]


def test_what_a_caller_does_to_a_step_leaves_later_reads_alone() -> None:
    order = DataOrder(100, 10, seed=0)
    first = order.step_samples(0)
    expected = first.copy()
    first[:] = -1
    assert np.array_equal(order.step_samples(0), expected)


def test_without_shuffle_the_source_is_read_in_its_order() -> None:
    order = DataOrder(5, 4, seed=2, shuffle=False)
    assert [order.step_samples(step).tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_epoch_at_counts_passes_over_the_data() -> None:
    order = DataOrder(100, 30, seed=0)
    assert [order.epoch_at(step) for step in (0, 5, 10)] == [0.0, 1.5, 3.0]


@pytest.mark.parametrize(("n", "batch"), [(10, 4), (100, 32), (64, 32), (5000, 4096), (3, 8)])
def test_a_short_last_step_ends_each_epoch_and_every_sample_comes_once(n: int, batch: int) -> None:
    order = DataOrder(n, batch, seed=3, last_batch="short")
    per_epoch = -(-n // batch)
    assert order.steps_per_epoch == per_epoch
    for epoch in range(3):
        steps = [order.step_samples(step) for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        assert sorted(np.concatenate(steps).tolist()) == list(range(n))
        assert [len(step) for step in steps] == [batch] * (n // batch) + ([n % batch] if n % batch else [])
    assert order.epoch_at(2 * per_epoch) == 2.0


def test_dropping_leaves_out_the_rest_of_an_epoch_and_other_samples_in_the_next() -> None:
    order = DataOrder(10, 4, seed=3, last_batch="drop")
    epochs = [np.concatenate([order.step_samples(2 * epoch), order.step_samples(2 * epoch + 1)]) for epoch in range(40)]
    assert all(len(set(samples.tolist())) == 8 for samples in epochs)
    assert {sample for samples in epochs for sample in samples.tolist()} == set(range(10))


def test_draws_tell_the_epoch_of_each_sample() -> None:
    order = DataOrder(5, 4, seed=2)
    draws = np.concatenate([order.step_draws(step) for step in range(5)])
    assert (draws // 5).tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert np.array_equal(draws % 5, np.concatenate([order.step_samples(step) for step in range(5)]))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_a_short_step_though_some_may_get_nothing(world_size: int) -> None:
    order = DataOrder(34, 32, seed=2, last_batch="short")
    ranks = [order.rank_micro_batches(1, rank, world_size, 4) for rank in range(world_size)]
    assert [sample for rank in ranks for batch in rank for sample in batch] == order.step_samples(1).tolist()
    assert sum(len(rank) == 0 for rank in ranks) == max(0, world_size - 2)


@pytest.mark.parametrize("last_batch", ["carry", "short", "drop"])
def test_length_groups_make_steps_of_like_length_and_keep_the_samples_of_an_epoch(last_batch: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    plain = DataOrder(3000, 16, seed=1, last_batch=last_batch)  # type: ignore[arg-type]
    grouped = DataOrder(3000, 16, seed=1, last_batch=last_batch, lengths=lengths)  # type: ignore[arg-type]
    steps = 150 if last_batch == "carry" else int(plain.steps_per_epoch)
    assert sorted(np.concatenate([grouped.step_draws(step) for step in range(steps)]).tolist()) == sorted(
        np.concatenate([plain.step_draws(step) for step in range(steps)]).tolist()
    )

    def spread(order: DataOrder) -> float:
        return float(np.mean([np.ptp(lengths[order.step_samples(step)]) for step in range(100)]))

    assert spread(grouped) < spread(plain) / 5
    assert len(grouped.step_samples(steps - 1)) == len(plain.step_samples(steps - 1))
    means = [lengths[grouped.step_samples(step)].mean() for step in range(50)]
    assert abs(np.corrcoef(means, range(50))[0, 1]) < 0.4, "steps come from short to long"


def test_length_groups_are_a_function_of_the_step_alone() -> None:
    lengths = np.arange(1000) % 77
    one, other = (DataOrder(1000, 8, seed=4, lengths=lengths) for _ in range(2))
    forwards = {step: one.step_samples(step).tolist() for step in range(120)}
    assert {step: other.step_samples(step).tolist() for step in reversed(range(120))} == forwards
    lengths_of_others = DataOrder(1000, 8, seed=4, lengths=lengths[::-1].copy())
    assert lengths_of_others.step_samples(3).tolist() != forwards[3]


def test_another_order_of_the_epoch_is_read_as_given() -> None:
    order = DataOrder(5, 2, seed=0, last_batch="short", epoch_order=lambda epoch: np.roll(np.arange(5), epoch))
    assert [order.step_samples(step).tolist() for step in range(6)] == [[0, 1], [2, 3], [4], [4, 0], [1, 2], [3]]


def test_an_epoch_has_at_most_2_to_the_62_samples() -> None:
    last = np.array([2**62 - 1])
    assert 0 <= permute(last, 2**62, 0, 0)[0] < 2**62
    with pytest.raises(AssertionError):
        permute(last, 2**62 + 1, 0, 0)


@pytest.mark.parametrize("n", [4096, 4097])
def test_up_to_4096_samples_are_sorted_by_a_hash_and_more_are_enciphered(n: int) -> None:
    made = sampling._sorted_by_hash(n, 3, 1) if n == 4096 else sampling._feistel(np.arange(n), n, 3, 1)
    assert np.array_equal(whole_epoch(n, seed=3, epoch=1), made)
    other = sampling._feistel(np.arange(n), n, 3, 1) if n == 4096 else sampling._sorted_by_hash(n, 3, 1)
    assert not np.array_equal(made, other)


def test_the_samples_of_an_epoch_cannot_be_overwritten() -> None:
    with pytest.raises(ValueError, match="read-only"):
        DataOrder(100, 4, 0).step_draws(0)[0] = 7
