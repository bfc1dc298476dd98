"""Optimizers: the formulas of their authors, and steps that NaN and Inf cannot reach, in any tensor that they keep."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from accel_train.checkpoint.contents import optimizer_tensors, restore_optimizer
from accel_train.checkpoint.sharded import copy_to_host
from accel_train.core.errors import SettingError
from accel_train.guard.guard import Limits
from accel_train.model.memory_estimate import state_bytes
from accel_train.model.weights import hidden_matrices
from accel_train.optim.custom import try_custom
from accel_train.optim.muon import orthogonalise
from accel_train.optim.optimizers import build_optimizer, describe_optimizer, name_parameters
from accel_train.optim.schedule import set_learning_rate
from accel_train.optim.schedule_free import ScheduleFreeAdamW, ScheduleFreeAverage
from accel_train.optim.update import FlooredGradScaler, update_within
from accel_train.recipe.optimizer import OPTIMIZERS, Optimizer, ParameterGroup
from tests.support.runs import REPOSITORY, Settings, refused
from tests.support.wording import assert_golden, raises_golden

CPU = torch.device("cpu")
OURS = "tests.support.optimizers"
OWN = ("muon", "lion")
PACKAGED = ("adamw_8bit", "schedule_free_adamw")
NAMES = (*OPTIMIZERS, f"{OURS}:Momentum")
TOKENS = torch.randint(64, (40, 4, 16), generator=torch.Generator().manual_seed(0))


def gpt2(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_head=2, n_embd=width, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


class Trained:
    """A small GPT-2 and its optimizer, a step at a time."""

    def __init__(self, section: Optimizer, scale: float | None = None) -> None:
        self.model = gpt2(32 if section.name == "adamw_8bit" else 16)  # no matrix of 16 columns has 4,096 numbers
        self.optimizer = name_parameters(build_optimizer(self.model, section, CPU), self.model)
        self.scaler = scale and FlooredGradScaler("cpu", init_scale=scale, growth_interval=2000, floor=scale)
        self.limits = Limits(section.max_grad_norm)
        set_learning_rate(self.optimizer, section.learning_rate)

    def step(self, number: int, factor: float = 1.0) -> bool:
        """Return whether the step was skipped; `factor` is the loss's."""
        loss = self.model(input_ids=TOKENS[number], labels=TOKENS[number]).loss * factor
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        weights = list(self.model.parameters())
        update = update_within(self.limits, self.optimizer, weights, self.scaler)  # type: ignore[arg-type]
        return bool(update.skipped)

    def steps(self, num: int) -> None:
        for number in range(num):
            assert not self.step(number)

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


def differing(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not the same in every byte, or not in both."""

    def same(name: str) -> bool:
        ours, theirs = (each[name].detach().contiguous().numpy().tobytes() for each in (left, right))
        return ours == theirs

    return [name for name in {**left, **right} if name not in left or name not in right or not same(name)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("clean_before", [0, 3], ids=["first step", "later step"])
@pytest.mark.parametrize("scale", [None, 2.0**10], ids=["fp32", "loss scale"])
def test_a_bad_step_changes_no_byte_and_the_next_one_is_as_if_it_had_not_been(
    name: str, poison: float, clean_before: int, scale: float | None
) -> None:
    section = Optimizer(name=name, learning_rate=0.02, max_grad_norm=0.05)
    trained, clean = Trained(section, scale), Trained(section, scale)
    trained.steps(clean_before)
    clean.steps(clean_before)
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
    moving = [
        name for name in before if not name.startswith(("qmap", "lr_max"))
    ]  # a table, and the highest rate so far
    assert len(differing(before, trained.tensors())) >= len(moving)


@pytest.mark.parametrize("name", (*OWN, "adamw"))
def test_a_flag_that_says_finite_changes_no_bit(name: str) -> None:
    plain, flagged = (Trained(Optimizer(name=name)) for _ in range(2))
    for number in range(3):
        plain.step(number)
        flagged.model(input_ids=TOKENS[number], labels=TOKENS[number]).loss.backward()
        norm = nn.utils.clip_grad_norm_(flagged.model.parameters(), math.inf)
        flagged.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        scale = torch.full((), max((float(norm) + 1e-6) / 1.0, 1.0))
        flagged.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        flagged.optimizer.step()
        flagged.optimizer.zero_grad()
    assert differing(plain.tensors(), flagged.tensors()) == []


@pytest.mark.parametrize("name", NAMES)
def test_loss_scale_does_not_change_the_update(name: str) -> None:
    section = Optimizer(name=name, learning_rate=1e-3)
    plain, scaled = Trained(section), Trained(section, 2.0**10)  # a power of two: exact
    plain.steps(3)
    scaled.steps(3)
    assert differing(plain.tensors(), scaled.tensors()) == []


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates_of_groups_reach_their_weights(name: str) -> None:
    still = (ParameterGroup(match=("transformer.h.0.*", "*wte*"), lr_scale=0.0),)
    trained = Trained(Optimizer(name=name, groups=still, learning_rate=0.1))
    before = {name: weight.detach().clone() for name, weight in trained.model.named_parameters()}
    trained.step(0)
    moved = differing(before, dict(trained.model.named_parameters()))
    assert moved == [name for name in before if not name.startswith("transformer.h.0.") and "wte" not in name]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("setting, value", [("betas", (0.5, 0.6)), ("eps", 0.1), ("momentum", 0.3)])
def test_a_setting_changes_the_weights_of_exactly_the_optimizers_that_are_said_to_read_it(
    name: str, setting: str, value: Any
) -> None:
    trained = [Trained(Optimizer(name=name, **{setting: value} if is_set else {})) for is_set in (False, True)]
    for each in trained:
        each.steps(3)
    pairs = zip(*(each.model.parameters() for each in trained), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs) == (setting in OPTIMIZERS[name].settings)


def test_the_page_about_tasks_lists_every_optimizer() -> None:
    rows = [line for line in (REPOSITORY / "docs" / "tasks.md").read_text().splitlines() if line.startswith("| `")]
    assert [name for name in OPTIMIZERS if not any(f"`{name}`" in row for row in rows)] == []


@pytest.mark.parametrize("name", [*OPTIMIZERS, "bf16"])
def test_the_estimate_of_memory_counts_the_bytes_that_are_kept(name: str) -> None:
    section = Optimizer.model_validate({"state_dtype": "bf16"} if name == "bf16" else {"name": name})
    trained = Trained(section)
    trained.step(0)
    kept = {key: tensor for key, tensor in optimizer_tensors(trained.optimizer).items() if tensor.dim()}
    assert sum(tensor.nbytes for tensor in kept.values()) == state_bytes(trained.model, section)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str) -> None:
    rate = 0.01 if name in (*OWN, *PACKAGED, "adam", "adamw") else 0.3
    trained = Trained(Optimizer(name=name, learning_rate=rate))

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


# --- 8 bits --------------------------------------------------------------------------------------------------------


def test_moments_are_kept_in_8_bits_but_for_embeddings_and_small_tensors() -> None:
    trained = Trained(Optimizer(name="adamw_8bit"))
    trained.steps(3)
    kept = {name.removeprefix("state1."): each.dtype for name, each in trained.tensors().items() if "state1." in name}
    large = {name for name, weight in trained.model.named_parameters() if weight.numel() >= 4096}
    assert large
    assert {name for name, dtype in kept.items() if dtype == torch.uint8} == large
    assert kept.keys() == dict(trained.model.named_parameters()).keys()
    embedding = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 128))
    optimizer = build_optimizer(embedding, Optimizer(name="adamw_8bit"), CPU)
    embedding(torch.arange(9)).sum().backward()
    update_within(Limits(1.0), optimizer, list(embedding.parameters()), None)
    moments = [optimizer.state[layer.weight]["state1"] for layer in embedding]  # type: ignore[index]
    assert [each.dtype for each in moments] == [torch.float32, torch.uint8]


def test_8_bits_train_as_fp32_does_but_for_the_rounding_of_moments() -> None:
    def losses(name: str) -> list[float]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        section = Optimizer(name=name, learning_rate=3e-3)
        optimizer, inputs = build_optimizer(layers, section, CPU), torch.randn(32, 64)
        found = []
        for _ in range(30):
            loss = (layers(inputs) - inputs.roll(1, 1)).square().mean()
            loss.backward()
            found.append(loss.item())
            update_within(Limits(1.0), optimizer, list(layers.parameters()), None)
        return found

    ours, whole = losses("adamw_8bit"), losses("adamw")
    assert whole[-1] < whole[0] / 3
    assert ours != whole
    assert ours == pytest.approx(whole, rel=0.02)


# --- schedule-free -------------------------------------------------------------------------------------------------


def free(**settings: Any) -> Trained:
    return Trained(Optimizer(name="schedule_free_adamw", learning_rate=0.01, **settings))


def average_of(trained: Trained) -> ScheduleFreeAverage:
    assert isinstance(trained.optimizer, ScheduleFreeAdamW)
    return ScheduleFreeAverage(list(trained.model.named_parameters()), trained.optimizer)


def test_steps_and_average_are_those_of_the_package() -> None:
    trained, model = free(max_grad_norm=0, options={"warmup_steps": 3}), gpt2()
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in build_optimizer(model, Optimizer(), CPU).param_groups
    ]
    theirs = AdamWScheduleFree(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, warmup_steps=3)
    theirs.train()
    for number in range(6):
        trained.step(number)
        model(input_ids=TOKENS[number], labels=TOKENS[number]).loss.backward()
        theirs.step()
        theirs.zero_grad()
    weights = dict(trained.model.named_parameters())
    assert differing(dict(model.named_parameters()), weights) == []
    theirs.eval()
    assert differing(dict(model.named_parameters()), average_of(trained).tensors()) == []


def test_an_evaluation_leaves_every_bit_of_weights_and_state() -> None:
    trained = free()
    trained.steps(3)
    before, average = trained.tensors(), average_of(trained)
    with average.in_place():
        inside = {name: weight.detach().clone() for name, weight in trained.model.named_parameters()}
    assert differing(before, trained.tensors()) == []
    assert differing(inside, average.tensors()) == []
    assert set(differing(inside, {name: before[name] for name in inside})) == set(inside)


def test_before_the_first_step_the_average_is_the_weights() -> None:
    trained = free()
    average = average_of(trained).tensors()
    assert differing(average, dict(trained.model.named_parameters())) == []
    assert not {each.data_ptr() for each in average.values()} & {each.data_ptr() for each in trained.model.parameters()}


@pytest.mark.parametrize("name", PACKAGED)
def test_state_of_packages_is_restored_to_the_bit(name: str, tmp_path: Path) -> None:
    section = Optimizer(name=name, learning_rate=0.01)
    trained, other = Trained(section), Trained(section)
    trained.steps(3)
    save_file(copy_to_host(optimizer_tensors(trained.optimizer)), tmp_path / "optimizer.safetensors")
    restore_optimizer(tmp_path, other.optimizer)
    other.model.load_state_dict(trained.model.state_dict())
    for number in (3, 4):
        trained.step(number)
        other.step(number)
    assert differing(trained.tensors(), other.tensors()) == []
    kinds = [
        [{key: type(value) for key, value in held.optimizer.state[each].items()} for each in held.model.parameters()]
        for held in (trained, other)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("name", PACKAGED)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.core.errors.find_spec", lambda _: None)
    with pytest.raises(SettingError) as caught:
        try_custom(Optimizer(name=name), CPU, is_sharded=False)
    error, package = caught.value, OPTIMIZERS[name].package
    assert (error.at, error.settings) == (f"optimizer.name={name}", ("optimizer.name",))
    assert package in error.problem.split()
    assert error.remedy.endswith(f" 'accel-train[{package}]'")


# --- classes by name -----------------------------------------------------------------------------------------------

# What is wrong with a class, and what Python, torch or transformers say of it.
BAD: dict[str, tuple[Settings, str]] = {
    "no such module": ({"name": "no_such:Class"}, "'no_such'"),
    "no such class": ({"name": "torch.optim:Adagrat"}, "'Adagrat'"),
    "function": ({"name": f"{OURS}:function"}, ""),
    "no optimizer": ({"name": "torch.nn:Linear"}, ""),
    "unknown option": ({"name": "adafactor", "options": {"beta": 1}}, "'beta'"),
    "option out of range": ({"name": "adafactor", "options": {"d": -1}}, "-1"),
    "learning rate as an option": ({"name": "adafactor", "options": {"lr": 1}}, "'lr'"),
    "no weight decay": ({"name": f"{OURS}:NoDecay"}, ""),
    "no learning rate": ({"name": f"{OURS}:NoRate"}, ""),
    "closure": ({"name": f"{OURS}:NeedsClosure"}, ""),
    "sparse gradients": ({"name": "torch.optim:SparseAdam", "weight_decay": 0}, "dense gradients"),
    "state in groups": ({"name": f"{OURS}:KeepsInGroups"}, ""),
    "state that is a list": ({"name": f"{OURS}:KeepsLists"}, ""),
    "false promise": ({"name": f"{OURS}:SaysFused"}, ""),
}


@pytest.mark.parametrize("case", BAD)
def test_a_class_that_cannot_be_used_is_refused_before_it_is_used(case: str) -> None:
    settings, named = BAD[case]
    error = refused(try_custom, Optimizer.model_validate(settings), CPU, is_sharded=False, named="optimizer.name=")
    reason, text = " ".join(str(error.__cause__ or "").split()), str(error)
    assert named in reason
    assert "\n" not in text
    assert_golden(text.replace(reason, "REASON") if reason else text)


def test_state_of_another_shape_than_its_weight_is_refused_where_weights_are_sharded() -> None:
    for name in ("adafactor", f"{OURS}:KeepsRows"):
        try_custom(Optimizer(name=name), CPU, is_sharded=False)
        with raises_golden(case=name):
            try_custom(Optimizer(name=name), CPU, is_sharded=True)
    try_custom(Optimizer(name=f"{OURS}:Momentum"), CPU, is_sharded=True)


def test_options_reach_the_class() -> None:
    trained = Trained(Optimizer(name=f"{OURS}:Momentum", options={"memory": 0.3}))
    assert trained.optimizer.defaults["memory"] == 0.3


def test_numbers_of_python_are_kept_in_a_checkpoint_as_what_they_are(tmp_path: Path) -> None:
    section = Optimizer(name=f"{OURS}:Momentum")
    trained, other = Trained(section), Trained(section)
    trained.steps(3)
    save_file(optimizer_tensors(trained.optimizer), tmp_path / "optimizer.safetensors")
    restore_optimizer(tmp_path, other.optimizer)
    state = [next(iter(each.optimizer.state.values())) for each in (trained, other)]
    assert state[1]["steps"] == 3
    assert type(state[1]["steps"]) is int
    assert state[0].keys() == state[1].keys()
    assert differing(optimizer_tensors(trained.optimizer), optimizer_tensors(other.optimizer)) == []


# --- Muon ----------------------------------------------------------------------------------------------------------


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix made orthogonal alone, in fp32."""
    is_wide = matrix.shape[0] <= matrix.shape[1]
    return orthogonalise(matrix[None])[0] if is_wide else orthogonalise(matrix.T[None])[0].T


def test_muon_makes_matrices_orthogonal_with_the_same_singular_vectors() -> None:
    generator = torch.Generator().manual_seed(1)
    for matrix in (torch.randn(shape, generator=generator) for shape in ((48, 16), (16, 48), (32, 20))):
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        values = u.T @ orthogonal(matrix) @ vh.T
        off_diagonal = values - torch.diag(values.diag())
        assert off_diagonal.abs().max() < 1e-4
        assert 0.65 < values.diag().min() < values.diag().max() < 1.15
    assert orthogonal(torch.zeros(4, 6)).count_nonzero() == 0


def test_muon_moves_matrices_by_momentum_decay_and_about_0_2_of_the_learning_rate_as_adamw_does() -> None:
    section = Optimizer(name="muon", learning_rate=0.5, weight_decay=0.1, momentum=0.9, max_grad_norm=0.1)
    trained = Trained(section)
    name = "transformer.h.0.mlp.c_fc.weight"
    weight = trained.model.get_parameter(name)
    kept = torch.zeros_like(weight)
    for number in range(3):
        before = weight.detach().clone()
        gradient = trained.clipped_gradient(number, weight)
        trained.step(number)
        kept = 0.9 * kept + 0.1 * gradient
        update = 0.2 * math.sqrt(64) * orthogonal(0.9 * kept + 0.1 * gradient)
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
    assert "8 matrices" in choice.reason
    assert "20 tensors" in choice.reason
    reference = Trained(Optimizer(name="adamw"))
    reference.step(0)
    for name in of_adamw:
        assert torch.equal(trained.model.get_parameter(name), reference.model.get_parameter(name))


def test_muon_without_matrices_is_refused() -> None:
    model = gpt2()
    for matrix in hidden_matrices(model):
        matrix.requires_grad_(False)
    for each in (model, nn.Sequential(nn.Linear(2, 2))):
        with raises_golden():
            build_optimizer(each, Optimizer(name="muon"), CPU)


def test_muon_trains_the_matrices_of_a_model_of_one_layer() -> None:
    one = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    wanted = {id(one.get_parameter(f"transformer.h.0.{part}.weight")) for part in parts}
    assert {id(matrix) for matrix in hidden_matrices(one)} == wanted
    plain = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    assert [id(matrix) for matrix in hidden_matrices(plain)] == [id(plain.get_parameter("1.weight"))]
    build_optimizer(one, Optimizer(name="muon"), CPU)


def test_muon_takes_the_matrices_of_the_encoder_and_the_decoder_where_their_blocks_differ() -> None:
    config = AutoConfig.for_model(
        "bart", vocab_size=32, d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_attention_heads=2, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config)
    # Attention has 4 matrices, the feed-forward 2. A decoder's block has two attentions.
    assert len(hidden_matrices(model)) == 2 * 6 + 3 * 10


def test_muon_trains_matrices_alone_where_nothing_else_is_trained() -> None:
    section: Settings = {"name": "muon", "learning_rate": 0.01}
    model = gpt2()
    model.requires_grad_(False)
    matrix = model.get_parameter("transformer.h.1.mlp.c_fc.weight").requires_grad_()
    optimizer = build_optimizer(model, Optimizer.model_validate(section), CPU)
    before = matrix.detach().clone()
    model(input_ids=TOKENS[0], labels=TOKENS[0]).loss.backward()
    update_within(Limits(1.0), optimizer, [matrix], None)
    assert not torch.equal(before, matrix)
