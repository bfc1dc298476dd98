"""The router loss: transformers' value and gradients, in every model that defines it so, however the batch is cut."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from accel_train.model.activation_checkpointing import enable_method
from accel_train.model.kernels.experts import RouterLoss, choose_router_loss
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.hf_models import small_config

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
    with pytest.raises(ValueError, match=r"loss\.router_aux.*LlamaForCausalLM"):
        choose_router_loss(True, model_of("llama"))
    with pytest.raises(ValueError, match=r"loss\.router_aux.*DogeForCausalLM"):
        choose_router_loss("auto", model_of("doge"))
    with pytest.raises(ValueError, match=r"parallel\.sp_size"):
        choose_router_loss("auto", model_of("mixtral"), "parallel.sp_size above 1")
