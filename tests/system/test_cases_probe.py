"""Documents that share a window: each model keeps them apart, or the start refuses by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train.cli.main import main
from accel_train.data.text.tokenizers import byte_tokenizer
from accel_train.model.kernels.documents import same_document_mask
from tests.support.runs import TINY_MODEL, write_base, write_corpus, write_recipe_file

FIELD_01_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FIELD_01_DELTA = {
    "model_type": "qwen3_5_text", **FIELD_01_SIZES, "head_dim": 8, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
FIELD_01_CONV = {"model_type": "lfm2", **FIELD_01_SIZES, "layer_types": ["conv", "full_attention"] * 2}
FIELD_01_MAMBA = {
    "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8,
    "n_groups": 1, "chunk_size": 16,
}  # fmt: skip
FIELD_01_LAYERS = [(FIELD_01_DELTA, "GatedDeltaNet"), (FIELD_01_CONV, "ShortConv"), (FIELD_01_MAMBA, "Mamba2Mixer")]


def difference_of_packed_document(fields: dict[str, Any]) -> float:
    """Compare the logits of a packed document under the dense mask with the same document alone."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **{**fields, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (1, 40))
    positions = torch.cat([torch.arange(24), torch.arange(16)])[None]
    mask = same_document_mask((torch.arange(40) >= 24).long()[None])
    with torch.no_grad():
        alone = model(input_ids=ids[:, 24:], use_cache=False).logits
        packed = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 24:]
    return float((packed - alone).abs().max() / alone.abs().max())


@pytest.mark.parametrize(("fields", "layer"), FIELD_01_LAYERS)
def test_field_01_a_layer_that_reaches_into_the_next_document_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], layer: str
) -> None:
    assert difference_of_packed_document(fields) > 1e-5
    write_corpus(tmp_path)
    sections: dict[str, Any] = {"task": "causal-lm", "model": {"config": fields}, "schedule": {"max_steps": 1}}
    path = write_recipe_file(tmp_path, **sections, data={"mask_documents": True})
    for command in ("run", "plan"):
        assert main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert layer in error
        assert "data.mask_documents" in error
    assert not (tmp_path / "run").exists()
    assert main(["run", str(path), "--data.mask_documents", "false"]) == 0


def test_field_01_attention_alone_keeps_documents_apart_and_the_start_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"model_type": "llama", **FIELD_01_SIZES}
    assert difference_of_packed_document(fields) < 1e-5
    write_corpus(tmp_path)
    sections: dict[str, Any] = {"task": "causal-lm", "model": {"config": fields}, "schedule": {"max_steps": 1}}
    path = write_recipe_file(tmp_path, **sections, data={"mask_documents": True})
    assert main(["run", str(path)]) == 0
    (line,) = [line for line in "".join(capsys.readouterr()).splitlines() if "probe  " in line]
    assert "equal" in line
    assert "packed documents" in line


@pytest.mark.parametrize(
    ("fields", "is_masked"), [(TINY_MODEL, True), (FIELD_01_MAMBA, False), (FIELD_01_DELTA, False)]
)
def test_field_01_finetune_masks_documents_only_where_that_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_masked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    base = write_base(Path(), fields)
    byte_tokenizer().save_pretrained(str(base))
    Path("texts.txt").write_text("a text to train on, line by line\n" * 400)
    assert main(["finetune", "texts.txt", "--model", str(base), "--dry-run"]) == 0
    data = yaml.safe_load(Path("runs/texts.yaml").read_text())["data"]
    assert data.get("mask_documents", False) is is_masked
