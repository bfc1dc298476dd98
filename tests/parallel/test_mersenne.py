"""A jump of torch's generator ends where drawing ends."""

import pytest
import torch

from accel_train.parallel.mersenne import jumped


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 1000])
@pytest.mark.parametrize("count", [0, 1, 2, 623, 624, 625, 19936, 19937, 19938, 100_003, 5_000_000])
def test_a_jump_gives_the_numbers_that_follow_as_many_draws(drawn: int, count: int) -> None:
    generator, other = torch.Generator().manual_seed(drawn + count), torch.Generator()
    torch.empty(drawn).uniform_(generator=generator)
    # A normal number that is kept for the next draw stays.
    torch.empty(3).normal_(generator=generator)
    before = generator.get_state()
    other.set_state(jumped(before, count))
    assert torch.equal(generator.get_state(), before)
    torch.empty(count).uniform_(generator=generator)
    normal, again = (torch.empty(3).normal_(generator=each) for each in (generator, other))
    assert torch.equal(normal, again)
    assert torch.equal(torch.rand(2000, generator=generator), torch.rand(2000, generator=other))


def test_two_jumps_are_one() -> None:
    state = torch.Generator().manual_seed(3).get_state()
    there, again = torch.Generator(), torch.Generator()
    there.set_state(jumped(state, 70_000_000_000))
    again.set_state(jumped(jumped(state, 69_999_000_001), 999_999))
    assert torch.equal(torch.rand(2000, generator=there), torch.rand(2000, generator=again))
