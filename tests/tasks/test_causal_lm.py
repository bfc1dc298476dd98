"""The language-modelling task against transformers itself: attention, masks, precision of the loss, and one graph."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.testing import assert_close
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from accel_train.core.errors import SettingError
from accel_train.engine.resolve import check_recipe
from accel_train.model.kernels.attention import _CHECKED_MODEL_TYPES, CAUSAL_SDPA, causal_sdpa, choose_attention
from accel_train.model.kernels.chunked_loss import summed_loss
from accel_train.model.kernels.documents import same_document_mask
from accel_train.model.training_module import TrainingModule
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm import task as causal_lm
from accel_train.tasks.causal_lm.task import CausalLM, matmul_parameters
from tests.support.hf_models import SIZES, small_config
from tests.support.runs import LLAMA, TINY_MODEL, recipe_dict, refused, write_corpus
from tests.support.wording import raises_golden

Loaded = tuple[CausalLM, Recipe, TaskData]


@pytest.fixture
def task_and_data(tmp_path: Path) -> Loaded:
    write_corpus(tmp_path)
    recipe = Recipe.model_validate(recipe_dict(tmp_path, task="causal-lm"))
    task = CausalLM()
    return task, recipe, task.load_data(recipe, progress=False)


@pytest.mark.parametrize("model_type", sorted(_CHECKED_MODEL_TYPES))
def test_maskless_causal_attention_gives_the_librarys_logits(model_type: str) -> None:
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type), attn_implementation="sdpa").eval()
    ids = torch.randint(1, 60, (2, 24))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation(CAUSAL_SDPA)
        got = model(ids, use_cache=False).logits
        model.set_attn_implementation("eager")
        eager = model(ids, use_cache=False).logits
    assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert_close(got, eager, rtol=1e-4, atol=1e-5)


def test_model_with_a_sliding_window_shorter_than_the_sequence_keeps_its_mask() -> None:
    config = small_config("mistral")
    config.sliding_window = 16
    assert choose_attention("auto", transformers.MistralForCausalLM, config, 32).value == "library default"
    assert choose_attention("auto", transformers.MistralForCausalLM, config, 16).value == CAUSAL_SDPA


def test_decoding_with_a_cache_under_maskless_attention_is_refused() -> None:
    query, key = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 5, 4)
    with raises_golden():
        causal_sdpa(torch.nn.Module(), query, key, key, None)


def test_masked_documents_are_as_if_each_stood_alone(task_and_data: Loaded) -> None:
    task, recipe, data = task_and_data
    model = task.build_model(recipe, data).eval()
    first, second = torch.randint(0, 250, (9,)), torch.randint(0, 250, (14,))
    batch = {
        "input_ids": torch.cat((first, second))[None],
        "labels": torch.cat((first.roll(-1), second.roll(-1)))[None],
        "position_ids": torch.cat((torch.arange(9), torch.arange(14)))[None],
        "document_ids": torch.tensor([[0] * 9 + [1] * 14]),
    }
    together = task.loss_sum(model, batch)
    alone = sum(
        task.loss_sum(model, {"input_ids": part[None], "labels": part.roll(-1)[None]}) for part in (first, second)
    )
    assert_close(together, alone, rtol=1e-5, atol=1e-5)
    mask = same_document_mask(batch["document_ids"])
    assert mask.shape == (1, 1, 23, 23)
    assert not mask[0, 0, 9:, :9].any()


def test_loss_is_the_mean_over_the_labels_that_count(task_and_data: Loaded) -> None:
    task, recipe, data = task_and_data
    model = task.build_model(recipe, data).eval()
    batch = data.collate(data.train.__getitems__(list(range(len(data.train))))[-3:])
    count = batch.pop("num_targets")
    assert count == int((batch["labels"] != -100).sum())
    logits = model(batch["input_ids"], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    assert (task.loss_sum(model, batch) / count).item() == pytest.approx(expected.item(), rel=1e-6)


def test_bf16_logits_are_never_copied_to_fp32_by_accelerate_and_the_loss_is_within_1e_3_of_fp32(
    task_and_data: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, recipe, data = task_and_data
    model = task.build_model(recipe, data)
    batch = data.collate(data.train.__getitems__([0, 1, 2, 3]))
    count = batch.pop("num_targets")
    exact = task.loss_sum(model, batch).item() / count
    AcceleratorState._reset_state()
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(TrainingModule(model, task))
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    used = []
    monkeypatch.setattr(
        causal_lm, "summed_loss", lambda logits, *args: used.append(logits) or summed_loss(logits, *args)
    )
    loss = prepared(batch)
    AcceleratorState._reset_state()
    assert seen[0].dtype == torch.bfloat16
    assert used[0] is seen[0], "the logits were copied between the head and the loss"
    assert loss.dtype == torch.float32
    assert loss.item() / count == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_forward_and_loss_are_one_graph_with_causal_attention_and_no_mask(tmp_path: Path, model_type: str) -> None:
    write_corpus(tmp_path)
    config = TINY_MODEL if model_type == "gpt2" else {**LLAMA, "num_key_value_heads": 4}
    recipe = Recipe.model_validate(recipe_dict(tmp_path, task="causal-lm", model={"config": dict(config)}))
    task = CausalLM()
    data = task.load_data(recipe, progress=False)
    module = TrainingModule(task.build_model(recipe, data), task)
    batch = data.collate(data.train.__getitems__([0, 1]))
    batch.pop("num_targets")
    attention = []

    def look(graph: torch.fx.GraphModule, example: Any) -> Any:
        calls = [node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        attention.extend((kwargs.get("attn_mask"), kwargs.get("is_causal")) for kwargs in calls)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(module, backend=look, fullgraph=True)(batch)
    assert attention == [(None, True)] * 2, "of two layers, in one graph"
    torch._dynamo.reset()


def test_vocabulary_is_padded_and_tied_embeddings_are_counted_once(
    task_and_data: Loaded,
) -> None:
    task, recipe, data = task_and_data
    model = task.build_model(recipe, data)
    assert data.source.vocab_size == 257
    assert model.config.vocab_size == 320
    blocks_and_head = sum(p.numel() for p in model.parameters()) - 64 * 32
    assert sum(each.numel() for each in matmul_parameters(model)) == blocks_and_head


def test_a_frozen_weight_costs_two_operations_less(task_and_data: Loaded) -> None:
    task, recipe, data = task_and_data
    model = task.build_model(recipe, data)
    whole = task.flops_per_target(recipe, model)
    block = model.transformer.h[0].requires_grad_(False)
    assert whole is not None
    assert task.flops_per_target(recipe, model) == whole - 2 * sum(each.numel() for each in block.parameters())


def test_pretrained_model_goes_on_with_padded_embeddings(tmp_path: Path, task_and_data: Loaded) -> None:
    task, recipe, data = task_and_data
    first = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_MODEL, vocab_size=257))
    first.save_pretrained(tmp_path / "first")
    sections = recipe.model_dump() | {"model": {"pretrained": str(tmp_path / "first")}}
    model = task.build_model(Recipe.model_validate(sections), data)
    assert model.get_input_embeddings().num_embeddings == 320
    assert torch.equal(model.get_input_embeddings().weight[:257], first.get_input_embeddings().weight)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("weights", ["balanced", (1.0, 2.0)])
def test_class_weights_are_refused_for_tokens_where_they_had_no_effect(tmp_path: Path, weights: Any) -> None:
    recipe = Recipe.model_validate(recipe_dict(tmp_path, task="causal-lm", loss={"class_weights": weights}))
    refused(check_recipe, recipe, named="loss.class_weights|causal-lm")


@pytest.mark.parametrize("model_type", ["mistral", "qwen2"])
def test_documents_are_not_masked_where_that_would_switch_off_a_window_of_attention(
    tmp_path: Path, model_type: str
) -> None:
    config = {"model_type": model_type, **SIZES, "vocab_size": 320, "sliding_window": 8, "use_sliding_window": True}
    sections = {"data": {"mask_documents": True, "sequence_length": 16}, "model": {"config": config}}
    write_corpus(tmp_path)
    recipe = Recipe.model_validate(recipe_dict(tmp_path, task="causal-lm", **sections))
    task = CausalLM()
    with raises_golden():
        task.build_model(recipe, task.load_data(recipe, progress=False))


def test_a_softcap_is_in_the_saved_configuration_and_bounds_the_logits_of_the_saved_model(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    model = {"config": {"model_type": "gemma2", **SIZES, "vocab_size": 320}}
    sections = {"task": "causal-lm", "model": model}
    recipe = Recipe.model_validate(recipe_dict(tmp_path, **sections, loss={"logit_softcap": 0.25}))
    task = CausalLM()
    data = task.load_data(recipe, progress=False)
    built = task.build_model(recipe, data)
    built.get_output_embeddings().weight.data.mul_(100)
    task.save_description(built, data, tmp_path / "model")
    built.save_pretrained(tmp_path / "model")
    saved, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), torch.arange(1, 9)[None]
    assert saved.config.final_logit_softcapping == 0.25
    with torch.no_grad():
        capped = saved(tokens).logits
        assert torch.equal(causal_lm.next_token_logits(built.eval(), {"input_ids": tokens}), capped)
        saved.config.final_logit_softcapping = None
        free = saved(tokens).logits
    assert free.abs().max() > 1
    assert torch.allclose(capped, 0.25 * torch.tanh(free / 0.25), atol=1e-6)


def test_a_softcap_that_the_saved_model_would_not_apply_is_refused(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(recipe_dict(tmp_path, task="causal-lm", loss={"logit_softcap": 30.0}))
    refused(CausalLM().prove, recipe, named="loss.logit_softcap|final_logit_softcapping|gemma2")
    sections = {"task": "masked-lm", "model": {"config": {"model_type": "bert"}}}
    for name in ("logit_softcap", "z_loss"):
        recipe = Recipe.model_validate(recipe_dict(tmp_path, **sections, loss={name: 1.0}))
        refused(check_recipe, recipe, named=f"loss.{name}|masked-lm")
    gemma2 = {"config": {"model_type": "gemma2"}, "lora": {"rank": 2, "merge": False}}
    sections = {"task": "causal-lm", "model": gemma2, "loss": {"logit_softcap": 1.0}}
    refused(
        check_recipe,
        Recipe.model_validate(recipe_dict(tmp_path, **sections)),
        named="loss.logit_softcap|adapter/|merge",
    )


@pytest.mark.parametrize(("model_type", "cap"), [("gpt2", None), ("gemma2", None), ("gemma2", 25.0)])
def test_a_class_that_builds_its_own_model_gives_it_the_softcap_or_is_refused(
    tmp_path: Path, model_type: str, cap: float | None
) -> None:
    config = AutoConfig.for_model(model_type, **SIZES, final_logit_softcapping=cap)
    recipe = Recipe.model_validate(recipe_dict(tmp_path, task="causal-lm", loss={"logit_softcap": 25.0}))
    model = AutoModelForCausalLM.from_config(config)
    if cap is not None:
        CausalLM().choices(recipe, model)
        return
    with pytest.raises(SettingError) as caught:
        CausalLM().choices(recipe, model)
    assert caught.value.settings == ("loss.logit_softcap",)


def test_z_loss_is_added_in_training_and_not_in_evaluation(task_and_data: Loaded) -> None:
    task, recipe, data = task_and_data
    model, batch = task.build_model(recipe, data), dict(data.collate([data.train[0], data.train[1]]))
    batch["labels"][:, :3] = -100
    before = [task.loss_sum(model.train(is_training), batch).detach() for is_training in (True, False)]
    task.z_loss = 0.5
    after = [task.loss_sum(model.train(is_training), batch).detach() for is_training in (True, False)]
    with torch.no_grad():
        logits = causal_lm.next_token_logits(model, batch)[batch["labels"] != -100].double()
    added = 0.5 * float(logits.exp().sum(-1).log().square().sum())
    assert float(after[0] - before[0]) == pytest.approx(added, rel=1e-5)
    assert after[1] == before[1]
