"""Reported faults of models: packed documents, mixtures of experts, chat templates."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from accel_train.data.text.tokenizers import byte_tokenizer, pretrained_tokenizer
from accel_train.model.kernels.documents import same_document_mask
from accel_train.tasks.causal_lm.config import CausalLMData
from accel_train.tasks.causal_lm.encoding import Example, chat_encoder
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.commands import call
from tests.support.runs import (
    LLAMA,
    TINY_MODEL,
    metrics,
    recipe_dict,
    train_recipe,
    write_base,
    write_recipe_file,
)

pytestmark = pytest.mark.usefixtures("empty_folder")


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip

DELTA = {
    "model_type": "qwen3_5_text",
    **SIZES,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}

CONV = {"model_type": "lfm2", **SIZES, "layer_types": ["conv", "full_attention"] * 2}

MAMBA = {
    "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8,
    "n_groups": 1, "chunk_size": 16,
}  # fmt: skip


def _packed_recipe(corpus: Path, fields: dict[str, Any]) -> Path:
    """Write a recipe of a step that keeps packed documents apart."""
    sections = {"model": {"config": fields}, "schedule": {"max_steps": 1}, "data": {"mask_documents": True}}
    return write_recipe_file(corpus, task="causal-lm", **sections)


LAYERS = [(DELTA, "GatedDeltaNet"), (CONV, "ShortConv"), (MAMBA, "Mamba2Mixer")]


def _difference_of_packed_document(fields: dict[str, Any]) -> float:
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


@pytest.mark.parametrize(("fields", "layer"), LAYERS)
def test_field_01_a_layer_that_reaches_into_the_next_document_is_refused_by_name(
    corpus: Path, fields: dict[str, Any], layer: str
) -> None:
    assert _difference_of_packed_document(fields) > 1e-5
    path = _packed_recipe(corpus, fields)
    for command in ("run", "plan"):
        error = call(command, path, code=2).err
        assert layer in error
        assert "data.mask_documents" in error
    assert not (corpus / "run").exists()
    call("run", path, "--data.mask_documents", "false")


def test_field_01_attention_alone_keeps_documents_apart_and_the_start_says_so(corpus: Path) -> None:
    fields = {"model_type": "llama", **SIZES}
    assert _difference_of_packed_document(fields) < 1e-5
    path = _packed_recipe(corpus, fields)
    (line,) = [line for line in "".join(call("run", path, "--verbose")).splitlines() if "probe  " in line]
    assert "equal" in line
    assert "packed documents" in line


@pytest.mark.parametrize(("fields", "is_masked"), [(TINY_MODEL, True), (MAMBA, False), (DELTA, False)])
def test_field_01_finetune_masks_documents_only_where_that_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_masked: bool
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    base = write_base(Path(), fields)
    byte_tokenizer().save_pretrained(str(base))
    Path("texts.txt").write_text("a text to train on, line by line\n" * 400)
    call("finetune", "texts.txt", "--model", base, "--dry-run")
    data = yaml.safe_load(Path("runs/texts.yaml").read_text())["data"]
    assert data.get("mask_documents", False) is is_masked


EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTURE = {**LLAMA, "model_type": "mixtral", **EXPERTS}


def _mixture(
    folder: Path, name: str, processes: int = 1, per_device: int = 8, **sections: Any
) -> list[tuple[float, ...]]:
    """Train it for 4 steps; return each step's loss, router loss and gradient norm."""
    sections = {
        "task": "causal-lm",
        "model": {"config": MIXTURE},
        "batch": {"global_batch_size": 8, "per_device_batch_size": per_device},
        "schedule": {"max_steps": 4},
        **sections,
    }
    train_recipe(recipe_dict(folder, output_dir=str(folder / name), **sections), processes)
    steps = metrics(folder / name)
    return [(each["step_loss"], each.get("router_aux_loss", 0.0), each["grad_norm"]) for each in steps]


def test_field_02_the_loss_is_that_of_transformers_with_its_router_loss(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    ours = CausalLM.loss_sum

    def compared(task: CausalLM, model: Any, batch: Any) -> Any:
        if not model.training:
            return ours(task, model, batch)
        with torch.no_grad():
            whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**MIXTURE, "vocab_size": 320}))
            whole.load_state_dict(model.state_dict())
            out = whole(batch["input_ids"])
            loss = cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten()) + 0.5 * out.aux_loss
        seen.append((float(loss), float(out.aux_loss)))
        return ours(task, model, batch)

    monkeypatch.setattr(CausalLM, "loss_sum", compared)
    got = _mixture(corpus, "run")
    assert [step[0] for step in got] == pytest.approx([each[0] for each in seen], rel=1e-6)
    assert [step[1] for step in got] == pytest.approx([each[1] for each in seen], rel=1e-6)


@pytest.mark.parametrize("mask", [False, True])
def test_field_02_the_router_loss_does_not_depend_on_how_a_batch_is_cut(corpus: Path, mask: bool) -> None:
    data = {"mask_documents": mask}
    whole = _mixture(corpus, "whole", data=data)
    assert all(1.9 < router < 4 for _, router, _ in whole)
    parts = _mixture(corpus, "parts", per_device=2, data=data)
    off = _mixture(corpus, "off", data=data, loss={"router_aux": False})
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), rtol=1e-6, atol=2e-6)
    assert whole[0][0] - off[0][0] == pytest.approx(0.5 * whole[0][1], rel=1e-5)
    assert off[0][1] == 0


@pytest.mark.parametrize(
    ("processes", "per_device", "strategy"),
    [(2, 4, "ddp"), (2, 1, "ddp"), (4, 2, "ddp"), (2, 4, "fsdp2"), (2, 2, "fsdp2")],
)
def test_field_02_the_router_loss_is_the_same_on_any_number_of_processes(
    corpus: Path, processes: int, per_device: int, strategy: str
) -> None:
    whole = _mixture(corpus, "whole")
    assert all(1.9 < router < 4 for _, router, _ in whole)
    spread = _mixture(corpus, "spread", processes, per_device, parallel={"strategy": strategy})
    torch.testing.assert_close(torch.tensor(spread), torch.tensor(whole), rtol=1e-6, atol=2e-6)


THINKING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}OPEN{%- if "
    "m.thoughts %}"
    "{{- '<think>\\n' + m.thoughts + '\\n</think>\\n\\n' }}{%- elif loop.last %}{{- '<think>\\n\\n</think>\\n\\n' "
    "}}{%- endif %}"
    "{{- m.content + '<|im_end|>' }}CLOSE{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor "
    "%}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not "
    "enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""As Qwen3's: the last turn of the assistant has a block of thoughts, which may be empty."""


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("thoughts", "learned"), [("", "yes<|im_end|>"), ("hm", "<think>\nhm\n</think>\n\nyes<|im_end|>")]
)
def test_field_03_what_the_generation_prompt_supplies_is_not_a_target(
    marked: bool, thoughts: str, learned: str
) -> None:
    marks = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = THINKING.replace("OPEN", marks[0]).replace("CLOSE", marks[1])
    tokenizer = pretrained_tokenizer("bytes", trust_remote_code=False)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "thoughts": thoughts}]
    data = CausalLMData.model_validate({"train": "chats.jsonl", "format": "chat", "chat_template": template})
    [encoded] = chat_encoder(tokenizer, data)([Example(chat, "row 1")], defaultdict(list))
    text = tokenizer.tokenizer.decode(encoded.ids[encoded.is_target])
    assert text.removesuffix("<|endoftext|>").rstrip("\n") == learned
