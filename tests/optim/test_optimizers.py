"""Optimizers: the formulas of their authors, and steps that NaN and Inf cannot reach, in any tensor that they keep."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train.checkpoint.contents import optimizer_tensors, restore_optimizer
from accel_train.guard.guard import Limits
from accel_train.model.memory_estimate import state_numel
from accel_train.model.weights import hidden_matrices
from accel_train.optim.custom import try_custom
from accel_train.optim.muon import orthogonalise
from accel_train.optim.optimizers import build_optimizer, describe_optimizer, name_parameters, set_learning_rate
from accel_train.optim.update import FlooredGradScaler, update_within
from accel_train.recipe.optimizer import Optimizer, ParameterGroup

CPU = torch.device("cpu")
OWN = ("muon", "lion")
NAMES = (*OWN, "adafactor", "tests.support.optimizers:Momentum")
TOKENS = torch.randint(64, (40, 4, 16), generator=torch.Generator().manual_seed(0))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


class Trained:
    """A small GPT-2 and its optimizer, a step at a time."""

    def __init__(self, section: Optimizer, scale: float | None = None) -> None:
        self.model = gpt2()
        self.optimizer = name_parameters(build_optimizer(self.model, section, CPU), self.model)
        self.scaler = scale and FlooredGradScaler("cpu", init_scale=scale, growth_interval=2000, floor=scale)
        self.limits = Limits(section.max_grad_norm)
        set_learning_rate(self.optimizer, section.learning_rate)

    def step(self, number: int, factor: float = 1.0) -> bool:
        """Return whether the step was skipped; `factor` is the loss's."""
        loss = self.model(input_ids=TOKENS[number], labels=TOKENS[number]).loss * factor
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        update = update_within(self.limits, self.optimizer, list(self.model.parameters()), self.scaler)  # type: ignore[arg-type]
        return bool(update.skipped)

    def clipped_gradient(self, number: int, weight: nn.Parameter) -> Tensor:
        """The gradient of one weight, all gradients scaled down to the limit of their norm."""
        self.model(input_ids=TOKENS[number], labels=TOKENS[number]).loss.backward()
        assert nn.utils.clip_grad_norm_(self.model.parameters(), self.limits.clip) > 2 * self.limits.clip
        assert weight.grad is not None
        gradient = weight.grad.clone()
        self.model.zero_grad()
        return gradient

    def tensors(self) -> dict[str, Tensor]:
        """Copies of every weight and of all that the optimizer keeps."""
        held = {**dict(self.model.named_parameters()), **optimizer_tensors(self.optimizer)}
        return {name: tensor.detach().clone() for name, tensor in held.items()}


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are not the same in every byte, or not in both."""

    def same(name: str) -> bool:
        return left[name].contiguous().numpy().tobytes() == right[name].contiguous().numpy().tobytes()

    return [name for name in {**left, **right} if name not in left or name not in right or not same(name)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("clean_before", [0, 3], ids=["first step", "later step"])
@pytest.mark.parametrize("scale", [None, 2.0**10], ids=["fp32", "loss scale"])
def test_a_bad_step_changes_no_byte_and_the_next_one_is_as_if_it_had_not_been(
    name: str, poison: float, clean_before: int, scale: float | None
) -> None:
    section = Optimizer.model_validate({"name": name, "learning_rate": 0.02, "max_grad_norm": 0.05})
    trained, clean = Trained(section, scale), Trained(section, scale)
    for number in range(clean_before):
        assert not trained.step(number)
        assert not clean.step(number)
    before = trained.tensors()
    assert trained.step(9, poison)
    after = trained.tensors()
    made_now = {name: tensor for name, tensor in after.items() if name not in before}
    assert not any(tensor.any() for tensor in made_now.values()), "what the first step makes is as new"
    assert differing(before, {name: after[name] for name in before}) == []
    for number in (10, 11):
        assert not trained.step(number)
        assert not clean.step(number)
    assert differing(trained.tensors(), clean.tensors()) == []
    assert len(differing(before, trained.tensors())) >= len(before)


@pytest.mark.parametrize("name", OWN)
def test_a_flag_that_says_finite_changes_no_bit(name: str) -> None:
    plain, flagged = (Trained(Optimizer.model_validate({"name": name})) for _ in range(2))
    for number in range(3):
        plain.step(number)
        flagged.model(input_ids=TOKENS[number], labels=TOKENS[number]).loss.backward()
        norm = nn.utils.clip_grad_norm_(flagged.model.parameters(), math.inf)
        flagged.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        flagged.optimizer.grad_scale = torch.full((), max((float(norm) + 1e-6) / 1.0, 1.0))  # type: ignore[attr-defined]
        flagged.optimizer.step()
        flagged.optimizer.zero_grad()
    assert differing(plain.tensors(), flagged.tensors()) == []


@pytest.mark.parametrize("name", NAMES)
def test_loss_scale_does_not_change_the_update(name: str) -> None:
    section = Optimizer.model_validate({"name": name, "learning_rate": 1e-3})
    plain, scaled = Trained(section), Trained(section, 2.0**10)  # a power of two: exact
    for number in range(3):
        plain.step(number)
        scaled.step(number)
    assert differing(plain.tensors(), scaled.tensors()) == []


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates_of_groups_reach_their_weights(name: str) -> None:
    still = (ParameterGroup(match=("transformer.h.0.*", "*wte*"), lr_scale=0.0),)
    trained = Trained(Optimizer.model_validate({"name": name, "groups": still, "learning_rate": 0.1}))
    before = trained.tensors()
    trained.step(0)
    after = {name: tensor for name, tensor in trained.tensors().items() if name in before}
    moved = differing(before, after)
    assert moved == [name for name in before if not name.startswith("transformer.h.0.") and "wte" not in name]


@pytest.mark.parametrize("name", [*OWN, "adafactor", "adamw", "sgd"])
def test_the_estimate_of_memory_counts_the_numbers_that_are_kept(name: str) -> None:
    section = Optimizer.model_validate({"name": name})
    trained = Trained(section)
    trained.step(0)
    kept = {key: tensor for key, tensor in optimizer_tensors(trained.optimizer).items() if not key.startswith("step.")}
    assert sum(tensor.numel() for tensor in kept.values()) == state_numel(trained.model, section)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str) -> None:
    rate = 0.01 if name in OWN else 0.3
    trained = Trained(Optimizer.model_validate({"name": name, "learning_rate": rate}))

    def loss() -> float:
        with torch.no_grad():
            return float(trained.model(input_ids=TOKENS[0], labels=TOKENS[0]).loss)

    before = loss()
    for _ in range(15):
        trained.step(0)
    assert loss() < before - 0.5


# --- Lion ----------------------------------------------------------------------------------------------------------


def test_lion_moves_each_weight_by_the_learning_rate_and_keeps_the_momentum_of_its_paper() -> None:
    settings = {"name": "lion", "learning_rate": 0.01, "weight_decay": 0.5, "betas": (0.9, 0.99), "max_grad_norm": 0.1}
    trained = Trained(Optimizer.model_validate(settings))
    name = "transformer.h.0.mlp.c_fc.weight"
    weight = trained.model.get_parameter(name)
    kept = torch.zeros_like(weight)
    for number in range(3):
        before = weight.detach().clone()
        gradient = trained.clipped_gradient(number, weight)
        trained.step(number)
        expected = before - 0.01 * ((0.9 * kept + 0.1 * gradient).sign() + 0.5 * before)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-7)
        kept = 0.99 * kept + 0.01 * gradient
        torch.testing.assert_close(optimizer_tensors(trained.optimizer)[f"exp_avg.{name}"], kept)


# --- classes by name -----------------------------------------------------------------------------------------------

# What is wrong with a class, and what the error says of it.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such module": ({"name": "no_such:Class"}, "'no_such:Class' cannot be imported: No module named"),
    "no such class": ({"name": "torch.optim:Adagrat"}, "cannot be imported: .*Adagrat.*; it is looked up on PYTHONPATH"),
    "function": ({"name": "tests.support.optimizers:function"}, "is a function and no class; name a class derived from"),
    "no optimizer": ({"name": "torch.nn:Linear"}, "Linear is not derived from torch.optim.Optimizer; name a class that is"),
    "unknown option": (
        {"name": "adafactor", "options": {"beta": 1}},
        "Adafactor.*raised TypeError: .*'beta'; correct optimizer.options, which are {'beta': 1}",
    ),
    "option out of range": ({"name": "adafactor", "options": {"d": -1}}, "raised ValueError: .*; correct optimizer.options"),
    "learning rate as an option": (
        {"name": "adafactor", "options": {"lr": 1}},
        "multiple values for keyword argument 'lr'; correct optimizer.options",
    ),
    "no weight decay": ({"name": "tests.support.optimizers:NoDecay"}, "knows no weight_decay; set optimizer.weight_decay to 0"),
    "no learning rate": ({"name": "tests.support.optimizers:NoRate"}, "knows no lr; the schedule could not set it"),
    "closure": ({"name": "tests.support.optimizers:NeedsClosure"}, "cannot make a step alone: .*is stepped by step()"),
    "sparse gradients": ({"name": "torch.optim:SparseAdam", "weight_decay": 0}, "cannot make a step alone: .*dense gradients"),
    "state in groups": ({"name": "tests.support.optimizers:KeepsInGroups"}, "keeps k in its parameter groups, which no checkpoint"),
    "state that is a list": (
        {"name": "tests.support.optimizers:KeepsLists"},
        "keeps history as a list, and a checkpoint holds tensors and numbers only",
    ),
    "false promise": ({"name": "tests.support.optimizers:SaysFused"}, "says that it is fused, and a step with NaN changes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_class_that_cannot_be_used_is_refused_before_it_is_used(case: str) -> None:
    settings, said = BAD[case]
    with pytest.raises(ValueError, match=f"^optimizer.name=.*{said}") as caught:
        try_custom(Optimizer.model_validate(settings), CPU, is_sharded=False)
    assert "\n" not in str(caught.value)


def test_state_of_another_shape_than_its_weight_is_refused_where_weights_are_sharded() -> None:
    for name in ("adafactor", "tests.support.optimizers:KeepsRows"):
        try_custom(Optimizer.model_validate({"name": name}), CPU, is_sharded=False)
        with pytest.raises(ValueError, match=r"cannot be sharded as the weight is; use parallel\.strategy ddp"):
            try_custom(Optimizer.model_validate({"name": name}), CPU, is_sharded=True)
    try_custom(Optimizer.model_validate({"name": "tests.support.optimizers:Momentum"}), CPU, is_sharded=True)


def test_options_reach_the_class_and_are_refused_for_others() -> None:
    trained = Trained(
        Optimizer.model_validate({"name": "tests.support.optimizers:Momentum", "options": {"memory": 0.3}})
    )
    assert trained.optimizer.defaults["memory"] == 0.3
    with pytest.raises(
        ValueError, match=r"optimizer\.options are for adafactor and module:Class.* is muon; leave them out"
    ):
        Optimizer.model_validate({"name": "muon", "options": {"ns_steps": 3}})


def test_numbers_of_python_are_kept_in_a_checkpoint_as_what_they_are(tmp_path: Path) -> None:
    section = Optimizer.model_validate({"name": "tests.support.optimizers:Momentum"})
    trained, other = Trained(section), Trained(section)
    for number in range(3):
        trained.step(number)
    save_file(optimizer_tensors(trained.optimizer), tmp_path / "optimizer.safetensors")
    restore_optimizer(tmp_path, other.optimizer)
    state = [next(iter(each.optimizer.state.values())) for each in (trained, other)]
    assert state[1]["steps"] == 3
    assert type(state[1]["steps"]) is int
    assert state[0].keys() == state[1].keys()
    assert differing(optimizer_tensors(trained.optimizer), optimizer_tensors(other.optimizer)) == []


# --- Muon ----------------------------------------------------------------------------------------------------------


def test_muon_makes_matrices_orthogonal_with_the_same_singular_vectors() -> None:
    generator = torch.Generator().manual_seed(1)
    for matrix in (torch.randn(shape, generator=generator) for shape in ((48, 16), (16, 48), (32, 20))):
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        values = u.T @ orthogonalise(matrix) @ vh.T
        off_diagonal = values - torch.diag(values.diag())
        assert off_diagonal.abs().max() < 1e-4
        assert 0.65 < values.diag().min() < values.diag().max() < 1.15
        torch.testing.assert_close(orthogonalise(matrix.T), orthogonalise(matrix).T)
    assert orthogonalise(torch.zeros(4, 6)).count_nonzero() == 0


def test_muon_moves_matrices_by_momentum_decay_and_about_0_2_of_the_learning_rate_as_adamw_does() -> None:
    section = Optimizer.model_validate(
        {"name": "muon", "learning_rate": 0.5, "weight_decay": 0.1, "momentum": 0.9, "max_grad_norm": 0.1}
    )
    trained = Trained(section)
    name = "transformer.h.0.mlp.c_fc.weight"
    weight = trained.model.get_parameter(name)
    kept = torch.zeros_like(weight)
    for number in range(3):
        before = weight.detach().clone()
        gradient = trained.clipped_gradient(number, weight)
        trained.step(number)
        kept = 0.9 * kept + 0.1 * gradient
        update = 0.2 * math.sqrt(64) * orthogonalise(0.9 * kept + 0.1 * gradient)
        torch.testing.assert_close(weight.detach(), 0.95 * before - 0.5 * update, rtol=1e-4, atol=1e-6)
        assert 0.12 < update.square().mean().sqrt() < 0.25
    torch.testing.assert_close(optimizer_tensors(trained.optimizer)[f"momentum_buffer.{name}"], kept)


def test_muon_is_for_the_matrices_of_the_blocks_and_adamw_for_embeddings_norms_biases_and_the_head() -> None:
    trained = Trained(Optimizer(name="muon"))
    trained.step(0)
    kept = optimizer_tensors(trained.optimizer)
    of_muon = {name.partition(".")[2] for name in kept if name.startswith("momentum_buffer.")}
    of_adamw = {name.partition(".")[2] for name in kept if name.startswith("exp_avg.")}
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert of_muon == {f"transformer.h.{block}.{part}.weight" for block in (0, 1) for part in parts}
    assert of_muon | of_adamw == {name for name, _ in trained.model.named_parameters()}
    assert not of_muon & of_adamw
    choice = describe_optimizer(trained.optimizer, "muon")
    assert choice is not None
    assert "8 matrices of the blocks, adamw for the other 20 tensors" in choice.reason
    reference = Trained(Optimizer(name="adamw"))
    reference.step(0)
    for name in of_adamw:
        assert torch.equal(trained.model.get_parameter(name), reference.model.get_parameter(name))


def test_muon_without_matrices_is_refused() -> None:
    model = gpt2()
    for matrix in hidden_matrices(model):
        matrix.requires_grad_(False)
    for each in (model, nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(ValueError, match=r"optimizer\.name=muon: no block .* use adamw"):
            build_optimizer(each, Optimizer(name="muon"), CPU)


def test_muon_trains_matrices_alone_where_nothing_else_is_trained() -> None:
    section: dict[str, Any] = {"name": "muon", "learning_rate": 0.01}
    model = gpt2()
    model.requires_grad_(False)
    matrix = model.get_parameter("transformer.h.1.mlp.c_fc.weight").requires_grad_()
    optimizer = build_optimizer(model, Optimizer.model_validate(section), CPU)
    before = matrix.detach().clone()
    model(input_ids=TOKENS[0], labels=TOKENS[0]).loss.backward()
    update_within(Limits(1.0), optimizer, [matrix], None)
    assert not torch.equal(before, matrix)
