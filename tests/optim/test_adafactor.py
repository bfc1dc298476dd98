"""Adafactor gives the numbers of torch's own, and never reads a number of the device."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.optim.adafactor import Adafactor
from tests.support.runs import Settings

OPTIONS: dict[str, Settings] = {
    "defaults": {},
    "decay, clipping, and bounds": {"weight_decay": 0.1, "d": 2.0, "eps": (1e-6, 0.5), "beta2_decay": -0.5},
    "maximize": {"maximize": True, "lr": 1.0},
}


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def made(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=generator)) for size in ((7, 5), (6,), (2, 3, 4), ())]
    return weights, kind(weights, **{"lr": 3e-2, **options})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_adafactor_gives_torchs_numbers_without_reading_any_and_a_skipped_step_changes_no_bit(
    options: Settings,
) -> None:
    (ours, own), (theirs, other) = made(Adafactor, **options), made(torch.optim.Adafactor, **options)
    assert isinstance(own, Adafactor)
    for number in range(12):
        generator, is_skipped = torch.Generator().manual_seed(number), number % 4 == 0
        own.found_inf, own.grad_scale = torch.tensor(float(is_skipped)), torch.tensor(4.0)
        for mine, its in zip(ours, theirs, strict=True):
            its.grad = torch.randn(its.shape, generator=generator) * 10 ** (number % 3 - 1)
            mine.grad = its.grad * (torch.nan if is_skipped else 4)
        before = [weight.detach().clone() for weight in ours]
        with Reads() as reads:
            own.step()
        assert reads.count == 0
        if is_skipped:
            assert all(map(torch.equal, ours, before))
            continue
        with Reads() as reads:
            other.step()
        assert reads.count >= 2 * len(theirs), "the count sees torch's reads"
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
            assert own.state[mine].keys() == other.state[its].keys()
            for name, value in other.state[its].items():
                torch.testing.assert_close(own.state[mine][name], value, rtol=1e-6, atol=1e-9)
