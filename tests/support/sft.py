"""What the tests of SFTTrainer share: a tokenizer, tiny models, chats, and both trainers on the same set-up."""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

from tests.support.hf_models import Given

MARKS = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers renames what TRL sets by default
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("without_cuda"),
]
"""Marks of modules that run TRL."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: Given = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}


def tokenizer(template: str | None = TEMPLATE, end: str = "<|end|>") -> Any:
    """A tokenizer with a token for each byte, and special tokens."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    wrapped = Fast(tokenizer_object=made, eos_token=end, pad_token="<|pad|>")
    extra = dict.fromkeys((end, "<|user|>", "<|assistant|>", "<|system|>"))
    wrapped.add_tokens([AddedToken(each, special=True, normalized=False) for each in extra], special_tokens=True)
    wrapped.chat_template = template
    return wrapped


def llama(size: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=size, **SIZES))


def mixtral(size: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    return MixtralForCausalLM(MixtralConfig(vocab_size=size, **SIZES, **experts))


def _words(generator: random.Random, most: int) -> str:
    return " ".join(generator.choice(("red", "blue", "green")) for _ in range(generator.randint(1, most)))


def rows(kind: str, count: int = 48) -> Dataset:
    """Ragged rows: `chat` (one to three turns), `pair`, `chat pair`, `text`, or `tokens`."""
    generator, made = random.Random(1), []
    for _ in range(count):
        question, answer = _words(generator, 5), _words(generator, 9)
        user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        made.append(
            {
                "chat": {"messages": [user, assistant] * generator.randint(1, 3)},
                "pair": {"prompt": question, "completion": f" {answer}"},
                "chat pair": {"prompt": [user], "completion": [assistant]},
                "text": {"text": f"{question} {answer}"},
                "tokens": {"input_ids": (ids := list(question.encode())), "labels": [-100, *ids[1:]]},
            }[kind]
        )
    return Dataset.from_list(made)


def config(folder: Path | str, **changes: Any) -> Any:
    """A small complete SFTConfig in fp32."""
    from trl import SFTConfig

    usual: Given = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "max_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return SFTConfig(str(folder), **{**usual, **changes})


def lora(**given: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **given}, task_type="CAUSAL_LM"
    )


def quantized(bits: int) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**{f"load_in_{bits}bit": True})


def dora() -> Any:
    made = lora()
    made.use_dora = True
    return made


def dropped() -> Any:
    made = lora()
    made.lora_dropout = 0.1
    return made


def virtual(name: str) -> Any:
    """A configuration of peft that puts four learned tokens before each row."""
    return getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=4)


def prompt_tuned(size: int) -> Any:
    return peft.get_peft_model(llama(size), virtual("PromptTuningConfig"))


def adapted(size: int) -> Any:
    """A model that has an adapter already."""
    from peft import get_peft_model

    return get_peft_model(llama(size), lora())


def padded(rows: list[Any]) -> Given:
    """A collator as users write it."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    masks = [torch.ones_like(each) for each in ids]
    return {"input_ids": pad(ids), "labels": pad(labels, padding_value=-100), "attention_mask": pad(masks)}


OWN = (
    *("model", "peft_config", "formatting_func", "eval_dataset", "processing_class", "train_dataset"),
    *("data_collator", "callbacks", "compute_metrics", "quantization_config", "compute_loss_func"),
)
"""Arguments of the trainer. All others are those of SFTConfig."""


def made(kind: Any, folder: Path | str, data: str, **given: Any) -> Any:
    """A trainer of this class: `model` is a path, or a function of the vocabulary's size; adapters are made anew."""
    others = {name: given.pop(name) for name in OWN if name in given}
    tool = copy.deepcopy(others.pop("processing_class", None)) or tokenizer()
    make, adapter = others.pop("model", llama), others.pop("peft_config", None)
    others["train_dataset"] = given_rows if (given_rows := others.get("train_dataset")) is not None else rows(data)
    if given.pop("streamed", False):
        others["train_dataset"] = others["train_dataset"].to_iterable_dataset()
    others["peft_config"] = adapter() if adapter else None
    model = make if isinstance(make, str) else make(len(tool))
    return kind(model, config(folder, **given), processing_class=tool, **others)


def both(folder: Path, data: str, read: Callable[[Any], Any], overrides: type = object, **given: Any) -> Any:
    """What `read` gives of TRL's trainer and of ours after train(), and our trainer. Both get the methods of
    `overrides`.
    """
    import trl

    from accel_train import SFTTrainer

    found = []
    for kind in (trl.SFTTrainer, SFTTrainer):
        own = kind if overrides is object else type("Own", (overrides, kind), {})
        trainer = made(own, folder / kind.__module__, data, **given)
        trainer.train()
        found.append(read(trainer))
    return *found, trainer


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def scores(trainer: Any) -> list[dict[str, float]]:
    """What TRL logs in addition to transformers, line by line."""
    names = ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss")
    lines = ({name: line[name] for name in names if name in line} for line in trainer.state.log_history)
    return [line for line in lines if line]


def same_scores(found: list[dict[str, float]], expected: list[dict[str, float]], rel: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=rel)


SKIPPED: Given = {"dataset_kwargs": {"skip_prepare_dataset": True}}
BEFORE = Dataset.from_list(
    [
        {"input_ids": [*range(3, 8 + i % 5)] * 2, "labels": [*range(3, 8 + i % 5)] * 2, "seq_lengths": [5 + i % 5] * 2}
        for i in range(40)
    ]
)
PACKED: Given = {"packing": True, "max_length": 128, "per_device_train_batch_size": 2}
SETUPS: dict[str, tuple[str, Given]] = {
    "chats": ("chat", {}),
    "assistant only, accumulated": ("chat", {"assistant_only_loss": True, "gradient_accumulation_steps": 3}),
    "completion only": ("pair", {}),
    "completions of chats": ("chat pair", {"completion_only_loss": True}),
    "packed chats": ("chat", PACKED),
    "LoRA": ("chat", {"peft_config": lora}),
    "LoRA, packed, assistant only": ("chat", {"peft_config": lora, "assistant_only_loss": True, **PACKED}),
    "text, split and packed": ("text", {"packing_strategy": "bfd_split", **PACKED, "max_length": 24}),
    "text, cut at the start": ("text", {"max_length": 24, "pad_to_multiple_of": 8, "shuffle_dataset": True}),
    "tokens, padding-free": ("tokens", {"padding_free": True, "max_length": None}),
    "DFT": ("pair", {"loss_type": "dft", "weight_decay": 0.1, "lr_scheduler_type": "cosine"}),
    "experts": ("chat", {"model": mixtral}),
    "streamed": ("chat", {"streamed": True}),
    "streamed, packed, assistant only": ("chat", {"streamed": True, "assistant_only_loss": True, **PACKED}),
    "formatted": ("text", {"formatting_func": lambda row: f"Say: {row['text']}"}),
    "another end token": ("text", {"eos_token": "<|user|>"}),
    "an adapter of the user": ("chat", {"model": adapted}),
    "DoRA": ("chat", {"peft_config": dora}),
    "prompt tuning": ("chat", {"peft_config": partial(virtual, "PromptTuningConfig")}),
    "prefix tuning": ("chat", {"peft_config": partial(virtual, "PrefixTuningConfig"), "gradient_checkpointing": False}),
    "prompt encoder": ("pair", {"peft_config": partial(virtual, "PromptEncoderConfig")}),
    "a collator of the user": ("chat", {"data_collator": padded}),
    "label smoothing": ("chat", {"label_smoothing_factor": 0.1}),
    "label smoothing in bf16": ("chat", {"label_smoothing_factor": 0.1, "bf16": True}),
    "a loss of the user": (
        "chat",
        {
            "compute_loss_func": lambda outputs, labels, num_items_in_batch: (
                torch.nn.functional.cross_entropy(
                    outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
                )
                / num_items_in_batch
            )
        },
    ),
    "compiled": ("chat", {"torch_compile_backend": "aot_eager", "max_length": 32, "pad_to_multiple_of": 32}),
    "padding-free chats": ("chat", {"padding_free": True, "max_length": None}),
    "packed before": ("", {"train_dataset": BEFORE, "padding_free": True, "max_length": None, **SKIPPED}),
    "rows cut at the end": ("chat", {"max_length": 20, "truncation_mode": "keep_end"}),
}
"""Set-ups that both trainers run."""
WRAPPED: Given = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
SPREAD: dict[str, tuple[str, Given]] = {
    "two processes": ("chat", {"assistant_only_loss": True, "gradient_accumulation_steps": 2}),
    "two processes, LoRA, packed": ("chat", {"peft_config": lora, "dataloader_drop_last": True, **PACKED}),
    "FSDP2, LoRA, packed": ("chat", {"peft_config": lora, "dataloader_drop_last": True, **WRAPPED, **PACKED}),
    "FSDP2": ("chat", WRAPPED),
}
"""Set-ups of two processes."""
_SAVED: Given = {"save_strategy": "steps", "save_steps": 3, "assistant_only_loss": True}
RESUMED: dict[str, tuple[str, Given]] = {
    "padded, accumulated": ("chat", {"gradient_accumulation_steps": 2, **_SAVED}),
    "packed, LoRA with dropout, noise": (
        "chat",
        {"peft_config": dropped, "neftune_noise_alpha": 5, **PACKED, **_SAVED},
    ),
    "streamed, packed": ("chat", {"streamed": True, **PACKED, **_SAVED}),
}
"""Set-ups of runs that are killed and resumed."""
