"""The probe of a run's forward: what it finds, what it leaves alone, and the table of the docs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from accel_train.core.errors import SettingError
from accel_train.model.kernels import chunked_loss, toy
from accel_train.recipe.schema import Recipe
from accel_train.tasks.causal_lm import probe
from accel_train.tasks.causal_lm import task as causal_lm
from accel_train.tasks.causal_lm.probe import CAP, CHECKPOINTING, CHUNKED, DOCUMENTS, ROWS, SAME, examine, prove
from accel_train.tasks.causal_lm.task import FORWARD, CausalLM
from benchmarks import families
from tests.support.runs import LLAMA, recipe_dict


def recipe_of(folder: Path, config: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    model = {"config": config or LLAMA}
    data = {"mask_documents": True, **sections.pop("data", {})}
    return Recipe.model_validate(recipe_dict(folder, task="causal-lm", model=model, data=data, **sections))


def measured(recipe: Recipe, *checks: str) -> probe.Proof:
    fields = dict(recipe.model.config or {})
    return examine(recipe, CONFIG_MAPPING[fields.pop("model_type")](**fields), FORWARD, checks)


def refusal_of(recipe: Recipe) -> SettingError:
    """Return the error that the probe of a recipe ends with."""
    with pytest.raises(SettingError) as caught:
        CausalLM().prove(recipe)
    return caught.value


def test_documents_without_a_mask_are_seen_to_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    assert measured(recipe, DOCUMENTS, ROWS).has_passed

    def causal(model: Any, batch: Any, *, compiled: bool) -> Tensor:
        length = batch["input_ids"].shape[1]
        return torch.ones(1, 1, length, length, dtype=torch.bool).tril()

    monkeypatch.setattr(causal_lm, "document_mask", causal)
    proof = measured(recipe, DOCUMENTS, ROWS)
    assert proof.differences[DOCUMENTS] > 1e-2 < proof.differences[ROWS]
    assert proof.layer == "LlamaAttention"
    error = refusal_of(recipe)
    assert error.settings == ("data.mask_documents",)
    assert error.problem.startswith("LlamaAttention ")


def test_positions_that_do_not_restart_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = causal_lm.model_inputs
    monkeypatch.setattr(causal_lm, "model_inputs", lambda *given: {**kept(*given), "position_ids": None})
    recipe = recipe_of(tmp_path, {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2})
    assert measured(recipe, DOCUMENTS).differences[DOCUMENTS] > 1e-2


def test_a_model_that_does_not_apply_the_cap_of_its_logits_is_refused(tmp_path: Path) -> None:
    assert measured(recipe_of(tmp_path, {"model_type": "gemma2"}), CAP).differences[CAP] <= SAME
    # The language model inside of Gemma 3 applies the cap, and the model with images does not.
    recipe = recipe_of(tmp_path, {"model_type": "gemma3"}, loss={"logit_softcap": 30.0}, data={"mask_documents": False})
    assert measured(recipe, CAP).differences[CAP] > 0.1
    for task in ("causal-lm", "module_of_a_user:OwnLoss"):
        error = refusal_of(recipe.model_copy(update={"task": task}))
        assert error.settings == ("loss.logit_softcap",)
        assert error.problem.startswith("Gemma3ForConditionalGeneration ")


def test_a_wrong_loss_in_chunks_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, loss={"chunked": True})
    assert measured(recipe, CHUNKED).has_passed
    losses = chunked_loss._losses
    monkeypatch.setattr(chunked_loss, "_losses", lambda *given: (losses(*given)[0] * 1.0001, losses(*given)[1]))
    assert refusal_of(recipe).at == "loss.chunked=True"


@pytest.mark.parametrize("kept", ["blocks", "selective"])
def test_wrong_gradients_of_checkpointed_blocks_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    recipe = recipe_of(tmp_path, precision={"gradient_checkpointing": kept}, data={"mask_documents": False})
    assert measured(recipe, CHECKPOINTING).has_passed
    enable = probe.checkpoint_activations

    def wrong(model: PreTrainedModel, precision: Any) -> None:
        enable(model, precision)
        model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * 1.001)

    monkeypatch.setattr(probe, "checkpoint_activations", wrong)
    assert refusal_of(recipe).at == f"precision.gradient_checkpointing={kept}"


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe = recipe_of(tmp_path, {"model_type": "bert", **fields}, data={"mask_documents": False})
    assert refusal_of(recipe).at == "model type bert"
    decoder = recipe_of(tmp_path, {"model_type": "bert", **fields, "is_decoder": True}, data={"mask_documents": False})
    assert CausalLM().prove(decoder)["probe"].value == "equal"


def test_what_tests_hold_already_is_not_probed(tmp_path: Path) -> None:
    assert CausalLM().prove(recipe_of(tmp_path, data={"mask_documents": False})) == {}


def test_random_numbers_stay_as_they_are_and_the_second_start_reads_the_first_ones_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, state = recipe_of(tmp_path), torch.get_rng_state()
    first = CausalLM().prove(recipe)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(probe, "examine", None)
    assert CausalLM().prove(recipe) == first
    with pytest.raises(TypeError):  # other settings have a proof of their own
        CausalLM().prove(recipe_of(tmp_path, data={"sequence_length": 31}))
    other = str  # of another module
    with pytest.raises(TypeError):
        prove(recipe, CONFIG_MAPPING["llama"](**LLAMA), FORWARD._replace(loss_sum=other))


def test_documents_are_kept_apart_under_eager_attention(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    model = recipe.model.model_copy(update={"attn_implementation": "eager"})
    assert CausalLM().prove(recipe.model_copy(update={"model": model}))["probe"].value == "equal"


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba", "gemma2", "deepseek_v3", "gpt_neo", "opt"])
def test_a_toy_model_has_all_kinds_of_layers(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    with torch.device("cpu"):
        model = toy.toy_model(config)
    assert sum(each.numel() for each in model.parameters()) <= toy.LARGEST
    listed = getattr(config, "layer_types", None) or []
    assert set(getattr(model.config, "layer_types", None) or []) == set(listed)


def test_a_configuration_that_cannot_shrink_is_not_called_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "SMALL", 0)
    monkeypatch.setattr(toy, "LARGEST", 0)
    with pytest.raises(SettingError) as caught:
        CausalLM().prove(recipe_of(tmp_path))
    assert caught.value.settings == ("data.mask_documents",)


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode", "mamba2", "lfm2", "mixtral"])
def test_the_table_of_families_is_what_the_probe_measures(family: str) -> None:
    page = families.PAGE.read_text().partition(families.LAYOUTS)[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    (row,) = (row for row in rows if f"`{family}`" in row[-1])
    measured = (families.row_of(family) or "").strip("| ").split(" | ")[1:]
    assert list(map(families.verdict, row[:-1])) == list(map(families.verdict, measured))
    assert all(float(found) <= max(SAME, 2e-5) for found in re.findall(r"equal \((.*?)\)", " ".join(row)))
    layer = re.search(r"refused: (\w+),", measured[0])
    assert layer is None or f"`{family}` ({layer[1]})" in row[-1]
