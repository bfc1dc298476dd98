"""The order of weighted sources: shares that hold at every step, the order within a source, and its ends."""

from collections.abc import Sequence
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from accel_train.data.order import DataOrder
from accel_train.engine.mixed_order import MixedOrder, MixedSource, pattern, whole_shares

BATCH = 12


def order_of(*sources: MixedSource, seed: int = 3, shuffle: bool = True) -> MixedOrder:
    num_samples = sum(len(each.samples) for each in sources)
    return MixedOrder(num_samples, BATCH, seed, shuffle, sources=sources)


def source_of(order: MixedOrder, samples: np.ndarray) -> list[int]:
    return [next(i for i, each in enumerate(order.sources) if sample in each.samples) for sample in samples.tolist()]


def counts_after(order: MixedOrder, steps: int) -> np.ndarray:
    """How often each source was drawn up to each step, (steps + 1, sources), by looking at the samples alone."""
    found = [
        np.bincount(source_of(order, order.step_samples(step)), minlength=len(order.sources)) for step in range(steps)
    ]
    return np.concatenate([np.zeros((1, len(order.sources)), int), np.cumsum(found, 0)])


def largest_gap(cycle: np.ndarray, shares: Sequence[float]) -> float:
    """The largest distance of a count from its share of the positions so far."""
    counts = (cycle[:, None] == np.arange(len(shares))).cumsum(0)
    wanted = np.arange(1, len(cycle) + 1)[:, None] * np.array(shares) / sum(shares)
    return float(np.abs(counts - wanted).max())


@pytest.mark.parametrize("seed", range(40))
def test_no_source_is_ever_a_whole_sample_from_its_share(seed: int) -> None:
    random = Random(seed)
    weights = [round(random.random() ** 3 + 0.01, 2) for _ in range(random.randint(2, 12))]
    cycle = pattern(whole_shares(weights))
    assert largest_gap(cycle, weights) < 1
    counts = np.bincount(cycle)
    assert [Fraction(int(count), len(cycle)) for count in counts] == [
        Fraction(str(weight)) / sum(map(Fraction, map(str, weights))) for weight in weights
    ]


def test_the_pattern_of_shares_is_the_same_on_every_machine_and_in_every_version() -> None:
    # A change of these numbers silently changes the data of every resumed run: it needs a new major version.
    assert pattern((7, 3)).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert pattern((5, 3, 1, 1)).tolist() == [0, 1, 0, 1, 0, 2, 0, 1, 0, 3]
    mixed = order_of(MixedSource("a", range(50), {0: 0.7}), MixedSource("b", range(50, 5050), {0: 0.3}))
    assert mixed.step_samples(100).tolist() == [17, 0, 2998, 30, 13, 2728, 8, 48, 44, 946, 26, 39]


def test_weights_that_no_short_pattern_has_are_rounded_to_65536_parts() -> None:
    tokens = [1_234_567_891, 987_654_321, 1_003]
    shares = whole_shares(tokens)
    assert sum(shares) <= 2**16 + 1
    assert min(shares) == 1, "a source with a weight is never left out"
    for share, count in zip(shares[:2], tokens[:2], strict=True):
        assert share / sum(shares) == pytest.approx(count / sum(tokens), abs=2**-15)


def test_within_a_source_the_order_is_that_of_a_run_on_it_alone() -> None:
    mixed = order_of(MixedSource("a", range(0, 100), {0: 1}), MixedSource("b", range(100, 400), {0: 2}), seed=5)
    read = np.concatenate([mixed.step_samples(step) for step in range(60)])
    draws = np.concatenate([mixed.step_draws(step) for step in range(60)])
    for number, (start, size) in enumerate([(0, 100), (100, 300)]):
        own = read[(read >= start) & (read < start + size)]
        alone = DataOrder(size, 1, 5 + (number << 40))
        assert own.tolist() == [start + int(alone.step_samples(step)[0]) for step in range(len(own))]
        of_draws = draws[(draws % 400 >= start) & (draws % 400 < start + size)]
        assert (of_draws // 400).tolist() == [place // size for place in range(len(own))], "draws count epochs"
    assert sorted(read[read < 100][:100].tolist()) == list(range(100))


def test_a_step_alone_and_on_any_number_of_processes_is_the_step_of_the_whole_run() -> None:
    def mixed() -> MixedOrder:
        return order_of(
            MixedSource("a", range(40), {0: 5, 7: 1}), MixedSource("b", np.arange(40, 90), {0: 1}, max_epochs=1.5)
        )

    whole = [mixed().step_samples(step).tolist() for step in range(40)]
    one_after_another = mixed()
    assert [one_after_another.step_samples(step).tolist() for step in range(40)] == whole
    for processes in (1, 2, 3, 4):
        for step in (0, 6, 7, 8, 29):
            shares = [mixed().rank_micro_batches(step, rank, processes, 1) for rank in range(processes)]
            assert [index for share in shares for part in share for index in part] == whole[step]


def test_shares_hold_from_each_change_of_weights_on() -> None:
    mixed = order_of(
        MixedSource("a", range(1000), {0: 0.7, 10: 0.2}),
        MixedSource("b", range(1000, 2000), {0: 0.25}),
        MixedSource("c", range(2000, 3000), {0: 0.05, 10: 0.3, 21: 0}),
    )
    counts = counts_after(mixed, 40)
    for start, stop, weights in ((0, 10, (0.7, 0.25, 0.05)), (10, 21, (0.2, 0.25, 0.3)), (21, 40, (0.2, 0.25, 0))):
        for step in range(start, stop + 1):
            wanted = BATCH * (step - start) * np.array(weights) / sum(weights)
            assert np.abs(counts[step] - counts[start] - wanted).max() < 1, step
        assert mixed.drawn_before(stop) == counts[stop].tolist()


def test_a_source_ends_at_its_epochs_and_the_others_take_its_share_in_proportion() -> None:
    mixed = order_of(
        MixedSource("a", range(500), {0: 0.6}), MixedSource("b", range(500, 530), {0: 0.3}, max_epochs=2),
        MixedSource("c", range(530, 1000), {0: 0.1}),
    )  # fmt: skip
    read = np.concatenate([mixed.step_samples(step) for step in range(60)])
    of_b = (read >= 500) & (read < 530)
    assert of_b.sum() == 60
    assert np.bincount(read[of_b] - 500).tolist() == [2] * 30
    last = int(np.flatnonzero(of_b)[-1])
    assert mixed.end_of(1) == last // BATCH + 1
    after = read[last + 1 :]
    counts = np.cumsum(after < 500)
    assert np.abs(counts - np.arange(1, len(after) + 1) * 6 / 7).max() < 1
    assert mixed.num_steps is None


def test_the_run_has_as_many_steps_as_sources_that_all_end_fill() -> None:
    mixed = order_of(
        MixedSource("a", range(50), {0: 1}, max_epochs=2), MixedSource("b", range(50, 60), {0: 1}, max_epochs=0.5)
    )
    assert mixed.num_steps == 105 // BATCH
    read = np.concatenate([mixed.step_samples(step) for step in range(mixed.num_steps)])
    assert np.bincount(read[read < 50]).max() <= 2
    assert (read >= 50).sum() == 5


def test_without_shuffling_each_source_is_read_as_it_is() -> None:
    mixed = order_of(MixedSource("a", range(5), {0: 1}), MixedSource("b", range(5, 25), {0: 1}), shuffle=False)
    read = mixed.step_samples(0)
    assert read[read < 5].tolist() == [0, 1, 2, 3, 4, 0]
    assert read[read >= 5].tolist() == [5, 6, 7, 8, 9, 10]
