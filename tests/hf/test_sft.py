"""SFTTrainer: the losses of TRL's own, every field of SFTConfig, and one clear error for what is not supported."""

import dataclasses
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AttentionInterface,
    LlamaConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
)

from accel_train import SFTTrainer
from accel_train.core.errors import SettingError
from accel_train.core.json_io import load_object
from accel_train.hf.arguments import check_overrides
from accel_train.hf.sft_setup import SFT_FIELDS
from tests.support.hf_models import Given, every, refused, table
from tests.support.processes import run_forked
from tests.support.runs import REPOSITORY, TESTS, run_forked_command
from tests.support.sft import (
    MARKS,
    PACKED,
    RESUMED,
    SETUPS,
    SIZES,
    SPREAD,
    TEMPLATE,
    adapted,
    both,
    config,
    llama,
    lora,
    losses,
    made,
    mixtral,
    padded,
    prompt_tuned,
    quantized,
    rows,
    same_scores,
    scores,
    tokenizer,
    virtual,
)
from tests.support.wording import assert_generated, assert_golden, raises_golden

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]  # dynamo's
DOCS = REPOSITORY / "docs" / "hf_trainer.md"
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def own_fields() -> Given:
    from trl import SFTConfig

    shared = {field.name for field in dataclasses.fields(TrainingArguments)}
    return {field.name: field for field in dataclasses.fields(SFTConfig) if field.name not in shared}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_the_losses_are_those_of_trl(name: str, tmp_path: Path) -> None:
    data, given = SETUPS[name]
    expected, found, trainer = both(tmp_path, data, lambda each: (losses(each), scores(each)), **given)
    assert len(expected[0]) == len(expected[1]) == 10
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    # TRL averages the means of micro-batches.
    is_ragged = given.get("gradient_accumulation_steps", 1) > 1
    same_scores(found[1], expected[1], 2e-2 if is_ragged else 2e-5)
    assert trainer._is_fused


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_two_processes_have_the_losses_of_trl(name: str, tmp_path: Path) -> None:
    found = {}
    for kind in ("stock", "ours"):
        (folder := tmp_path / kind).mkdir()
        done = run_forked_command([str(folder), kind, name], 2, TESTS / "support/programs/sft.py")
        assert done.returncode == 0, done.stderr[-3000:]
        found[kind] = load_object(folder / "result.json")
    assert len(found["stock"]["losses"]) == 10
    assert found["ours"]["losses"] == pytest.approx(found["stock"]["losses"], rel=1e-5)
    is_ragged = "gradient_accumulation_steps" in SPREAD[name][1]
    same_scores(found["ours"]["scores"], found["stock"]["scores"], 5e-2 if is_ragged else 2e-5)


def test_the_log_and_evaluations_have_the_metrics_of_trl(tmp_path: Path) -> None:
    def read(trainer: Any) -> Any:
        lines = [line for line in trainer.state.log_history if "eval_loss" in line]
        names = ("eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens", "eval_aux_loss")
        return scores(trainer), [{name: line[name] for name in names} for line in lines], trainer.state.best_metric

    given = {"max_steps": 4, **every(2, "eval", "save", "logging"), **PACKED, "model": mixtral}
    given |= {"eval_dataset": rows("chat", 6), "per_device_eval_batch_size": 6}
    given |= {"load_best_model_at_end": True, "metric_for_best_model": "mean_token_accuracy"}
    expected, found, trainer = both(tmp_path, "chat", read, **given)
    for theirs, ours in zip(expected[:2], found, strict=False):
        assert len(theirs) == 2
        same_scores(ours, theirs, 2e-5)
    assert found[2] == pytest.approx(expected[2])
    assert trainer.aux_loss_enabled


@pytest.mark.parametrize("given", [{}, {"label_smoothing_factor": 0.1}], ids=["fused", "from logits"])
def test_metrics_depend_on_neither_accumulation_nor_a_resume(tmp_path: Path, given: Given) -> None:
    given = {"max_steps": 4, "assistant_only_loss": True, "save_strategy": "steps", "save_steps": 3, **given}
    whole = made(SFTTrainer, tmp_path / "whole", "chat", per_device_train_batch_size=8, **given)
    whole.train()
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "eval_dataset": rows("chat", 7)}
    accumulated = made(SFTTrainer, tmp_path / "parts", "chat", **parts, **given)
    accumulated.train()
    resumed = made(SFTTrainer, tmp_path / "parts", "chat", **parts, **given)
    resumed.train(str(tmp_path / "parts/checkpoint-3"))
    assert len(scores(whole)) == 4
    for trainer in (accumulated, resumed):
        same_scores(scores(trainer), scores(whole), 1e-5)
    found = {name: accumulated.evaluate()[name] for name in ("eval_entropy", "eval_mean_token_accuracy")}
    accumulated.args.per_device_eval_batch_size = 2
    assert {name: accumulated.evaluate()[name] for name in found} == pytest.approx(found)


def test_a_metric_that_evaluations_do_not_report_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for name, data, known in (
        ("accuracy", rows("chat", 4), "mean_token_accuracy"),
        ("loss", {"one": rows("chat", 4)}, "one_loss"),
    ):
        more = {"metric_for_best_model": name, "load_best_model_at_end": True, "eval_dataset": data}
        trainer = made(SFTTrainer, tmp_path, "chat", **every(2, "eval", "save"), **more)
        assert known in refused(trainer.train, "metric_for_best_model").problem
        assert trainer.state.global_step == 0
        assert not (tmp_path / "recipe.resolved.yaml").exists()


@pytest.mark.faults
def test_a_process_that_dies_while_the_rows_are_prepared_is_named(tmp_path: Path) -> None:
    program, folder = TESTS / "support/programs/sft.py", tmp_path / "processes"
    forked = run_forked([str(tmp_path), "dies", "chat"], 2, folder=folder, program=program)
    assert forked.wait() == [-signal.SIGKILL, 1]
    who = f"rank 0 (process {forked.pids[0]} on {socket.gethostname()})"
    *_, error = forked.stderr(1).strip().splitlines()
    kind, _, cause = error.partition(f": {who} ")
    assert kind == "accel_train.core.errors.ProcessFailed"
    assert_golden(cause.partition("(")[0])


def test_every_field_of_sft_config_is_in_the_table_and_the_table_in_the_docs() -> None:
    assert SFT_FIELDS.keys() == own_fields().keys()
    assert_generated(DOCS, "hf/sft_setup.py", table(SFT_FIELDS, "SFTConfig"))


def test_a_field_that_trl_adds_later_is_refused_unless_it_has_its_default(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delitem(SFT_FIELDS, "eos_token")
    made(SFTTrainer, tmp_path, "chat")
    found = refused(lambda: made(SFTTrainer, tmp_path, "chat", eos_token="<|end|>"), "eos_token")
    assert "eos_token='<|end|>'" in found.problem


CHATS, TARGETS = {"messages": [USER, ASSISTANT]}, "peft_config.target_modules"


def t5(size: int) -> Any:
    return T5ForConditionalGeneration(T5Config(vocab_size=size, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def mamba(size: int) -> Any:
    """A model whose layers carry values to the next row."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "n_groups": 1}
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=size, state_size=8, chunk_size=8, **sizes))


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
        (CHATS, {"model_init_kwargs": {"torch_dtype": torch.bfloat16}}, "model_init_kwargs", "dtype"),
        (CHATS, {"model_init_kwargs": {"device_map": {"": 0}}}, "model_init_kwargs", "device_map"),
        (CHATS, {"model": lambda size: torch.nn.Linear(2, 2)}, "model", "Linear"),
        (CHATS, {"model": t5}, "model", "T5ForConditionalGeneration"),
        (CHATS, {"model": lambda size: llama(size - 3)}, "train_dataset", "not among"),
        (CHATS, {"peft_config": lora, "model": adapted}, "peft_config", "already"),
        (CHATS, {"peft_config": partial(lora, target_modules=["k_proj", "v_porj"])}, TARGETS, "v_proj"),
        (CHATS, {"peft_config": partial(lora, modules_to_save=["lm_haed"])}, "peft_config.modules_to_save", "lm_head"),
        (CHATS, {"peft_config": partial(lora, layers_to_transform=[0, 9])}, "peft_config.layers_to_transform", "'9'"),
        (CHATS, {"peft_config": partial(lora, rank_pattern={"o_porj": 2})}, "peft_config.rank_pattern", "o_proj"),
        (CHATS, {"loss_type": "dft", "compute_loss_func": print}, "loss_type", "loss"),
        (CHATS, {"loss_type": "none"}, "loss_type", "none"),
        (CHATS, {"model": mamba, **PACKED}, "packing", "Mamba2ForCausalLM"),
        (CHATS, {"model": prompt_tuned, **PACKED}, "packing", "PromptTuningConfig"),
        (CHATS, {"model": prompt_tuned, "padding_free": True, "max_length": None}, "padding_free", "PromptTuning"),
        (CHATS, {"peft_config": partial(virtual, "PrefixTuningConfig"), **PACKED}, "packing", "PrefixTuning"),
        (CHATS, {"peft_config": partial(LoraConfig, task_type="CAUSAL_LM", alora_invocation_tokens=[7]), **PACKED},
         "packing", "LoraConfig"),
        (CHATS, {"packing": True, "data_collator": padded}, "packing", "collator"),
        ({"text": None}, {}, "train_dataset", "row 0 has an empty text"),
        ({"input_ids": [1, 2]}, {"assistant_only_loss": True}, "train_dataset", "chats"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, {}, "train_dataset", "completion_mask"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "train_dataset", "2 input_ids but 1 labels"),
        ({"input_ids": [1, 2], "labels": [1]}, PACKED, "train_dataset", "2 input_ids but 1 labels"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, {}, "train_dataset", "max_length"),
        ({"input_ids": [1, 999]}, {}, "train_dataset", "999"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, {"dataset_kwargs": {"skip_prepare_dataset": True}},
         "train_dataset", "mask"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, row: Given, given: Given, setting: str, fact: str
) -> None:
    data = Dataset.from_list([row] * 4)
    assert fact in refused(lambda: made(SFTTrainer, tmp_path, "", train_dataset=data, **given), setting).problem


class Tokens:
    """Overrides the rows that TRL would make: the last three tokens of each are learned."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        rows = [{"text": "".join(each["text"][::-1])} for each in dataset]
        made = super()._prepare_dataset(Dataset.from_list(rows), *args, **kwargs)  # type: ignore[misc]
        return made.map(lambda row: {"labels": [-100] * (len(row["labels"]) - 3) + row["labels"][-3:]})


def test_rows_that_an_override_prepares_are_trained_and_evaluated_as_in_trl(tmp_path: Path) -> None:
    def read(trainer: Any) -> list[float]:
        evaluations = trainer.evaluate(), trainer.evaluate(rows("text", 4))
        return [*losses(trainer), *(each["eval_loss"] for each in evaluations)]

    given = {"max_steps": 2, "eval_dataset": rows("text", 4), "per_device_eval_batch_size": 4}
    expected, found, _ = both(tmp_path, "text", read, Tokens, **given)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["_reject_skip_prepare_without_labels", "_send_telemetry", "_save_checkpoint", "_prepared"]
)
def test_methods_that_only_trl_calls_are_refused_as_overrides_before_a_model_is_made(tmp_path: Path, name: str) -> None:
    own = type("Own", (SFTTrainer,), {name: lambda self, *args: None})
    refused(lambda: own("no/model", config(tmp_path), train_dataset=rows("text")), f"Own.{name}")


def test_every_method_of_trl_is_called_offered_or_refused(tmp_path: Path) -> None:
    from trl import SFTTrainer as Stock

    of_trl = {name for cls in Stock.__mro__ if cls.__module__.startswith("trl.") for name in vars(cls)}
    for name in sorted(name for name in of_trl if callable(getattr(Stock, name)) and not name.startswith("__")):
        own = type("Own", (SFTTrainer,), {name: lambda self, *args: None})
        if name in SFTTrainer._hooks or not name.startswith("_"):
            assert callable(getattr(SFTTrainer, name)), name
        else:
            refused(lambda own=own: check_overrides(own), f"Own.{name}")


def test_configurations_of_other_trainers_and_lists_are_refused(tmp_path: Path) -> None:
    from trl import DPOConfig

    other = DPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert "DPOConfig" in refused(lambda: SFTTrainer(llama(8), other, train_dataset=rows("text")), "args").problem
    given = config(tmp_path)
    assert "list" in refused(lambda: SFTTrainer(llama(8), given, train_dataset=[CHATS]), "train_dataset").problem


def test_an_attention_that_reads_other_rows_is_not_packed(tmp_path: Path) -> None:
    def leaky(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None

    AttentionInterface.register("leaky", leaky)

    def model(size: int) -> Any:
        made = llama(size)
        made.set_attn_implementation("leaky")
        return made

    found = refused(lambda: made(SFTTrainer, tmp_path, "chat", model=model, **PACKED), "packing")
    assert_golden(found.problem.partition(" (")[0])
    made(SFTTrainer, tmp_path, "chat", model=model)


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
    assert_golden(*caplog.messages)
    unknown = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    given = {"assistant_only_loss": True, "processing_class": tokenizer(unknown)}
    refused(lambda: made(SFTTrainer, tmp_path, "chat", **given), "assistant_only_loss")


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
@pytest.mark.parametrize("name", RESUMED)
def test_a_killed_run_resumes_with_the_losses_and_weights_of_one_without_a_stop(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, given = RESUMED[name]
    whole = made(SFTTrainer, tmp_path / "whole", data, **given)
    whole.train()
    killed = run_forked_command([str(tmp_path), "killed", name], 1, TESTS / "support/programs/sft.py")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not (tmp_path / "run/model").exists()
    second = made(SFTTrainer, tmp_path / "run", data, **given)
    second.train(resume_from_checkpoint=True)
    assert ("continues from its saved state: reading 1 steps" in capsys.readouterr().out) == name.startswith("streamed")
    assert len(losses(whole)) == 10
    assert losses(second) == losses(whole)
    weights = dict(second.model.named_parameters())
    assert all(torch.equal(weights[name], each) for name, each in whole.model.named_parameters())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> str:
    """A folder with a model and its tokenizer."""
    folder = str(tmp_path_factory.mktemp("model"))
    (tool := tokenizer()).save_pretrained(folder)
    llama(len(tool)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"model_init_kwargs": {"config": LlamaConfig(vocab_size=len(tokenizer()), **SIZES)}}, torch.float32),
        ({"model_init_kwargs": {"dtype": torch.bfloat16, "attn_implementation": "eager"}, **PACKED}, torch.bfloat16),
        ({"model_init_kwargs": {"dtype": "auto"}, "bf16": True}, torch.float32),
        ({"quantization_config": quantized(4), "peft_config": lora, **PACKED}, torch.uint8),
        ({"model_init_kwargs": {"quantization_config": quantized(8)}, "peft_config": lora}, torch.int8),
    ],
    ids=["path", "bf16 weights", "bf16", "QLoRA, 4 bits", "QLoRA, 8 bits"],
)
def test_a_model_given_as_a_path_has_the_losses_of_trl(
    saved: str, tmp_path: Path, given: Given, dtype: torch.dtype
) -> None:
    def read(trainer: Any) -> list[float]:
        (weight,) = (each for name, each in trainer.model.named_parameters() if "0.mlp.up_proj" in name)
        assert weight.dtype == dtype
        return losses(trainer)

    expected, found, _ = both(tmp_path, "chat", read, model=saved, **given)
    in_bf16 = given.get("bf16") or dtype == torch.bfloat16
    assert found == pytest.approx(expected, rel=5e-5 if in_bf16 else 1e-5)
    assert len(found) == 10
    assert (tmp_path / SFTTrainer.__module__ / "model/training_args.json").is_file()


def test_the_tokenizer_is_the_models_by_default(saved: str, tmp_path: Path) -> None:
    trainer = SFTTrainer(saved, config(tmp_path), train_dataset=rows("chat", 8))
    assert trainer.processing_class.get_vocab() == tokenizer().get_vocab()
    assert trainer.train_dataset[0] == made(SFTTrainer, tmp_path, "chat").train_dataset[0]


OTHER_TEMPLATE = TEMPLATE.replace("<|user|>", "<|human|>").replace(
    "m['role'] }}", "m['role'] | replace('user', 'human') }}"
)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, lora], ids=["full", "LoRA"])
@pytest.mark.parametrize("is_file", [True, False], ids=["file", "tokenizer"])
def test_a_chat_template_by_path_has_the_tokens_and_losses_of_trl(tmp_path: Path, adapter: Any, is_file: bool) -> None:
    import trl

    path = tmp_path / "other.jinja"
    path.write_text(OTHER_TEMPLATE)
    if not is_file:
        other = tokenizer(OTHER_TEMPLATE, end="<|stop|>")
        other.add_tokens(["<|human|>"], special_tokens=True)
        other.save_pretrained(path := tmp_path / "other")
    found = []
    for kind in (trl.SFTTrainer, SFTTrainer):
        given = {"chat_template_path": str(path), "peft_config": adapter}
        trainer = made(kind, tmp_path / kind.__module__, "chat", processing_class=tokenizer(None), **given)
        start = {name: each.detach().clone() for name, each in trainer.model.named_parameters() if "delta" in name}
        trainer.train()
        found.append((losses(trainer), list(trainer.train_dataset["input_ids"])))
    assert found[1][1] == found[0][1]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert trainer.processing_class.decode(found[1][1][0]).startswith("<|human|>")
    assert len(start) == (not is_file and adapter is not None)
    ends = dict(trainer.model.named_parameters())
    assert not any(torch.equal(ends[name], each) for name, each in start.items())


def accuracy(prediction: Any) -> dict[str, float]:
    said, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((said == labels)[labels != -100].mean())}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{}, PACKED, {**PACKED, "eval_packing": False}], ids=["padded", "packed", "unpacked evaluation"]
)
def test_evaluations_at_steps_have_the_losses_and_metrics_of_trl(tmp_path: Path, given: Given) -> None:
    names = [f"eval_{part}_{name}" for part in ("one", "two") for name in ("loss", "accuracy")]

    def read(trainer: Any) -> dict[tuple[int, str], float]:
        log = trainer.state.log_history
        return {(line["step"], name): line[name] for line in log for name in names if name in line}

    # One batch: TRL averages the means of batches.
    more = {"eval_dataset": {"one": rows("chat", 8), "two": rows("text", 8)}, "per_device_eval_batch_size": 8}
    more |= {"compute_metrics": accuracy, **every(5, "eval"), **given}
    expected, found, _ = both(tmp_path, "chat", read, **more)
    assert expected.keys() == {(step, name) for step in (5, 10) for name in names}
    assert found == pytest.approx(expected, rel=1e-5)


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step == 4


def test_callbacks_see_each_step_and_stop_the_run(tmp_path: Path) -> None:
    (trainer := made(SFTTrainer, tmp_path, "chat", callbacks=[Stops()])).train()
    assert trainer.state.global_step == 4


def test_noise_of_neftune_is_in_training_alone(tmp_path: Path) -> None:
    found = {}
    for alpha in (None, 5.0, 5.0001):
        given = {"neftune_noise_alpha": alpha, "eval_dataset": rows("chat", 8), "eval_on_start": True}
        trainer = made(SFTTrainer, tmp_path / str(alpha), "chat", max_steps=3, **given)
        trainer.train()
        first = next(line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line)
        found[alpha] = first, losses(trainer)
        embedding = trainer.model.get_input_embeddings().train()
        assert torch.equal(embedding(torch.tensor([7])), embedding.weight[7:8])
    assert found[None][0] == found[5.0][0]
    assert found[5.0][1] != pytest.approx(found[None][1], rel=1e-6)
    assert found[5.0][1] == pytest.approx(found[None][1], rel=2e-2)
    # The noise is the same in each run.
    assert found[5.0][1] == pytest.approx(found[5.0001][1], rel=1e-5)


def test_an_adapter_that_would_not_train_the_templates_new_tokens_is_refused(tmp_path: Path) -> None:
    other = tokenizer(TEMPLATE, end="<|stop|>")
    other.save_pretrained(tmp_path / "other")
    given = {"chat_template_path": str(tmp_path / "other"), "model": adapted}
    found = refused(lambda: made(SFTTrainer, tmp_path, "chat", **given), "chat_template_path")
    assert_golden(str(found))


def test_a_row_of_a_stream_with_fewer_labels_than_tokens_stops_the_run(tmp_path: Path) -> None:
    data = Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}] * 9 + [{"input_ids": [1, 2], "labels": [1]}])
    trainer = made(SFTTrainer, tmp_path, "", train_dataset=data, streamed=True, shuffle_dataset=False)
    with raises_golden(SettingError):
        trainer.train()


def test_an_eos_token_is_set_on_tokenizer_and_model_and_ends_the_text(tmp_path: Path) -> None:
    trainer = made(SFTTrainer, tmp_path, "text", eos_token="<|user|>")
    end = tokenizer().convert_tokens_to_ids("<|user|>")
    assert trainer.train_dataset[0]["input_ids"][-1] == trainer.train_dataset[0]["labels"][-1] == end
    assert trainer.processing_class.eos_token_id == trainer.model.config.eos_token_id == end


@pytest.mark.parametrize(
    ("name", "change", "fact"),
    [
        ("trl.trainer.sft_trainer.SFTTrainer._prepare_dataset", None, "_prepare_dataset"),
        ("trl.trainer.sft_trainer.SFTTrainer._prepare_dataset", lambda self, dataset, how: 0, "other arguments"),
        ("trl.trainer.utils.add_fused_lm_head", None, "add_fused_lm_head"),
        ("trl.chat_template_utils.get_training_chat_template", lambda tokenizer: 0, "other arguments"),
        ("trl.trainer.sft_trainer.SFTTrainer._prepare_dataset.__code__",
         (lambda self, dataset, processing_class, args, packing, formatting_func, dataset_name: self._new).__code__,
         "SFTTrainer._new"),
    ],
)  # fmt: skip
def test_another_version_of_trl_is_one_error_that_names_the_tested_one(
    tmp_path: Path, monkeypatch: Any, name: str, change: Any, fact: str
) -> None:
    import trl

    if change is None:
        monkeypatch.delattr(name)
    else:
        monkeypatch.setattr(name, change)
    found = refused(lambda: made(SFTTrainer, tmp_path, "chat"), "args")
    assert fact in found.problem
    assert trl.__version__ in found.problem
    assert "trl==1.16.0" in found.remedy
    assert "trl==1.16.0\n" in (REPOSITORY / "constraints.txt").read_text()


def test_without_trl_the_import_works_and_the_error_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['trl'] = None; import importlib.util as u; f = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'trl' else f(name, *rest)\n"
        "from accel_train import SFTTrainer\n"
        "try: SFTTrainer('x', None, train_dataset=[])\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert_golden(done.stdout)
