"""Which weights FSDP2 gathers in fp32 in mixed precision, where torch can tell them apart."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from accel_train.model import weights
from accel_train.model.weights import fp32_weights, group_weights
from accel_train.parallel import mixed
from accel_train.plan.formulas import collectives
from accel_train.plan.place import choose_layout
from accel_train.recipe.parallel import Parallel

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
VIT = {
    "model_type": "vit", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip


@dataclass(frozen=True)
class PolicyOf215:
    """The fields of torch 2.15's MixedPrecisionPolicy that the program sets."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Any = None


@pytest.fixture
def torch_215(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weights, mixed):
        monkeypatch.setattr(module, "gathers_two_types", lambda: True)


def kept(config: dict[str, Any], factory: Any = AutoModelForCausalLM) -> set[str]:
    model = factory.from_config(AutoConfig.for_model(**config))
    wide = fp32_weights(model)
    return {name for name, each in model.named_parameters() if id(each) in wide}


@pytest.mark.usefixtures("torch_215")
def test_norms_embeddings_routers_and_vectors_stay_in_fp32() -> None:
    norms = {f"model.layers.{n}.{each}_layernorm.weight" for n in (0, 1) for each in ("input", "post_attention")}
    norms |= {"model.norm.weight", "model.embed_tokens.weight"}
    assert kept(LLAMA) == norms
    assert kept(MIXTRAL) == norms | {f"model.layers.{n}.mlp.gate.weight" for n in (0, 1)}
    found = kept(VIT, AutoModel)
    assert {name.rsplit(".", 2)[-2] for name in found if "layernorm" in name} == {
        "layernorm_before", "layernorm_after", "layernorm",
    }  # fmt: skip
    assert not any("dense" in name or "projection" in name or "query" in name for name in found)


@pytest.mark.usefixtures("torch_215")
def test_tied_embedding_is_kept_for_both_ends_and_frozen_bf16_weights_are_not() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, "tie_word_embeddings": True}))
    head = model.get_output_embeddings().weight
    assert id(head) in fp32_weights(model)
    head.data = head.data.bfloat16()
    assert id(head) not in fp32_weights(model)


@pytest.mark.usefixtures("torch_215")
def test_policy_decides_by_weight_and_leaves_inputs_to_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    given: Any = PolicyOf215(torch.bfloat16, torch.float32)
    policy, note = mixed.policy(given, model)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert [policy.param_dtype_override_fn(each) for each in model.parameters()] == [None] * 2 + [torch.float32] * 4
    assert note == ""


def test_without_it_nothing_is_kept_and_batch_norm_makes_all_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weights, mixed):
        monkeypatch.setattr(module, "gathers_two_types", lambda: False)
    assert kept(LLAMA) == set()
    given: Any = PolicyOf215(torch.bfloat16, torch.float32)
    assert mixed.policy(given, nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))) == (given, "")
    policy, note = mixed.policy(given, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert policy.param_dtype is None
    assert "batch norm" in note


def test_norms_of_a_cpu_take_wide_inputs_with_weights_in_16_bits_and_leave_others_alone() -> None:
    model, seen = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4, dtype=torch.bfloat16)), []
    mixed.narrow_for_norms(model)
    for each in model:
        each.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 4))
    assert seen == [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.usefixtures("torch_215")
def test_plan_counts_four_bytes_of_weights_in_fp32_and_two_of_others() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    sent = sum(
        each.num_bytes
        for each in collectives(choose_layout(Parallel(strategy="fsdp2"), 2, "cuda"), group_weights(model), 2)
        if (each.kind, each.phase) == ("all-gather", "forward")
    )
    wide = kept(LLAMA)
    expected = sum((4 if name in wide else 2) * each.numel() for name, each in model.named_parameters())
    assert sent == expected
