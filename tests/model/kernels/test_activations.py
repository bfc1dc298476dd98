"""Models with activations in one kernel against transformers' own: the same outputs, gradients, files and texts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.activations import AccurateGELUActivation, FastGELUActivation, NewGELUActivation

from accel_train import train
from accel_train.engine.resolve import change_model
from accel_train.model.activation_checkpointing import checkpoint_activations
from accel_train.model.kernels.activations import FusedTanhGELU, fuse_activations
from accel_train.model.kernels.attention import use_for_generation
from accel_train.model.pretrained import transformers_model
from accel_train.recipe.schema import Precision
from accel_train.tasks.causal_lm.task import CausalLM, attention_arguments
from tests.support.hf_models import small_config
from tests.support.runs import Capture, tiny_recipe

STOCK = {"fused_kernels": False, "attn_implementation": "sdpa"}
FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi")


def build(folder: Path, family: str = "gpt2", **settings: Any) -> PreTrainedModel:
    """A small model of a family by a recipe's settings, with weights so large that no activation is nearly linear."""
    recipe = tiny_recipe(folder, task="causal-lm", model=settings)
    config = small_config(family)
    config.initializer_range = 0.2
    torch.manual_seed(0)
    arguments = attention_arguments(recipe, config)
    built, _ = transformers_model(AutoModelForCausalLM, recipe, config, arguments, takes_new_head=False)
    return built


def step(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of a batch, in training mode without dropout."""
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    ids = torch.randint(1, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    logits = model(ids, use_cache=False).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits.detach(), gradients


def assert_same(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """Logits and gradients are within 1e-6 of the largest of their tensor."""
    (logits, gradients), (expected, expected_gradients) = step(one), step(other)
    assert (logits - expected).abs().max() < 1e-6 * expected.abs().max()
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).abs().max() < 1e-6 * largest, name


def num_fused(model: nn.Module) -> int:
    return sum(isinstance(module, FusedTanhGELU) for module in model.modules())


@pytest.mark.parametrize("kind", [NewGELUActivation, FastGELUActivation, AccurateGELUActivation])
def test_the_kernel_gives_the_outputs_and_gradients_of_the_python_it_replaces(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind())
    values = torch.linspace(-12, 12, 20_001).requires_grad_()
    expected = model(values)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), values)
    fuse_activations(model, "auto")
    assert isinstance(model[0], FusedTanhGELU)
    found = model(values)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1.5e-6)  # the formula itself is off by as much


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_same_with_the_settings_on_and_off(tmp_path: Path, family: str) -> None:
    quick, stock = build(tmp_path, family), build(tmp_path, family, **STOCK)
    assert num_fused(quick) == (2 if family in ("gpt2", "phi") else 0)
    assert num_fused(stock) == 0
    assert quick.state_dict().keys() == stock.state_dict().keys()
    assert_same(quick, stock)


def test_recomputed_blocks_give_the_same_gradients(tmp_path: Path) -> None:
    quick = build(tmp_path)
    checkpoint_activations(quick, Precision(gradient_checkpointing=True))
    assert any(getattr(module, "gradient_checkpointing", False) for module in quick.modules())
    assert num_fused(quick) == 2
    assert_same(quick, build(tmp_path, **STOCK))


def test_pretrained_weights_and_adapters_go_through_the_kernel_and_give_the_same(tmp_path: Path) -> None:
    build(tmp_path).save_pretrained(tmp_path / "first")
    models = []
    for settings in ({}, STOCK):
        section = {"config": None, "pretrained": str(tmp_path / "first"), "lora": {"rank": 2}, **settings}
        model = build(tmp_path, **section)
        recipe = tiny_recipe(tmp_path, task="causal-lm", model=section)
        torch.manual_seed(0)
        models.append(change_model(recipe, CausalLM(), model)[0])
    assert [num_fused(model) for model in models] == [2, 0]
    assert_same(*models)


def test_generated_texts_are_the_librarys(tmp_path: Path) -> None:
    quick, stock = use_for_generation(build(tmp_path)).eval(), build(tmp_path, **STOCK).eval()
    prompts = torch.tensor([[5, 9, 2], [7, 1, 30]])
    found, expected = (model.generate(prompts, max_new_tokens=20, do_sample=False) for model in (quick, stock))
    assert found.tolist() == expected.tolist()


def test_a_run_says_its_kernels_and_its_model_folder_is_plain_transformers(
    corpus: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_train.training.finish.write_report", lambda runs: runs[0] / "report.html")  # takes long
    kinds, said, configs = [], [], []
    for name, settings in (("quick", {}), ("stock", STOCK)):
        sections = {"model": settings, "schedule": {"max_steps": 1}, "output_dir": str(corpus / name)}
        folder = train(tiny_recipe(corpus, task="causal-lm", **sections)).output_dir / "model"
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        kinds.append(type(loaded.transformer.h[0].mlp.act))
        start = json.loads((folder.parent / "events.jsonl").read_text().splitlines()[0])
        said.append(start["choices"]["model.fused_kernels"])
        assert "model.fused_kernels" not in capsys.readouterr().out, "it is in the log"
        configs.append((folder / "config.json").read_text())
    assert kinds == [NewGELUActivation, NewGELUActivation]
    assert ["2 x tanh GELU" in said[0], said[1] == "no (as set)"] == [True, True]
    assert configs[0] == configs[1]


def test_a_model_that_a_program_built_keeps_its_activations(tmp_path: Path) -> None:
    own = AutoModelForCausalLM.from_config(small_config("gpt2"))
    model, choices, _ = change_model(tiny_recipe(tmp_path, task="causal-lm"), CausalLM(), own)
    assert type(model.transformer.h[0].mlp.act) is NewGELUActivation
    assert choices["model.fused_kernels"].value == "none"
    assert choices["model.attn_implementation"].value == "sdpa"
