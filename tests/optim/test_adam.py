"""FusedAdam gives the bits of torch's own Adam and AdamW, whatever becomes of gradients and state.

Bf16Adam gives the bits of torch's update between two roundings of the moments.
"""

import copy

import pytest
import torch
from torch import nn

from accel_train.optim import adam
from accel_train.optim.adam import Bf16Adam, FusedAdam
from accel_train.optim.optimizers import build_optimizer
from accel_train.recipe.optimizer import LARGEST_BF16_BETA, OPTIMIZERS, Optimizer
from tests.support.comparisons import assert_same_bits
from tests.support.runs import refused


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in ((3, 4), (4,), (2, 2), (5,))]


def pair(*, decoupled: bool = True) -> tuple[FusedAdam, torch.optim.Adam]:
    def groups() -> list[dict[str, object]]:
        of_all = weights()
        return [{"params": of_all[:2], "weight_decay": 0.1}, {"params": of_all[2:], "weight_decay": 0.0}]

    arguments = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups(), fused=True, **arguments)
    return FusedAdam(groups(), decoupled_weight_decay=decoupled, **arguments), theirs


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step(both: tuple[FusedAdam, torch.optim.Adam], number: int, without: frozenset[int] = frozenset()) -> None:
    """Update both by the same gradients; every third step is skipped, every second one clipped."""
    for optimizer in both:
        generator = torch.Generator().manual_seed(number)
        for index, parameter in enumerate(parameters_of(optimizer)):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if index in without else gradient
        optimizer.found_inf = torch.ones(()) if number % 3 == 2 else None
        optimizer.grad_scale = torch.full((), 2.0) if number % 2 else None
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        optimizer.step()


def assert_same(both: tuple[FusedAdam, torch.optim.Adam]) -> None:
    for ours, theirs in zip(*map(parameters_of, both), strict=True):
        assert torch.equal(ours, theirs)
        mine, other = both[0].state.get(ours, {}), both[1].state.get(theirs, {})
        assert set(mine) == set(other)
        assert_same_bits(mine, other)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_fused_adam_gives_the_bits_of_torchs_own(decoupled: bool) -> None:
    both = pair(decoupled=decoupled)
    for number in range(8):
        step(both, number)
    assert both[0]._kept, "its own path was taken"
    assert_same(both)


def test_a_weight_without_a_gradient_in_some_steps_keeps_its_state() -> None:
    both = pair()
    for number, without in enumerate([{1}, {1, 3}, set(), set(), {0}, set(), set()]):
        step(both, number, frozenset(without))
    assert_same(both)


def test_state_that_was_replaced_is_the_one_that_is_updated() -> None:
    both = pair()
    for number in range(3):
        step(both, number)
    for optimizer in both:  # as a resume does
        kept = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
        optimizer.state.clear()
        optimizer.state.update(kept)
    step(both, 3)
    for optimizer in both:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(both, 4)
    assert_same(both)


def test_parameters_that_were_replaced_are_those_that_are_updated() -> None:
    """ZeRO puts flat parts in the place of the weights, and clears the state."""
    both = pair()
    step(both, 0)
    for optimizer in both:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [nn.Parameter(parameter.detach().clone()) for parameter in group["params"][:1]]
    for number in range(1, 4):
        step(both, number)
    for optimizer in both:  # one part at a time, in stage 3
        optimizer.param_groups[0]["params"] = []
    step(both, 4)
    assert_same(both)


def test_a_copy_of_the_optimizer_can_be_stepped() -> None:
    both = pair()
    step(both, 0)
    copied = copy.deepcopy(both[0])
    for parameter in parameters_of(copied):
        parameter.grad = torch.ones_like(parameter)
    copied.step()


@pytest.mark.parametrize("piece", [1, 3, 100], ids=lambda piece: f"pieces of {piece}")
def test_bf16_moments_are_torchs_moments_rounded_after_each_step(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "PIECE", piece)
    both = pair()
    ours = Bf16Adam(both[0].param_groups, decoupled_weight_decay=True, lr=1e-2)
    for number in range(8):
        before = copy.deepcopy((ours.state_dict()["state"], parameters_of(ours)))
        step((ours, both[1]), number, frozenset({1} if number == 4 else ()))
        for state in both[1].state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
        for mine, other in zip(parameters_of(ours), parameters_of(both[1]), strict=True):
            assert torch.equal(mine, other)
            assert torch.equal(ours.state[mine]["step"], both[1].state[other]["step"])
            for name in ("exp_avg", "exp_avg_sq"):
                assert ours.state[mine][name].dtype == torch.bfloat16
                assert torch.equal(ours.state[mine][name].float(), both[1].state[other][name])
        if number % 3 == 2:
            assert all(map(torch.equal, parameters_of(ours), before[1]))
            for index, state in ours.state_dict()["state"].items():
                assert_same_bits(state, before[0][index])


def test_a_state_dict_of_bf16_moments_stays_bf16_to_the_bit() -> None:
    ours = Bf16Adam(weights(), decoupled_weight_decay=True, lr=1e-2)
    for parameter in parameters_of(ours):
        parameter.grad = parameter.detach().clone()
    ours.step()
    other = Bf16Adam(weights(), decoupled_weight_decay=True, lr=1e-2)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for mine, loaded in zip(ours.state.values(), other.state.values(), strict=True):
        assert [(value.dtype, value.tolist()) for value in mine.values()] == [
            (value.dtype, value.tolist()) for value in loaded.values()
        ]


def test_a_bf16_moment_falls_at_the_largest_beta_and_stands_still_above_it() -> None:
    def ever_stands(beta: float) -> bool:
        # Every bf16 number from 1 to 2: a step without a gradient multiplies the moment by beta.
        moments = 1 + torch.arange(128) / 128
        return bool(((moments * beta).bfloat16() == moments.bfloat16()).any())

    assert not ever_stands(LARGEST_BF16_BETA - 1e-6)
    assert ever_stands(LARGEST_BF16_BETA + 1e-4)
    refused(Optimizer, state_dtype="bf16", betas=(0.9, 0.999), named="optimizer.betas=|above 0.996 ")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_adamw_and_adam_take_bf16_moments(name: str) -> None:
    if name in ("adamw", "adam"):
        section = Optimizer(name=name, state_dtype="bf16")
        assert isinstance(build_optimizer(nn.Linear(2, 2), section, torch.device("cpu")), Bf16Adam)
    else:
        refused(
            Optimizer,
            name=name,
            state_dtype="bf16",
            named=f"optimizer.name={name} |optimizer.state_dtype=bf16|adamw or adam",
        )
