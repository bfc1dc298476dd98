"""The step: exact gradients however the global batch is cut, and an update that NaN and Inf cannot reach."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.core.state import Choice
from accel_train.engine import step as engine_step
from accel_train.engine.step import Agreement, Counted, MicroBatch, Wire, forward_backward, seed_step
from accel_train.guard.guard import Limits
from accel_train.model.isolation import RandomState
from accel_train.model.training_module import TrainingModule
from accel_train.optim import update
from accel_train.optim.optimizers import build_optimizer
from accel_train.optim.update import FlooredGradScaler, Update, update_within
from accel_train.parallel.ddp import Ddp
from accel_train.recipe.optimizer import Optimizer
from accel_train.recipe.parallel import Parallel
from accel_train.runtime.memory import PeakMemory
from tests.support.devices import on_gpu

CPU = torch.device("cpu")


class OtherDevice:
    """The module of a device that this machine lacks, as torch.xpu and torch.mps have it."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.manual_seed, self.set_rng_state = self.generator.manual_seed, self.generator.set_state

    def get_rng_state(self) -> Tensor:
        return self.generator.get_state()


@pytest.mark.parametrize("kind", ["xpu", "mps", "cuda"])
def test_dropout_on_any_device_is_seeded_by_step_and_process_and_restored(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    module, device = OtherDevice(), torch.device(kind)
    monkeypatch.setattr(torch, "get_device_module", lambda asked: module)
    monkeypatch.setattr(torch.cuda, "default_generators", (module.generator,))

    def draw(step: int, rank: int = 0) -> float:
        seed_step(1, step, rank, device)
        return torch.rand((), generator=module.generator).item()

    assert draw(3) == draw(3) != draw(4)
    assert len({draw(3, rank) for rank in range(4)}) == 4
    kept = RandomState(device)
    following = torch.rand((), generator=module.generator)
    kept.put_back()
    assert torch.rand((), generator=module.generator) == following


def test_peak_memory_of_another_gpu_is_read_from_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    module = SimpleNamespace(
        max_memory_allocated=lambda device: 7,
        memory_allocated=lambda device: 1,
        memory_reserved=lambda device: 90,
        get_device_properties=lambda device: SimpleNamespace(total_memory=100),
        empty_cache=lambda: emptied.append(True),
        reset_peak_memory_stats=lambda device: None,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    memory = PeakMemory(torch.device("xpu"))
    with memory.phase("train"):
        pass  # the peak is read at the end of a phase
    assert memory.peaks == {"train": 7}
    assert emptied


class SumOfSquares:
    """A task with ragged counts: the loss of a row counts only where its weight is 1."""

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        error = model(batch["x"]).squeeze(-1) - batch["y"]
        return (error.square() * batch["weight"]).sum()


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def rows(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, 4, generator=generator), torch.randn(count, generator=generator)
    return {"x": x, "y": y, "weight": (torch.arange(count) % 3 != 0).float()}


def cut(batch: dict[str, Tensor], parts: int) -> list[MicroBatch]:
    pieces = [dict(zip(batch, tensors)) for tensors in zip(*(t.chunk(parts) for t in batch.values()))]
    return [(piece, int(piece["weight"].sum())) for piece in pieces]


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def one_step(accelerator: Accelerator, module: nn.Module, micro_batches: list[MicroBatch]) -> tuple[Tensor, Agreement]:
    agreement = Agreement(accelerator)
    agreement.begin(Wire(sum(count for _, count in micro_batches)), None)
    strategy = Ddp(Parallel(), Choice(1, "one process"))
    strategy.attach(accelerator)
    strategy.module = module
    return forward_backward(strategy, micro_batches, agreement), agreement


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = list(model.parameters())
    for parameter in model.parameters():
        tensors += list(optimizer.state[parameter].values())
    return [tensor.detach().clone() for tensor in tensors]


def assert_same_bits(before: list[Tensor], after: list[Tensor]) -> None:
    assert len(before) == len(after)
    for left, right in zip(before, after):
        assert torch.equal(left, right)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_gradient_is_that_of_the_mean_over_all_targets_however_the_batch_is_cut(
    accelerator: Accelerator, parts: int
) -> None:
    batch = rows(24)
    reference = a_model()
    (SumOfSquares().loss_sum(reference, batch) / batch["weight"].sum()).backward()
    module = TrainingModule(a_model(), SumOfSquares())  # type: ignore[arg-type]
    loss_sum, _ = one_step(accelerator, module, cut(batch, parts))
    assert loss_sum.item() == pytest.approx(SumOfSquares().loss_sum(reference, batch).item(), rel=1e-6)
    for expected, got in zip(reference.parameters(), module.model.parameters()):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-5, atol=1e-7)


def test_a_sample_read_only_to_keep_processes_together_weighs_nothing(accelerator: Accelerator) -> None:
    batch, other = rows(8), {**rows(4), "weight": torch.ones(4)}
    count = int(batch["weight"].sum())
    gradients = []
    for micro_batches in ([(batch, count), (other, 0)], [(batch, count)]):
        module = TrainingModule(a_model(), SumOfSquares())  # type: ignore[arg-type]
        loss_sum, _ = one_step(accelerator, module, micro_batches)
        gradients.append([loss_sum, *(parameter.grad for parameter in module.parameters())])
    for left, right in zip(*gradients):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_micro_batch_without_targets_adds_nothing_and_is_no_incident(accelerator: Accelerator) -> None:
    batch = rows(8)
    empty = {**batch, "weight": torch.zeros(8)}
    module = TrainingModule(a_model(), SumOfSquares())  # type: ignore[arg-type]
    one_step(accelerator, module, [(batch, int(batch["weight"].sum())), (empty, 0)])
    alone = TrainingModule(a_model(), SumOfSquares())  # type: ignore[arg-type]
    one_step(accelerator, alone, [(batch, int(batch["weight"].sum()))])
    for left, right in zip(module.parameters(), alone.parameters()):
        torch.testing.assert_close(left.grad, right.grad, rtol=0, atol=0)


def test_a_global_batch_without_targets_has_a_gradient_that_is_not_applied(accelerator: Accelerator) -> None:
    empty = {**rows(8), "weight": torch.zeros(8)}
    nothing = TrainingModule(a_model(), SumOfSquares())  # type: ignore[arg-type]
    loss_sum, _ = one_step(accelerator, nothing, [(empty, 0)])
    assert loss_sum == 0
    assert all(parameter.grad is not None and parameter.grad.isnan().all() for parameter in nothing.parameters())


def test_infinite_loss_with_finite_gradients_is_refused_too(accelerator: Accelerator) -> None:
    class Infinite(SumOfSquares):
        def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            return super().loss_sum(model, batch) + math.inf  # its gradient is that of the finite part

    module = TrainingModule(a_model(), Infinite())  # type: ignore[arg-type]
    optimizer = build_optimizer(module.model, Optimizer(), CPU)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    one_step(accelerator, module, cut(rows(8), 1))
    _, skipped, _ = update_within(Limits(1.0), optimizer, list(module.parameters()), None)
    assert skipped.item() == 1.0
    assert_same_bits(before, [parameter.detach() for parameter in module.parameters()])


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3, 1e3])
def test_update_is_that_of_clip_grad_norm_and_step(accelerator: Accelerator, max_grad_norm: float) -> None:
    ours, theirs = a_model(), a_model()
    optimizer = build_optimizer(ours, Optimizer(learning_rate=0.01), CPU)
    reference = build_optimizer(theirs, Optimizer(learning_rate=0.01), CPU)
    for _ in range(5):
        one_step(accelerator, TrainingModule(ours, SumOfSquares()), cut(rows(16), 1))  # type: ignore[arg-type]
        norm, skipped, _ = update_within(Limits(max_grad_norm), optimizer, list(ours.parameters()), None)
        one_step(accelerator, TrainingModule(theirs, SumOfSquares()), cut(rows(16), 1))  # type: ignore[arg-type]
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm or math.inf)
        reference.step()
        reference.zero_grad()
        assert skipped.item() == 0.0
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for left, right in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_64_or_16_bits_is_clipped_and_its_bad_step_skipped(
    accelerator: Accelerator, dtype: torch.dtype
) -> None:
    torch.set_default_dtype(dtype)
    try:
        model = a_model()
        optimizer = build_optimizer(model, Optimizer(learning_rate=0.01), CPU)
        for factor, is_skipped in ((1.0, 0.0), (math.nan, 1.0)):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            (model(torch.randn(8, 4)).square().sum() * factor).backward()
            norm, skipped, _ = update_within(Limits(1e-3), optimizer, list(model.parameters()), None)
            assert norm.dtype == dtype
            assert skipped.item() == is_skipped
            assert torch.equal(before[0], model[0].weight) == bool(is_skipped)
    finally:
        torch.set_default_dtype(torch.float32)


def test_optimizer_without_a_fused_kernel_skips_as_exactly(accelerator: Accelerator) -> None:
    module = TrainingModule(a_model(), SumOfSquares())  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=False)
    parameters = list(module.parameters())
    one_step(accelerator, module, cut(rows(8), 1))
    update_within(Limits(1.0), optimizer, parameters, None)
    before = snapshot(module.model, optimizer)
    bad = rows(8)
    bad["y"][0], bad["weight"][0] = math.nan, 1.0
    one_step(accelerator, module, cut(bad, 1))
    update_within(Limits(1.0), optimizer, parameters, None)
    assert_same_bits(before, snapshot(module.model, optimizer))


def test_fp16_overflow_skips_halves_the_scale_and_never_passes_the_floor(accelerator: Accelerator) -> None:
    module = TrainingModule(a_model(), SumOfSquares())  # type: ignore[arg-type]
    optimizer = build_optimizer(module.model, Optimizer(), CPU)
    accelerator.scaler = FlooredGradScaler("cpu", init_scale=16.0, growth_interval=2000, floor=1.0)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    bad = rows(8)
    bad["x"][3, 2] = math.inf
    scales = []
    for _ in range(200):
        one_step(accelerator, module, cut(bad, 2))
        _, skipped, scale = update_within(Limits(1.0), optimizer, list(module.parameters()), accelerator.scaler)
        assert skipped.item() == 1.0
        scales.append(scale.item())
    assert scales[:6] == [16.0, 8.0, 4.0, 2.0, 1.0, 1.0]
    assert min(scales) == 1.0
    assert_same_bits(before, [parameter.detach() for parameter in module.parameters()])
    one_step(accelerator, module, cut(rows(8), 2))
    _, skipped, _ = update_within(Limits(1.0), optimizer, list(module.parameters()), accelerator.scaler)
    assert skipped.item() == 0.0
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_loss_scale_does_not_change_the_update(accelerator: Accelerator) -> None:
    plain, scaled = a_model(), a_model()
    for model, scale in ((plain, None), (scaled, 2.0**10)):
        scaler = None
        if scale is not None:
            scaler = FlooredGradScaler("cpu", init_scale=scale, growth_interval=2000, floor=1.0)
        accelerator.scaler = scaler
        optimizer = build_optimizer(model, Optimizer(learning_rate=0.01), CPU)
        for _ in range(3):
            one_step(accelerator, TrainingModule(model, SumOfSquares()), cut(rows(16), 4))  # type: ignore[arg-type]
            update_within(Limits(0.1), optimizer, list(model.parameters()), scaler)
    for left, right in zip(plain.parameters(), scaled.parameters()):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_outcome_of_a_step_is_read_with_the_next_one(accelerator: Accelerator) -> None:
    agreement = Agreement(accelerator)
    agreement.begin(Wire(10), None)
    agreement.share_of_a_target()
    assert agreement.read_last() is None
    update = Update(torch.tensor(3.0), torch.tensor(0.0), torch.tensor(2.0))
    first = agreement.outcome(1, 0.5, Limits(1.0), torch.tensor(25.0), update)
    agreement.begin(Wire(7, True), first)
    assert agreement.share_of_a_target().item() == pytest.approx(1 / 7)
    result = agreement.read_last()
    assert result is not None
    assert (result.step, result.learning_rate, result.loss, result.num_targets) == (1, 0.5, 2.5, 10)
    assert (result.grad_norm, result.skipped, result.loss_scale, result.stop_requested) == (3.0, False, 2.0, False)
    assert (result.gradient_sum_here, result.save_failed, result.ran_out_of_memory) == (3.0, False, False)
    nan, inf, one = torch.tensor(math.nan), torch.tensor(math.inf), torch.tensor(1.0)
    second = agreement.outcome(2, 0.5, Limits(1.0), nan, Update(inf, one, None))
    settled = agreement.settle(Wire(0), second)
    assert math.isnan(settled.loss)
    assert (settled.skipped, settled.stop_requested, settled.num_targets, settled.loss_scale) == (True, True, 7, None)


def a_strategy(accelerator: Accelerator, kind: type[Ddp] = Ddp) -> Ddp:
    strategy = kind(Parallel(), Choice(1, "one process"))
    strategy.attach(accelerator)
    strategy.module = TrainingModule(a_model(), SumOfSquares())  # type: ignore[arg-type]
    return strategy


def test_gradients_are_reduced_with_the_last_micro_batch_alone(accelerator: Accelerator) -> None:
    reduced: list[bool] = []

    class Noted(Ddp):
        def accumulating(self, reduce: bool) -> AbstractContextManager[None]:
            reduced.append(reduce)
            return super().accumulating(reduce)

    for reduce in (True, False):
        agreement = Agreement(accelerator)
        agreement.begin(Wire(8), None)
        forward_backward(a_strategy(accelerator, Noted), cut(rows(12), 3), agreement, reduce=reduce)
    assert reduced == [False, False, True, False, False, False]


@pytest.mark.parametrize("worst", [1.0, math.inf])
def test_a_loss_that_is_not_finite_is_a_fault_of_the_step(worst: float, accelerator: Accelerator) -> None:
    batch, strategy, agreement = rows(12), a_strategy(accelerator), Agreement(accelerator)
    batch["y"][1] = worst
    agreement.begin(Wire(8), None)
    forward_backward(strategy, cut(batch, 2), agreement)
    assert strategy.fault is None if math.isfinite(worst) else strategy.fault is not None and strategy.fault.isnan()


@pytest.mark.parametrize("meets", [False, True])
def test_a_pass_over_the_global_batch_may_fail_alone_unless_forwards_meet(
    meets: bool, accelerator: Accelerator
) -> None:
    told: dict[str, bool] = {}

    class Meeting(Ddp):
        meets_in_forward = meets  # type: ignore[assignment]

    def over(*_: object, **how: bool) -> AbstractContextManager[None]:
        told.update(how)
        return nullcontext()

    global_loss: Any = SimpleNamespace(over=over, loss=None)
    agreement = Agreement(accelerator, global_loss)
    agreement.begin(Wire(8), None)
    forward_backward(a_strategy(accelerator, Meeting), cut(rows(12), 1), agreement)
    assert told == {"is_alone": True, "one_each": True, "can_fail_alone": not meets}


def test_one_target_in_the_first_step_has_the_whole_weight(accelerator: Accelerator) -> None:
    agreement = Agreement(accelerator)
    agreement.begin(Wire(1), None)
    assert agreement.share_of_a_target().item() == 1.0


def test_statistics_are_added_in_64_bits(accelerator: Accelerator) -> None:
    assert Agreement(accelerator).dtype == torch.float64


@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_a_task_counts_is_read_with_its_step_and_not_with_a_repeated_one(
    accelerator: Accelerator, num_processes: int
) -> None:
    """With 2, the statistics travel through a collective: a group of this process alone, whose sum is its part."""
    counted = Counted(2)
    agreement = Agreement(accelerator, counted=counted)
    agreement.world_size = num_processes
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        last, results = None, []
        for step in (1, 2, 3):
            counted.add(torch.tensor([99.0, 99.0]))  # of an attempt that is repeated
            agreement.begin(Wire(10 * step), last)
            agreement.share_of_a_target()
            results.append(agreement.read_last())
            for part in ([step, 0.5], [1.0, 0.25])[: 3 - step]:  # the third step counts nothing
                counted.add(torch.tensor(part))
            update = Update(torch.tensor(float(step)), torch.tensor(0.0), None)
            last = agreement.outcome(step, 0.5, Limits(1.0), torch.tensor(20.0 * step), update)
        results.append(agreement.settle(Wire(0), last))
    finally:
        dist.destroy_process_group()
    read = [result for result in results if result is not None]
    assert [result.counts for result in read] == [(2.0, 0.75), (2.0, 0.5), (0.0, 0.0)]
    assert [(each.step, each.loss, each.num_targets) for each in read] == [(1, 2.0, 10), (2, 2.0, 20), (3, 2.0, 30)]
    assert [each.grad_norm * num_processes for each in read] == [1.0, 2.0, 3.0]


def test_random_numbers_of_a_step_depend_on_seed_step_and_process_and_on_nothing_else() -> None:
    def draw(seed: int, step: int, rank: int) -> list[float]:
        seed_step(seed, step, rank, CPU)
        return torch.rand(4).tolist()

    first = draw(0, 5, 1)
    torch.rand(100)
    assert draw(0, 5, 1) == first
    others = [draw(1, 5, 1), draw(0, 6, 1), draw(0, 5, 0), draw(0, 1, 5)]
    assert first not in others
    assert len({tuple(numbers) for numbers in others}) == 4


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 1.7, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("limits", [Limits(1.0), Limits(0.0), Limits(1.0, 1.5), Limits(0.5, 1e9)])
def test_what_the_kernel_is_told_is_the_same_decided_on_the_host_and_on_the_device(norm: float, limits: Limits) -> None:
    """Where a number can be seen the host decides; where it cannot, the device does: the same, up to the last bit of
    the clip.
    """
    on_host, on_device = (decide(torch.tensor(norm), limits) for decide in (update._on_host, update._on_device))
    assert on_host[0] == on_device[0] == on_device[1]
    assert (on_host[1] is None) == (on_device[1] == 0), "none means that the step is made"
    if on_host[1] is None:
        factors = [1.0 if scale is None else float(scale) for scale in (on_host[2], on_device[2])]
        assert factors[0] == pytest.approx(factors[1], rel=2e-7)


@pytest.mark.parametrize("number", [torch.tensor, on_gpu], ids=["host", "device"])
@pytest.mark.parametrize("norm", [0.0, 2.5, math.inf])
def test_norm_is_nan_exactly_if_a_target_has_no_weight(number: Callable[..., Tensor], norm: float) -> None:
    assert update.nan_without_targets(torch.tensor(norm), number(0.25)).item() == norm
    assert math.isnan(update.nan_without_targets(torch.tensor(norm), number(math.nan)))


@pytest.mark.parametrize("number", [torch.tensor, on_gpu], ids=["host", "device"])
@pytest.mark.parametrize("loss", [0.0, 2.5, math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_makes_its_gradients_so_and_another_one_keeps_its_share(
    number: Callable[..., Tensor], loss: float
) -> None:
    weight = float(engine_step._weight(torch.tensor(0.25), number(loss)))
    assert weight == 0.25 if math.isfinite(loss) else math.isnan(weight)


@pytest.mark.parametrize("growth_interval", [1, 2000])
def test_a_batch_without_targets_leaves_the_loss_scale_and_its_count_as_they_are(
    accelerator: Accelerator, growth_interval: int
) -> None:
    """Neither a good step, which makes the scale grow, nor an overflow, which halves it."""
    scaler = FlooredGradScaler("cpu", init_scale=16.0, growth_interval=growth_interval, floor=1.0)
    layer = nn.Linear(4, 3)
    optimizer = build_optimizer(layer, Optimizer(weight_decay=0.5), CPU)
    seen = []
    for labels in ([0, 1], [-100, -100], [2, 1]):
        loss = nn.functional.cross_entropy(layer(torch.ones(2, 4)), torch.tensor(labels), reduction="sum")
        share = torch.full((), 0.5 if labels[0] >= 0 else math.nan)
        loss.backward(scaler.scale(share))
        _, skipped, _ = update_within(Limits(1.0), optimizer, list(layer.parameters()), scaler, share)
        assert skipped.item() == (labels[0] < 0)
        assert scaler._growth_tracker is not None
        seen.append((scaler.scale_tensor.item(), scaler._growth_tracker.item()))
    assert seen[1] == seen[0]
    assert seen[2] != seen[0]
