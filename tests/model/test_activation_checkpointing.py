"""`precision.gradient_checkpointing`: the same gradients, what is computed again, the memory, and what is refused."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from accel_train.engine.resolve import change_model
from accel_train.model.activation_checkpointing import checkpoint_activations, keep_or_recompute
from accel_train.model.compile import compile_module
from accel_train.model.kernels.attention import CAUSAL_SDPA, causal_sdpa
from accel_train.recipe.schema import Precision, Recipe
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.comparisons import assert_same_bits
from tests.support.memory import peak_bytes
from tests.support.plan_recipe import GOOD
from tests.support.runs import Settings
from tests.support.wording import raises_golden

aten = torch.ops.aten
GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 128, "vocab_size": 64}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def model_of(fields: Settings, checkpointing: Any) -> nn.Module:
    torch.manual_seed(0)
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)
    config = AutoConfig.for_model(**fields)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL_SDPA).train()
    checkpoint_activations(model, Precision(gradient_checkpointing=checkpointing))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def step(model: nn.Module) -> None:
    torch.manual_seed(1)
    ids = torch.arange(256).reshape(2, 128) % 64
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def calls(fields: Settings, checkpointing: Any) -> Counter[Any]:
    with CountOperators() as count:
        step(model_of(fields, checkpointing))
    return count.calls


@pytest.mark.parametrize("fields", [GPT2, {**GPT2, **NO_DROPOUT}, LLAMA], ids=["dropout", "gpt2", "llama"])
def test_gradients_are_the_same_bits_whatever_is_computed_again(fields: Settings) -> None:
    found = []
    for checkpointing in ("off", "blocks", "selective"):
        model = model_of(fields, checkpointing)
        for _ in range(2):  # gradients accumulate
            step(model)
        found.append([parameter.grad for parameter in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_selective_computes_no_attention_again_and_no_product_of_gpt2() -> None:
    off, blocks, selective = (calls({**GPT2, **NO_DROPOUT}, each) for each in ("off", "blocks", "selective"))
    assert (off[ATTENTION], blocks[ATTENTION], selective[ATTENTION]) == (4, 8, 4)
    assert (off[aten.addmm.default], blocks[aten.addmm.default]) == (16, 28)
    assert selective[aten.addmm.default] == 16
    assert selective[aten.native_layer_norm.default] == blocks[aten.native_layer_norm.default] == 17
    assert off[aten.native_layer_norm.default] == 9


def test_selective_computes_keys_and_values_of_grouped_heads_again_and_no_other_product() -> None:
    off, selective = (calls(LLAMA, each) for each in ("off", "selective"))
    assert selective[ATTENTION] == off[ATTENTION] == 4
    assert selective[aten.mm.default] - off[aten.mm.default] == 2 * 4


@pytest.mark.parametrize("fields", [{**GPT2, **NO_DROPOUT}, LLAMA], ids=["gpt2", "llama"])
def test_blocks_take_less_memory_than_selective_and_that_less_than_off(fields: Settings) -> None:
    sizes = []
    for checkpointing in ("blocks", "selective", "off"):
        model = model_of(fields, checkpointing)
        sizes.append(peak_bytes(lambda model=model: step(model)))  # type: ignore[misc]
    blocks, selective, off = sizes
    assert blocks < 0.8 * selective
    assert selective < 0.75 * off


@pytest.mark.parametrize(
    ("op", "before_dropout"),
    [
        (aten._scaled_dot_product_flash_attention_for_cpu, ()),
        (aten._scaled_dot_product_flash_attention, ()),
        (aten._scaled_dot_product_fused_attention_overrideable, (None,)),
        (aten._scaled_dot_product_efficient_attention, (None, True)),
        (aten._scaled_dot_product_cudnn_attention, (None, True)),
    ],
    ids=str,
)
def test_attention_of_every_backend_is_kept_unless_it_draws_random_numbers(op: Any, before_dropout: Any) -> None:
    tensors = [torch.zeros(1)] * 3
    for dropout, policy in ((0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)):
        found = keep_or_recompute(None, op.default, *tensors, *before_dropout, dropout, True)  # type: ignore[arg-type]
        assert found == policy
        assert op.default._schema.arguments[3 + len(before_dropout)].name == "dropout_p"
    assert keep_or_recompute(None, op.default, *tensors) == CheckpointPolicy.MUST_SAVE  # type: ignore[arg-type]


def test_adapters_train_by_the_same_bits_and_their_wide_outputs_are_not_kept() -> None:
    x, narrow, wide = torch.zeros(8, 4), torch.zeros(64, 4), torch.zeros(4, 64)
    for weight in (narrow, wide):
        policy = keep_or_recompute(None, aten.mm.default, x, weight)  # type: ignore[arg-type]
        assert policy == CheckpointPolicy.PREFER_RECOMPUTE
    found = []
    for checkpointing in ("off", "selective"):
        torch.manual_seed(0)
        sections = {
            "model": {"config": GPT2, "lora": {"rank": 2}},
            "precision": {"gradient_checkpointing": checkpointing},
        }
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2))
        model, *_ = change_model(Recipe.model_validate({**GOOD, **sections}), CausalLM(), plain)
        step(model)
        found.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    assert found[0]
    assert_same_bits(found[0], found[1])


def test_model_that_is_none_of_transformers_is_refused() -> None:
    for checkpointing in ("blocks", "selective"):
        with raises_golden(case=checkpointing):
            checkpoint_activations(nn.Linear(2, 2), Precision(gradient_checkpointing=checkpointing))
    checkpoint_activations(nn.Linear(2, 2), Precision(gradient_checkpointing="off"))


def test_model_that_checkpoints_already_is_left_as_it_is() -> None:
    model = model_of(LLAMA, "blocks")
    before = copy.copy(model.model.layers[0]._gradient_checkpointing_func)  # type: ignore[union-attr, index]
    checkpoint_activations(model, Precision(gradient_checkpointing="selective"))
    after = model.model.layers[0]._gradient_checkpointing_func  # type: ignore[union-attr, index]
    assert after.keywords == before.keywords


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_memory_budget_lowers_the_memory_of_the_compiled_model_and_ends_with_it() -> None:
    sizes = []
    for share in (1.0, 0.5, None):
        torch.compiler.reset()
        budget = "off" if share is None else {"memory_budget": share}
        model = model_of({**GPT2, **NO_DROPOUT}, "off")
        compile_module(model, Precision(compile="model", gradient_checkpointing=budget))
        sizes.append(peak_bytes(lambda model=model: step(model)))  # type: ignore[misc]
    full, half, without = sizes
    assert half < 0.85 * full
    assert without == full


def test_memory_budget_is_refused_near_zero() -> None:
    with pytest.raises(ValidationError) as caught:
        Precision(compile=True, gradient_checkpointing={"memory_budget": 0.05})
    assert {"ge": 0.1} in [problem.get("ctx") for problem in caught.value.errors()]


@pytest.mark.parametrize(("value", "recomputed"), [(True, "blocks"), (False, "nothing"), ("off", "nothing")])
def test_recipes_of_before_keep_their_meaning(value: Any, recomputed: str) -> None:
    assert Precision(gradient_checkpointing=value).recomputed == recomputed
