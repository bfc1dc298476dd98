"""Frozen matrices in fewer bits: which dtype is chosen, what it does to outputs and training, and how it is saved."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from accel_train import Recipe, train
from accel_train.core import hardware
from accel_train.core.state import Choice
from accel_train.inference.evaluate import measure
from accel_train.inference.export import export_run, load_exported
from accel_train.inference.finished_run import open_run
from accel_train.model.kernels import frozen
from accel_train.model.kernels.frozen import choose_frozen_dtype, in_fp32, keep_frozen
from accel_train.model.kernels.nf4 import NF4_BYTES, packed_layers
from accel_train.model.lora import add_adapters, without_adapters
from accel_train.model.tensors import unpacked_numel
from accel_train.plan.plan import Plan, resolve_plan
from accel_train.recipe.schema import LoRA
from tests.support.comparisons import assert_same_bits, tensors
from tests.support.marks import slow
from tests.support.plan_recipe import parts_of
from tests.support.runs import (
    LLAMA,
    TINY_MODEL,
    Settings,
    events,
    forget,
    losses,
    model_of,
    run,
    summary_of,
    tiny_recipe,
    write_base,
    write_recipe_file,
)
from tests.support.wording import raises_golden

BF16 = {"mixed_precision": "bf16"}
NF4 = Choice("nf4", "as set")


def recipe_with(folder: Path, precision: Settings | None = None, **model: Any) -> Recipe:
    sections = {
        "task": "causal-lm",
        "model": {"config": None, "pretrained": str(folder / "base"), **model},
        "precision": precision or {},
        "checkpoint": {"every_steps": 6, "keep": 9},
        "optimizer": {"learning_rate": 0.02},
    }
    return tiny_recipe(folder, **sections)


def adapted() -> tuple[PreTrainedModel, frozenset[str]]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**LLAMA, vocab_size=320, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, LoRA(rank=4))
    return model, frozenset(name for name, each in model.named_parameters() if not each.requires_grad)


@pytest.fixture
def based(corpus: Path) -> Path:
    """A folder with a corpus and a base of linear layers."""
    write_base(corpus, {**LLAMA, "tie_word_embeddings": False})
    return corpus


@pytest.mark.parametrize(
    ("sections", "precision", "device", "flags", "chosen", "reason"),
    [
        ({}, "bf16", "cuda", (), None, ""),
        ({"model": {"lora": {}}}, "bf16", "cuda", (), "bf16", "the same bits"),
        ({"model": {"freeze": ["*.wte.*"]}}, "bf16", "cuda", (), "bf16", "the same bits"),
        ({"model": {"lora": {}}}, "no", "cuda", (), "fp32", "mixed_precision is no"),
        ({"model": {"lora": {}}}, "fp16", "cuda", (), "fp32", "mixed_precision is fp16"),
        ({"model": {"lora": {}}}, "bf16", "cpu", ("avx2",), "fp32", "only emulates bf16"),
        ({"model": {"lora": {}}}, "bf16", "cpu", ("avx512_bf16",), "bf16", "the same bits"),
        ({"model": {"lora": {}}}, "bf16", "cpu", ("amx_bf16",), "bf16", "the same bits"),
        ({"model": {"lora": {}}, "parallel": {"strategy": "deepspeed"}}, "bf16", "cuda", (), "fp32", "not tested"),
        ({"model": {"lora": {}, "frozen_dtype": "fp32"}}, "bf16", "cuda", (), "fp32", "as set"),
    ],
)
def test_what_auto_chooses_follows_from_precision_and_processor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sections: Settings,
    precision: str,
    device: str,
    flags: tuple[str, ...],
    chosen: str | None,
    reason: str,
) -> None:
    monkeypatch.setattr(frozen, "cpu_flags", lambda: frozenset(flags))
    found = choose_frozen_dtype(tiny_recipe(tmp_path, **sections), precision, device)
    assert (None if found is None else found.value) == chosen
    assert found is None or reason in found.reason


def test_flags_of_the_processor_are_those_of_linux() -> None:
    assert "fpu" in hardware.cpu_flags()


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = torch.arange(2 * 16).view(2, 16) * 7 % 300
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids).logits
    loss = cross_entropy(logits.float().flatten(0, 1), ids.flatten())
    loss.backward()
    return loss.detach(), [each.grad for each in model.parameters() if each.grad is not None]


def test_under_autocast_bf16_matrices_give_the_bits_of_fp32_ones() -> None:
    model, names = adapted()
    narrow = copy.deepcopy(model)
    said = keep_frozen(narrow, names, Choice("bf16", "as set"), "bf16")["model.frozen_dtype"]
    assert "weights in 15 matrices" in said.reason
    halved = {name for name, each in narrow.named_parameters() if each.dtype == torch.bfloat16}
    assert halved == {name for name in names if "proj" in name or "lm_head" in name}
    (loss, gradients), (other, others) = loss_and_gradients(narrow), loss_and_gradients(model)
    assert torch.equal(loss, other)
    assert all(map(torch.equal, gradients, others))


def test_an_embedding_that_is_the_output_layer_too_stays_fp32() -> None:
    config = AutoConfig.for_model(**LLAMA, vocab_size=320, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    keep_frozen(model, names, Choice("bf16", ""), "bf16")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.float32


def test_nf4_outputs_are_those_of_the_weights_that_it_stands_for_and_near_those_of_before() -> None:
    model, names = adapted()
    before = loss_and_gradients(model)[0]
    packed = copy.deepcopy(model)
    generator = torch.get_rng_state()
    said = keep_frozen(packed, names, NF4, "no")["model.frozen_dtype"]
    assert torch.equal(torch.get_rng_state(), generator)
    assert "14 linear layers" in said.reason
    assert len(packed_layers(packed)) == 14
    assert sum(map(unpacked_numel, packed.parameters())) == sum(each.numel() for each in model.parameters())
    wide = in_fp32(packed)
    assert [name for name, _ in wide.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(each.dtype == torch.float32 for each in wide.parameters())
    ids = torch.arange(32).view(2, 16)
    assert torch.equal(wide(input_ids=ids).logits, packed(input_ids=ids).logits)
    assert loss_and_gradients(wide)[0].item() == pytest.approx(before.item(), rel=0.02)
    merged = without_adapters(wide, merge=True)
    assert merged.state_dict().keys() == AutoModelForCausalLM.from_config(model.config).state_dict().keys()


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("bf16", BF16), ("nf4", {"mixed_precision": "no"}), slow("nf4", BF16)],
)
def test_ten_steps_with_narrow_frozen_weights_lower_the_loss_and_resume_to_the_bit(
    based: Path, dtype: str, precision: Settings
) -> None:
    recipe = recipe_with(based, precision, frozen_dtype=dtype, lora={"rank": 4})
    folder = train(recipe).output_dir
    found = losses(folder)
    assert found[12] < found[1] - 0.2
    summary = summary_of(folder)
    assert summary["choices"]["model.frozen_dtype"].startswith(f"{dtype} (as set")
    weights, moments = tensors(folder, 12, "model"), tensors(folder, 12, "optimizer")
    assert all("lora_" in name for name in weights)
    ended = model_of(folder)
    assert {tensor.dtype for tensor in ended.values()} == {torch.float32}
    forget(folder, 12)
    train(recipe)
    assert_same_bits(tensors(folder, 12, "model"), weights)
    assert_same_bits(tensors(folder, 12, "optimizer"), moments)
    assert_same_bits(model_of(folder), ended)


def test_a_run_in_nf4_is_evaluated_sampled_and_exported_as_it_computed(based: Path) -> None:
    recipe = recipe_with(based, frozen_dtype="nf4", lora={"rank": 4})
    recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"sample_prompt": "step"})})
    folder = train(recipe).output_dir
    assert summary_of(folder)["sample"]["text"]
    loss = json.loads((folder / "evaluation.json").read_text())["metrics"]["loss"]
    run_again = open_run(folder)
    assert measure(run_again).metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert load_exported(export_run(folder).folder).num_parameters() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "strategy"), [("bf16", "ddp"), ("bf16", "fsdp2"), ("nf4", "ddp")])
def test_two_processes_train_as_one_with_narrow_frozen_weights(based: Path, dtype: str, strategy: str) -> None:
    sections = {
        "task": "causal-lm",
        "model": {"config": None, "pretrained": str(based / "base"), "frozen_dtype": dtype, "lora": {"rank": 4}},
        "precision": BF16 if dtype == "bf16" else {},
        "parallel": {"strategy": strategy},
        "checkpoint": {"every_steps": 4},
    }
    found = []
    for processes in (1, 2):
        path = write_recipe_file(based, **sections, output_dir=str(based / f"on-{processes}"))
        run(path, processes=processes)
        found.append(losses(based / f"on-{processes}"))
        assert all("lora_" in name for name in tensors(based / f"on-{processes}", 12, "model"))
        assert len(model_of(based / f"on-{processes}")) == 21
    assert found[0] == pytest.approx(found[1], rel=2e-3 if dtype == "bf16" else 1e-6)


def test_a_model_without_linear_layers_cannot_be_kept_in_4_bits() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_MODEL, vocab_size=320))
    with raises_golden():
        keep_frozen(model, [name for name, _ in model.named_parameters()], NF4, "no")


def test_layers_that_are_trained_in_part_are_not_quantized() -> None:
    model, names = adapted()
    names -= {"model.layers.0.mlp.up_proj.base_layer.weight"}
    assert "13 linear layers" in keep_frozen(model, names, NF4, "no")["model.frozen_dtype"].reason


def packed_bytes(numels: list[int], processes: int = 1) -> int:
    """Bytes of matrices in 4 bits on the first process: weights, scales, scales of scales, and their mean."""
    scales = [-(-n // 64) for n in numels]
    parts = [[n // 2 for n in numels], scales, [4 * (-(-n // 256) + 1) for n in scales]]
    return sum(-(-size // processes) for each in parts for size in each)


def test_a_plan_shards_packed_weights_and_gathers_them_as_bytes(based: Path) -> None:
    def plan(**model: Any) -> Plan:
        recipe = recipe_with(based, BF16, lora={"rank": 4}, **model)
        parallel = recipe.parallel.model_copy(update={"strategy": "fsdp2"})
        return resolve_plan(recipe.model_copy(update={"parallel": parallel}), 2)

    numels = 2 * [1024, 512, 512, 1024, *3 * [1536]]
    whole, packed = plan(frozen_dtype="fp32"), plan(frozen_dtype="nf4")
    saved = parts_of(whole)["parameters"] - parts_of(packed)["parameters"]
    assert saved == 4 * sum(numels) // 2 - packed_bytes(numels, 2)
    assert (whole.num_parameters, whole.num_trainable) == (packed.num_parameters, packed.num_trainable)
    gathered = [each.scale.traffic[0].payload_bytes for each in (whole, packed)]
    # Blocks are gathered before the forward and before the backward, in bf16 or as bytes.
    assert gathered[0] - gathered[1] == 2 * (2 * sum(numels) - 2 * packed_bytes(numels, 2))


def test_a_plan_counts_the_bytes_of_narrow_weights(based: Path) -> None:
    def parameters(**settings: Any) -> int:
        return parts_of(resolve_plan(recipe_with(based, **settings)))["parameters"]

    lora = {"rank": 4}
    whole, half = parameters(lora=lora), parameters(lora=lora, frozen_dtype="bf16", precision=BF16)
    packed, blocks = parameters(lora=lora, frozen_dtype="nf4"), 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)
    assert whole - half == 2 * (blocks + 320 * 32)
    assert whole - packed == 4 * blocks - packed_bytes(2 * [1024, 512, 512, 1024, *3 * [1536]])
    assert whole - packed == pytest.approx((4 - NF4_BYTES) * blocks, abs=14 * 8)


def test_a_plan_counts_checkpoints_without_their_base(based: Path) -> None:
    adapters, whole = resolve_plan(recipe_with(based, lora={"rank": 4})), resolve_plan(recipe_with(based))
    assert adapters.checkpoint_bytes == 3 * 4 * adapters.num_trainable
    assert whole.checkpoint_bytes == 3 * 4 * whole.num_parameters


@pytest.mark.slow
def test_a_resume_with_another_dtype_takes_the_same_adapters_and_says_so(based: Path) -> None:
    settings: Settings = {"lora": {"rank": 4}}
    folder = train(recipe_with(based, **settings, frozen_dtype="nf4")).output_dir
    forget(folder, 12)
    train(recipe_with(based, **settings))
    assert [event["setting"] for event in events(folder, "settings_changed")] == ["model.frozen_dtype"]
    assert list(losses(folder)) == list(range(1, 13))
