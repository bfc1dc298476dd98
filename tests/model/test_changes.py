"""What a recipe changes in a model before training: frozen parts, adapters, learning rates by
layer, averaged weights.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForSequenceClassification,
)

from accel_train.core.errors import SettingError
from accel_train.model.freeze import freeze
from accel_train.model.lora import adapter_config, add_adapters, save_adapters, without_adapters
from accel_train.optim.ema import WeightAverage
from accel_train.optim.optimizers import build_optimizer, layer_scales, parameter_groups
from accel_train.optim.schedule import set_learning_rate
from accel_train.recipe.optimizer import Optimizer
from accel_train.recipe.schema import LoRA, Model
from tests.support.comparisons import assert_same_bits
from tests.support.devices import on_gpu
from tests.support.wording import raises_golden

CPU = torch.device("cpu")


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    return AutoModelForCausalLM.from_config(config)


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def section(**settings: object) -> Model:
    return Model(config={"model_type": "bert"}, **settings)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = build_optimizer(model, Optimizer(learning_rate=0.1), CPU)
    set_learning_rate(optimizer, 0.1)
    for seed in range(steps):
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) + 3
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_frozen_batch_norms_keep_weights_and_running_statistics_to_the_bit() -> None:
    frozen, free = conv_net().train(), conv_net().train()
    choice = freeze(frozen, section(freeze_batch_norm=True))
    before = copy.deepcopy(frozen[1].state_dict())
    train(frozen)
    train(free)
    assert_same_bits(frozen[1].state_dict(), before)
    assert not torch.equal(before["running_mean"], free[1].running_mean)
    assert not torch.equal(conv_net()[0].weight, frozen[0].weight), "nothing was trained"
    assert choice.value == 16


def test_parameters_are_frozen_by_pattern_and_are_no_part_of_the_optimizer() -> None:
    model = bert()
    freeze(model, section(freeze=("bert.embeddings.*", "*.layer.[01].*")))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("embeddings" in name or ".layer.0." in name or ".layer.1." in name for name in trained)
    assert any(".layer.2." in name for name in trained)
    in_optimizer = {name for group in parameter_groups(model, Optimizer()) for name, _ in group["params"]}
    assert in_optimizer == trained


def test_a_pattern_that_matches_nothing_is_refused_with_a_name_that_exists() -> None:
    with raises_golden(case="freeze"):
        freeze(bert(), section(freeze=("bert.embedings.*",)))
    with raises_golden(case="batch norm"):
        freeze(bert(), section(freeze_batch_norm=True))
    with raises_golden(case="groups"):
        parameter_groups(bert(), Optimizer(groups=[{"match": ["nothing.*"]}]))


def test_layer_decay_lowers_the_rate_towards_the_input_layer_by_layer() -> None:
    scales = layer_scales(bert(), 0.5)
    by_part = {
        part: {scale for name, scale in scales.items() if part in name}
        for part in ("embeddings", ".layer.0.", ".layer.1.", ".layer.2.", "pooler", "classifier")
    }
    assert by_part == {
        "embeddings": {0.0625},
        ".layer.0.": {0.125},
        ".layer.1.": {0.25},
        ".layer.2.": {0.5},
        "pooler": set(),
        "classifier": set(),
    }
    optimizer = build_optimizer(bert(), Optimizer(layer_decay=0.5), CPU)
    set_learning_rate(optimizer, 0.1)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rates["classifier.weight"] == pytest.approx(0.1)
    assert rates["bert.embeddings.word_embeddings.weight"] == pytest.approx(0.1 * 0.0625)
    with raises_golden():
        layer_scales(conv_net(), 0.5)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_layer_decay_counts_the_blocks_of_a_decoder_after_those_of_its_encoder(kind: str) -> None:
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    bart = {
        "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, vocab_size=32, **(t5 if kind == "t5" else bart))
    scales = layer_scales(AutoModelForSeq2SeqLM.from_config(config), 0.5)
    of_block = {
        (stack, number): {value for name, value in scales.items() if re.search(rf"{stack}\.\w+\.{number}\.", name)}
        for stack, count in (("encoder", 2), ("decoder", 3))
        for number in range(count)
    }
    assert list(of_block.values()) == [{0.5**distance} for distance in (5, 4, 3, 2, 1)]
    assert {value for name, value in scales.items() if "shared" in name} == {0.5**6}
    of_ends = {name: scales.get(name, 1.0) for name in scales if re.search(r"decoder\.embed|encoder\.final", name)}
    assert set(of_ends.values()) == {0.5**4}
    assert "decoder.final_layer_norm.weight" not in scales


def test_groups_of_the_recipe_set_rate_and_decay_and_the_first_match_wins() -> None:
    groups = [
        {"match": ["classifier.*"], "lr_scale": 10.0, "weight_decay": 0.3},
        {"match": ["*.weight"], "lr_scale": 2.0},
    ]
    optimizer = build_optimizer(bert(), Optimizer(groups=groups, weight_decay=0.1), CPU)
    set_learning_rate(optimizer, 1e-3)
    found = {
        name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["param_names"]
    }
    assert found["classifier.weight"] == pytest.approx((1e-2, 0.3))
    assert found["bert.pooler.dense.weight"] == pytest.approx((2e-3, 0.1))
    assert found["bert.pooler.dense.bias"] == pytest.approx((1e-3, 0.0))


def test_without_groups_and_decay_there_are_the_two_groups_that_checkpoints_know() -> None:
    groups = parameter_groups(bert(), Optimizer())
    assert [(group["weight_decay"], group["lr_scale"]) for group in groups] == [(0.1, 1.0), (0.0, 1.0)]


@pytest.mark.parametrize("number", [torch.tensor, on_gpu], ids=["host", "device"])
def test_the_average_is_that_of_the_formula_and_a_skipped_step_leaves_it_alone(number: Callable[..., Tensor]) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    average = WeightAverage([("w", weight)], decay=0.9)
    expected = weight.detach().double()
    for step in range(200):
        weight.data += 0.1
        skipped = number(float(step % 7 == 3))
        if not skipped:
            d = min(0.9, (1 + step) / (10 + step))
            expected = d * expected + (1 - d) * weight.detach().double()
        before = average.averages[0].clone()
        average.update(step, skipped)
        if skipped:
            assert torch.equal(before, average.averages[0])
    torch.testing.assert_close(average.averages[0].double(), expected, rtol=1e-5, atol=0)
    last = weight.detach().clone()
    with average.in_place():
        assert torch.equal(weight, average.averages[0]) is False
        torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(weight, last)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_merged_adapters_compute_what_the_formula_says(make: "type[nn.Module]") -> None:
    model = make().eval()
    inputs = {"input_ids": torch.arange(24).reshape(2, 12)}
    before = model(**inputs).logits
    lora = LoRA(rank=4, alpha=6.0)
    choice = add_adapters(model, lora)
    torch.testing.assert_close(model(**inputs).logits, before)  # B is 0 at first
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert choice.value == sum(parameter.numel() for parameter in trained.values())
    assert all("lora_" in name or "classifier" in name for name in trained)
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted = model(**inputs).logits
    assert not torch.allclose(adapted, before, atol=1e-3)
    merged = without_adapters(model, merge=True)
    torch.testing.assert_close(merged(**inputs).logits, adapted, rtol=1e-4, atol=1e-5)
    assert set(dict(merged.named_parameters())) == set(dict(make().named_parameters()))
    torch.testing.assert_close(without_adapters(model)(**inputs).logits, before)

    name = next(name for name, _ in model.named_modules() if name.endswith(("attention.self.query", "c_attn")))
    layer = model.get_submodule(name)
    product = 6.0 / 4 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    change = merged.get_submodule(name).weight - layer.get_base_layer().weight
    torch.testing.assert_close(change, product if make is bert else product.T, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21 with transformers 5.23
def test_saved_adapters_load_with_peft_onto_the_base_model(tmp_path: Path) -> None:
    from peft import PeftModel

    base = gpt2().eval()
    model = copy.deepcopy(base)
    settings = Model(pretrained="some/base", lora={"rank": 2})
    assert settings.lora is not None
    add_adapters(model, settings.lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    save_adapters(model, settings, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    inputs = {"input_ids": torch.arange(24).reshape(2, 12)}
    torch.testing.assert_close(loaded(**inputs).logits, model.eval()(**inputs).logits)


@pytest.mark.parametrize(
    ("kind", "expected"), [("llama4_text", 0), ("falcon", 4)]
)  # routers compute more than a product, and Falcon's layers only that
def test_adapters_are_added_to_linear_layers_but_not_to_routers(kind: str, expected: int) -> None:
    config = AutoConfig.for_model(kind, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    own = [name for name, module in model.named_modules() if type(module).forward is not nn.Linear.forward]
    own = [name for name in own if isinstance(model.get_submodule(name), nn.Linear)]
    assert own
    targets = adapter_config(model, LoRA()).target_modules
    assert len({*own} & {*targets}) == expected  # type: ignore[misc]


def test_adapters_leave_out_what_mamba_reads_past_them() -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, state_size=4, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, LoRA(rank=2))
    trained = {name.partition("mixer.")[2] for name, each in model.named_parameters() if each.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"in_proj", "x_proj", "dt_proj"}


@pytest.mark.parametrize(
    ("settings", "leaf", "named"),
    [
        ({"target_modules": ("query", "vlaue")}, "target_modules", "'vlaue'; there is, for example, value"),
        ({"target_modules": ("query", "attention.selv.key")}, "target_modules", "for example, attention.self.key"),
        ({"train_also": ("*classifier*", "*poler*")}, "train_also", "'*poler*'; there is, for example, pooler"),
        ({"target_modules": ("nowhere", "vlaue")}, "target_modules", "'nowhere'"),
        ({"target_modules": ("nowhere", "vlaue")}, "target_modules", "'vlaue'"),
    ],
)
def test_each_name_for_adapters_that_matches_nothing_is_refused_with_the_nearest(
    settings: dict[str, Any], leaf: str, named: str
) -> None:
    with pytest.raises(SettingError) as caught:
        add_adapters(bert(), LoRA(**settings))
    assert caught.value.settings == (f"model.lora.{leaf}",)
    assert named in str(caught.value)


def test_default_of_train_also_needs_no_head() -> None:
    add_adapters(gpt2(), LoRA())


@pytest.mark.parametrize(("kind", "num_experts"), [("mixtral", 2 * (64 * 32 + 32 * 32)), ("llama", 0)])
def test_adapters_tell_their_share_and_that_fused_experts_stay_frozen(kind: str, num_experts: int) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 2} if num_experts else {}
    config = AutoConfig.for_model(kind, vocab_size=64, num_key_value_heads=2, **sizes, **experts)
    model = AutoModelForCausalLM.from_config(config)
    choice = add_adapters(model, LoRA(rank=2))
    total = sum(each.numel() for each in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert f"{100 * trained / total:.2g} % of the weights" in choice.reason
    assert ("experts" in choice.reason) == bool(num_experts)
    assert not num_experts or f"experts, {100 * num_experts / total:.2g} % of the weights" in choice.reason
