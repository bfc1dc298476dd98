"""Muon's matrices, orthogonalized in stacks, in fp32 and bf16."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train.checkpoint.fingerprint import setting_changes, training_settings
from accel_train.core.state import Choice
from accel_train.guard.guard import Limits
from accel_train.model import weights
from accel_train.model.weights import hidden_matrices, in_shares
from accel_train.optim.muon import Muon, choose_dtype, orthogonalise
from accel_train.optim.optimizers import build_optimizer
from accel_train.optim.schedule import set_learning_rate
from accel_train.optim.update import update_within
from accel_train.recipe.optimizer import Optimizer
from tests.support.runs import REPOSITORY, tiny_recipe

SHAPES = ((12, 20), (20, 12), (12, 20), (9, 9), (20, 12), (9, 9), (30, 7))
VIEWS = {"permute", "transpose", "unbind", "_record_function_enter_new", "_record_function_exit"}
"""Operators that launch no kernel."""


class Launches(TorchDispatchMode):
    """Counts the operators that launch kernels, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if (name := operator.overloadpacket.__name__) not in VIEWS:
            self.counts[name] += 1
        return operator(*arguments, **(named or {}))


def gpt2(layers: int, width: int, vocabulary: int) -> nn.Module:
    config = AutoConfig.for_model(
        "gpt2", n_layer=layers, n_head=2, n_embd=width, n_positions=64, vocab_size=vocabulary,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def muon_of(model: nn.Module, dtype: torch.dtype = torch.float32, rate: float = 0.01) -> Muon:
    optimizer = build_optimizer(model, Optimizer(name="muon", learning_rate=rate), torch.device("cpu"))
    set_learning_rate(optimizer, rate)
    assert isinstance(optimizer, Muon)
    optimizer.dtype = dtype
    return optimizer


def matrices_of(shapes: Sequence[tuple[int, int]], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def muon_over(matrices: Sequence[Tensor]) -> Muon:
    group = {"params": [nn.Parameter(each.clone()) for each in matrices], "is_matrix": True, "weight_decay": 0.1}
    return Muon([group], lr=0.1, momentum=0.9)


def stepped(gradients: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weights after a step of Muon over all matrices together. They were zeros, so they are the updates."""
    optimizer = muon_over([torch.zeros_like(each) for each in gradients])
    optimizer.dtype = dtype
    for weight, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        weight.grad = gradient.clone()
    optimizer.step()
    return [weight.detach() for weight in optimizer.param_groups[0]["params"]]


def test_a_matrix_in_a_stack_is_updated_as_alone() -> None:
    gradients = matrices_of(SHAPES)
    together = stepped(gradients)
    for gradient, update in zip(gradients, together, strict=True):
        [alone] = stepped([gradient])
        torch.testing.assert_close(update, alone, rtol=0, atol=1e-6)
        u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
        # Gradient descent along the matrix's own singular vectors.
        values = -(u.T @ update @ vh.T) / (0.1 * 0.2 * max(gradient.shape) ** 0.5)
        torch.testing.assert_close(values, torch.diag(values.diag()), rtol=0, atol=1e-4)
        # Singular values of square matrices begin near 0.
        assert 0.05 < values.diag().min() < values.diag().max() < 1.21


def test_matrices_of_one_shape_and_transposed_ones_make_one_stack() -> None:
    optimizer, seen = muon_over(matrices_of(SHAPES)), []

    def counted(stack: Tensor) -> Tensor:
        seen.append(tuple(stack.shape))
        return orthogonalise(stack)

    optimizer.orthogonalise = counted
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = weight.detach().clone()
    optimizer.step()
    assert sorted(seen) == [(1, 7, 30), (2, 9, 9), (4, 12, 20)]


def test_a_step_over_12_layers_launches_a_third_of_the_operators_of_one_matrix_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gpt2(12, 16, 32)
    optimizer = muon_of(model)

    def launches() -> Counter[str]:
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        with Launches() as seen:
            optimizer.step()
        return seen.counts

    launches()  # makes the state
    stacked = launches()
    optimizer.dtype = torch.bfloat16
    # Stacks and norms are cast.
    assert launches().total() == stacked.total() + 6
    optimizer.dtype = torch.float32
    monkeypatch.setattr(weights, "STAGE_NUMEL", 0)
    alone = launches()
    # Three shapes, 15 products each; and 48 matrices, each with products of its own.
    assert len(hidden_matrices(model)) == 48
    assert (stacked["bmm"] + stacked["baddbmm"], alone["bmm"] + alone["baddbmm"]) == (3 * 15, 48 * 15)
    # Alone, each also has its own stack, norm, sum, and division.
    assert (stacked.total(), alone.total()) == (349, 349 + 45 * 19)


@pytest.mark.parametrize("shape", [(32, 128), (128, 48), (16, 300)])
def test_bf16_keeps_singular_values_in_the_band_and_the_direction_of_fp32(shape: tuple[int, int]) -> None:
    for seed in range(5):
        gradients = matrices_of([shape] * 3, seed)
        for wide, narrow in zip(stepped(gradients), stepped(gradients, torch.bfloat16), strict=True):
            values = torch.linalg.svdvals(narrow) / (0.1 * 0.2 * max(shape) ** 0.5)
            # fp32 has 0.68 to 1.135; bf16 rounds by 2^-9.
            assert 0.67 < values.min() < values.max() < 1.15
            assert nn.functional.cosine_similarity(wide.flatten(), narrow.flatten(), dim=0) > 0.9997
            assert 1e-4 < (wide - narrow).norm() / wide.norm() < 0.02


def test_the_momentum_stays_fp32_and_is_the_same_in_bf16() -> None:
    gradients, found = matrices_of(SHAPES), []
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = muon_over(gradients)
        optimizer.dtype = dtype
        for weight, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        found.append([state["momentum_buffer"] for state in optimizer.state.values()])
    for wide, narrow in zip(*found, strict=True):
        assert narrow.dtype == torch.float32
        assert torch.equal(wide, narrow)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_stages_hold_each_matrix_once_and_few_elements_of_a_process(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "STAGE_NUMEL", 1000)
    shapes = [(20, 20 + 10 * (number % 3)) for number in range(40)] + [(50, 50)]
    stages = in_shares(range(len(shapes)), shapes, size)
    assert sorted(number for shares in stages for share in shares for number in share) == list(range(len(shapes)))
    assert len(stages) > 1
    for shares in stages:
        assert len(shares) == size
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 1
        for share in shares:
            # One that is larger than the bound is alone.
            assert sum(shapes[number][0] * shapes[number][1] for number in share) <= 1000 or len(share) == 1


def test_small_stages_give_the_same_update(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = matrices_of(SHAPES)
    together = stepped(gradients)
    monkeypatch.setattr(weights, "STAGE_NUMEL", 300)
    for ours, theirs in zip(stepped(gradients), together, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_compiled_it_is_the_same_with_fewer_graphs_than_shapes() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(orthogonalise, backend=backend, fullgraph=True)
    with torch.no_grad():
        for count, rows, columns in ((4, 8, 16), (3, 8, 24), (2, 8, 8), (7, 12, 20), (5, 9, 30), (6, 10, 11)):
            stack = torch.stack(matrices_of([(rows, columns)] * count))
            torch.testing.assert_close(compiled(stack), orthogonalise(stack), rtol=0, atol=1e-6)
    assert 1 <= len(graphs) < 6


@pytest.mark.parametrize(
    ("setting", "mixed_precision", "device", "chosen"),
    [
        ("auto", "bf16", "cuda", "bf16"),
        ("auto", "fp8", "cuda", "bf16"),
        ("auto", "fp16", "cuda", "fp32"),
        ("auto", "no", "cuda", "fp32"),
        ("auto", "bf16", "cpu", "fp32"),
        ("auto", "no", "cpu", "fp32"),
        ("fp32", "bf16", "cuda", "fp32"),
        ("bf16", "no", "cpu", "bf16"),
    ],
)
def test_products_are_bf16_where_a_gpu_trains_in_bf16_or_as_set(
    setting: Any, mixed_precision: str, device: str, chosen: str
) -> None:
    choice = choose_dtype(Optimizer(name="muon", muon_dtype=setting), mixed_precision, device)
    assert choice.value == chosen
    assert choice.reason


def test_a_resume_of_an_older_version_tells_that_products_are_bf16_now(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, optimizer={"name": "muon"})
    fp32, bf16 = (training_settings(recipe, {"optimizer.muon_dtype": Choice(each)}, {}) for each in ("fp32", "bf16"))
    older = {name: value for name, value in fp32.values.items() if name != "optimizer.muon_dtype"}
    for saved in (older, fp32.values):
        trainer = {"settings": saved, "origins": fp32.origins}
        [change] = setting_changes(trainer, bf16, recipe)
        assert (change.name, change.was, change.now) == ("optimizer.muon_dtype", "fp32", "bf16")
        assert setting_changes(trainer, fp32, recipe) == []
    adamw = tiny_recipe(tmp_path, optimizer={"name": "adamw"})
    assert "optimizer.muon_dtype" not in training_settings(adamw, {}, {}).values


@pytest.mark.slow
def test_bf16_changes_the_loss_by_less_than_another_seed() -> None:
    text = torch.frombuffer(bytearray((REPOSITORY / "LICENSE").read_bytes()), dtype=torch.uint8).long()
    losses: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for dtype, found in losses.items():
        for seed in range(5):
            torch.manual_seed(seed)
            model = gpt2(2, 32, 256)
            optimizer, last = muon_of(model, dtype, rate=0.02), []
            generator = torch.Generator().manual_seed(seed)
            for _ in range(80):
                starts = torch.randint(len(text) - 64, (8,), generator=generator)
                batch = torch.stack([text[start : start + 64] for start in starts])
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                last.append(loss.item())
                update_within(Limits(1.0), optimizer, list(model.parameters()), None)
            found.append(sum(last[-10:]) / 10)
    wide, narrow = (torch.tensor(found) for found in losses.values())
    # It learns, and the two types do not give the same numbers: they differ by 0.0007, and the seeds by 0.12.
    assert wide.max() < 3.5
    assert not torch.equal(wide, narrow)
    assert (wide - narrow).abs().max() < (wide.max() - wide.min()) / 10
