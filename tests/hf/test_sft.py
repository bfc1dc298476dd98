"""SFTTrainer: the losses of TRL's own, every field of SFTConfig, and one clear error for what is not supported."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Mamba2Config, Mamba2ForCausalLM, TrainingArguments

from accel_train import SFTTrainer
from accel_train.hf.argument_table import table
from accel_train.hf.sft_setup import SFT_FIELDS
from tests.support.hf_models import refused
from tests.support.runs import REPOSITORY, TESTS, run_forked_command
from tests.support.sft import PACKED, SETUPS, SPREAD, TEMPLATE, config, llama, lora, losses, made, rows, tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers renames what TRL sets by default
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("without_cuda"),
]
DOCS = REPOSITORY / "docs" / "hf_trainer.md"
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def own_fields() -> dict[str, Any]:
    from trl import SFTConfig

    shared = {field.name for field in dataclasses.fields(TrainingArguments)}
    return {field.name: field for field in dataclasses.fields(SFTConfig) if field.name not in shared}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_the_losses_are_those_of_trl(name: str, tmp_path: Path) -> None:
    import trl

    data, given = SETUPS[name]
    found = []
    for kind in (trl.SFTTrainer, SFTTrainer):
        trainer = made(kind, tmp_path / kind.__module__, data, **given)
        trainer.train()
        found.append(losses(trainer))
    assert len(found[0]) == 10
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert trainer._is_fused


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_two_processes_have_the_losses_of_trl(name: str, tmp_path: Path) -> None:
    found = {}
    for kind in ("stock", "ours"):
        (folder := tmp_path / kind).mkdir()
        done = run_forked_command([str(folder), kind, name], 2, TESTS / "support/programs/sft.py")
        assert done.returncode == 0, done.stderr[-3000:]
        found[kind] = json.loads((folder / "result.json").read_text())
    assert len(found["stock"]["losses"]) == 10
    assert found["ours"]["losses"] == pytest.approx(found["stock"]["losses"], rel=1e-5)


def test_every_field_of_sft_config_is_in_the_table_and_the_table_in_the_docs() -> None:
    assert SFT_FIELDS.keys() == own_fields().keys()
    assert table(SFT_FIELDS, "SFTConfig") in DOCS.read_text()


def test_a_field_that_trl_adds_later_is_refused_unless_it_has_its_default(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delitem(SFT_FIELDS, "eos_token")
    made(SFTTrainer, tmp_path, "chat")
    assert (
        "eos_token='<|end|>'"
        in refused(lambda: made(SFTTrainer, tmp_path, "chat", eos_token="<|end|>"), "eos_token").problem
    )


CHATS = {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize(
    ("row", "given", "setting", "fact"),
    [
        ({"x": 1}, {}, "train_dataset", "columns x"),
        ({"image": 1, **CHATS}, {}, "train_dataset", "images"),
        ({"chosen": "a", "rejected": "b"}, {}, "train_dataset", "preference"),
        ({"prompt": "a", **CHATS}, {}, "train_dataset", "prompt and messages"),
        ({"prompt": "a"}, {}, "train_dataset", "columns prompt"),
        ({"conversations": [USER]}, {}, "train_dataset", "role and content"),
        ({"text": "a"}, {"completion_only_loss": True}, "train_dataset", "prompt and completion"),
        ({"text": "a"}, {"assistant_only_loss": True}, "train_dataset", "chats"),
        ({"text": "a"}, {"completion_only_loss": True, "formatting_func": str}, "completion_only_loss", "plain text"),
        ({"text": "a"}, {"formatting_func": lambda row: ["a"]}, "formatting_func", "list"),
        (CHATS, {"packing": True, "max_length": None}, "max_length", "length"),
        (CHATS, {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy", "wrapped"),
        (CHATS, {"eval_packing": True}, "eval_packing", "attend"),
        (CHATS, {"padding_free": True}, "padding_free", "cut"),
        (CHATS, {"activation_offloading": True}, "activation_offloading", "activation_offloading"),
        (CHATS, {"dataset_kwargs": {"add_special_tokens": False}}, "dataset_kwargs", "skip_prepare_dataset"),
        (CHATS, {"use_liger_kernel": True}, "use_liger_kernel", "loss"),
        (CHATS, {"gradient_checkpointing_kwargs": {"selective": True}}, "gradient_checkpointing_kwargs", "selective"),
        (CHATS, {"model_init_kwargs": {"dtype": "bfloat16"}}, "model_init_kwargs", "already"),
        (CHATS, {"eos_token": "<none>"}, "eos_token", "vocabulary"),
        (CHATS, {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef", "router"),
        (CHATS, {"peft_config": dict}, "peft_config", "dict"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, {"dataset_kwargs": {"skip_prepare_dataset": True}},
         "train_dataset", "mask"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, row: dict[str, Any], given: dict[str, Any], setting: str, fact: str
) -> None:
    data = Dataset.from_list([row] * 4)
    assert fact in refused(lambda: made(SFTTrainer, tmp_path, "", train_dataset=data, **given), setting).problem


def test_configurations_of_other_trainers_and_lists_are_refused(tmp_path: Path) -> None:
    from trl import DPOConfig

    other = DPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert "DPOConfig" in refused(lambda: SFTTrainer(llama(8), other, train_dataset=rows("text")), "args").problem
    given = config(tmp_path)
    assert "list" in refused(lambda: SFTTrainer(llama(8), given, train_dataset=[CHATS]), "train_dataset").problem


def test_a_model_whose_layers_carry_values_to_the_next_row_is_not_packed(tmp_path: Path, monkeypatch: Any) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "n_groups": 1}

    def mamba(size: int) -> Any:
        return Mamba2ForCausalLM(Mamba2Config(vocab_size=size, state_size=8, chunk_size=8, **sizes))

    found = refused(lambda: made(SFTTrainer, tmp_path, "chat", model=mamba, **PACKED), "packing")
    assert "Mamba2ForCausalLM" in found.problem


def test_rows_without_a_label_within_max_length_are_counted(tmp_path: Path, caplog: Any) -> None:
    data = Dataset.from_list([{"prompt": "a" * length, "completion": "b"} for length in (3, 3, 9, 9, 9)])
    trainer = made(SFTTrainer, tmp_path, "", train_dataset=data, max_length=8)
    assert len(trainer.train_dataset) == 2
    assert "3 of 5 train rows" in caplog.text


def test_a_template_that_does_not_train_the_stop_token_is_named(tmp_path: Path, caplog: Any) -> None:
    made(SFTTrainer, tmp_path, "chat", assistant_only_loss=True)
    assert not caplog.text
    outside = TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    made(SFTTrainer, tmp_path, "chat", assistant_only_loss=True, processing_class=tokenizer(outside))
    assert "does not learn to stop" in caplog.text
    unknown = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tool = tokenizer(unknown)
    refused(
        lambda: made(SFTTrainer, tmp_path, "chat", assistant_only_loss=True, processing_class=tool),
        "assistant_only_loss",
    )


def test_formatted_rows_replace_all_columns(tmp_path: Path) -> None:
    """TRL trains on the messages when rows keep them, and ignores the text."""
    trainer = made(SFTTrainer, tmp_path, "chat", formatting_func=lambda row: "x" + row["messages"][0]["content"])
    ids = trainer.train_dataset[0]["input_ids"]
    said = rows("chat")[0]["messages"][0]["content"]
    assert trainer.processing_class.decode(ids) == f"x{said}<|end|>"


def test_raw_rows_are_evaluated_and_predicted_as_the_prepared_ones(tmp_path: Path) -> None:
    data = rows("chat", 6)
    trainer = made(SFTTrainer, tmp_path, "chat", eval_dataset={"one": data}, **PACKED)
    loss = trainer.evaluate()["eval_one_loss"]
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(loss)
    assert trainer.predict(data).metrics["test_loss"] == pytest.approx(loss)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_one_without_a_stop(tmp_path: Path) -> None:
    given: dict[str, Any] = {"peft_config": lora, "save_strategy": "steps", "save_steps": 3, **PACKED}
    whole = made(SFTTrainer, tmp_path / "whole", "chat", **given)
    whole.train()
    first = made(SFTTrainer, tmp_path / "parts", "chat", **given)
    first.train()
    second = made(SFTTrainer, tmp_path / "parts", "chat", **given)
    second.train(resume_from_checkpoint=str(tmp_path / "parts/checkpoint-6"))
    assert losses(second)[-4:] == losses(whole)[-4:]
    weights = dict(second.model.named_parameters())
    assert all(torch.equal(weights[name], each) for name, each in whole.model.named_parameters())


def test_without_trl_the_import_works_and_the_error_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['trl'] = None; import importlib.util as u; f = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'trl' else f(name, *rest)\n"
        "from accel_train import SFTTrainer\n"
        "try: SFTTrainer('x', None, train_dataset=[])\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "SFTTrainer: needs the package trl. Install it: pip install 'accel-train[sft]'."
