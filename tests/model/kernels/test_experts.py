"""The router loss: transformers' value and gradients, in every model that defines it so, however the batch is cut.

Products of experts under autocast: as if the weights had been gathered in bf16.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from accel_train.model.activation_checkpointing import enable_method
from accel_train.model.kernels.experts import AUTOCAST_GROUPED, RouterLoss, autocast_experts, choose_router_loss
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.schema import Recipe
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.hf_models import small_config
from tests.support.runs import LLAMA, Settings, recipe_dict
from tests.support.wording import raises_golden

TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "minimax", "ernie4_5_moe")


def model_of(model_type: str, **changes: Any) -> PreTrainedModel:
    config = small_config(model_type)
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.5, **changes}
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.train()


def task_of(model: PreTrainedModel) -> CausalLM:
    task, choice = CausalLM(), choose_router_loss("auto", model)
    assert choice is not None
    task.global_loss = RouterLoss()
    task.global_loss.watch(model, choice.value)
    return task


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(1, 60, (rows, 25), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def theirs(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = model(input_ids=batch["input_ids"], output_router_logits=True)
    loss = cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten())
    return loss + 0.5 * out.aux_loss, out.aux_loss.detach()


@pytest.mark.parametrize("model_type", TYPES)
def test_loss_and_gradients_are_those_of_transformers(model_type: str) -> None:
    model, batch = model_of(model_type), batch_of()
    expected, aux = theirs(model, batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    task = task_of(model)
    for checkpointing in (False, True):
        if checkpointing:
            enable_method(model)({"use_reentrant": False})
        model.zero_grad()
        loss = task.loss_sum(model, batch) / batch["labels"].numel()
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert aux > 1e-3
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunked", [False, True])
def test_padding_does_not_count_and_evaluation_is_without(chunked: bool) -> None:
    model, batch = model_of("mixtral"), batch_of()
    task = task_of(model)
    task.chunked = chunked
    without = task.loss_sum(model, batch)
    padded = {name: torch.nn.functional.pad(value, (0, 7), value=3) for name, value in batch.items()}
    padded["labels"][:, -7:] = -100
    torch.testing.assert_close(task.loss_sum(model, padded), without, rtol=1e-6, atol=0)
    model.eval()
    plain = cross_entropy(model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(task.loss_sum(model, batch), plain, rtol=1e-6, atol=0)
    assert abs(without.item() - plain.item()) > 1


def test_a_loss_is_off_where_the_configuration_does_not_ask_and_refused_where_it_is_unknown() -> None:
    quiet = model_of("mixtral", output_router_logits=False)
    auto, on = choose_router_loss("auto", quiet), choose_router_loss(True, quiet)
    assert auto is not None
    assert on is not None
    assert (auto.value, on.value) == (0, 0.5)
    assert "loss.router_aux" in auto.reason
    assert choose_router_loss("auto", model_of("llama", output_router_logits=False)) is None
    with raises_golden(case="llama"):
        choose_router_loss(True, model_of("llama"))
    with raises_golden(case="doge"):
        choose_router_loss("auto", model_of("doge"))
    with raises_golden(case="mixtral"):
        choose_router_loss("auto", model_of("mixtral"), "parallel.sp_size above 1")


FAMILIES: dict[str, Settings] = {
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "qwen3_moe": {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {**LLAMA, "num_local_experts": 4, "head_dim": 8},  # transposed weights, and biases
}


def built(family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**FAMILIES[family], "model_type": family, "vocab_size": 64, **changes})
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape) * 0.2 if each.dim() > 1 else each)
    return model


def of_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if ".experts." in name}


def computed(model: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a batch, and the gradients of the experts."""
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in of_experts(model).items() if each.grad is not None}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of a gradient, as a share of its norm."""
    assert ours.keys() == theirs.keys()
    assert ours
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_weights_in_16_bits_to_the_bit(family: str) -> None:
    ours, gathered, stock = built(family), built(family), built(family)
    assert autocast_experts(ours)["experts"].value == AUTOCAST_GROUPED
    for each in of_experts(gathered).values():
        each.data = each.data.bfloat16()
    (loss, grads), (expected, of_gathered), (other, of_stock) = map(computed, (ours, gathered, stock))
    assert loss == expected
    assert {each.dtype for each in grads.values()} == {torch.float32}
    assert all(torch.equal(each, of_gathered[name].float()) for name, each in grads.items())
    # Without it, products are in fp32.
    assert any(not torch.equal(each, of_stock[name]) for name, each in grads.items())
    assert distance(grads, of_stock) < 0.05
    assert float(loss) == pytest.approx(float(other), rel=5e-3)


def test_without_mixed_precision_and_in_rows_that_are_too_short_products_are_in_fp32() -> None:
    plain, ours = built("mixtral"), built("mixtral")
    autocast_experts(ours)
    assert computed(ours, None)[0] == computed(plain, None)[0]
    # `grouped_mm` raises for rows of 12 numbers in bf16.
    odd, stock = built("mixtral", intermediate_size=12), built("mixtral", intermediate_size=12)
    autocast_experts(odd)
    assert all(torch.equal(each, other) for each, other in zip(computed(odd)[1].values(), computed(stock)[1].values()))
    for each in of_experts(odd).values():
        each.grad, each.data = None, each.data.bfloat16()  # as FSDP2 gathers them
    computed(odd)


def test_a_copy_and_the_saved_configuration_know_nothing_of_it(tmp_path: Path) -> None:
    model: Any = built("mixtral")
    autocast_experts(model)
    assert computed(deepcopy(model))[0] == computed(model)[0]
    model.save_pretrained(tmp_path)
    assert AUTOCAST_GROUPED not in (tmp_path / "config.json").read_text()
    assert autocast_experts(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
def test_plan_knows_the_memory_of_experts(corpus: Path, precision: str) -> None:
    sections: Settings = {"task": "causal-lm", "precision": {"mixed_precision": precision}}
    config = {**FAMILIES["mixtral"], "model_type": "mixtral", "intermediate_size": 1024}
    recipe = recipe_dict(corpus, model={"config": config}, **sections)
    for world_size in (1, 2):
        plan = resolve_plan(Recipe.model_validate(recipe), world_size, "H100")
        parts = {each.name: each.num_bytes for each in plan.memory}
        # Autocast keeps a copy in 16 bits for the backward.
        weights = sum(each.numel() for each in of_experts(built("mixtral", intermediate_size=1024)).values())
        assert (parts["activations"] or 0) > (0 if precision == "no" else 2 * weights)
