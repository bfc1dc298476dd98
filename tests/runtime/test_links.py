"""The bandwidth of a transfer is the one that nccl-tests prints, and every pair is measured."""

import pytest

from accel_train.runtime.links import bus_gb_per_second, transfers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # NVIDIA/nccl-tests, doc/PERFORMANCE.md, for 2 GB in 0.5 s on 8 processes: 4 GB/s times the factor.
        ("all-reduce", 4 * 2 * 7 / 8),
        ("all-gather", 4 * 7 / 8),
        ("reduce-scatter", 4 * 7 / 8),
        ("all-to-all", 4 * 7 / 8),
        ("broadcast", 4),
        ("rank 2 to 5", 4),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, expected: float) -> None:
    assert name in transfers(8)
    assert bus_gb_per_second(name, 2 * 10**9, 0.5, 8) == pytest.approx(expected)


def test_each_pair_is_measured_once_after_the_collectives() -> None:
    names = transfers(3)
    assert list(names)[5:] == ["rank 0 to 1", "rank 0 to 2", "rank 1 to 2"]
    assert list(names.values()) == [(), (), (), (), (), (0, 1), (0, 2), (1, 2)]
    assert len(transfers(8)) == 5 + 28
