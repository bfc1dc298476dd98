"""What the tests of SFTTrainer share: a tokenizer, tiny models, chats, and both trainers on the same set-up."""

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: dict[str, Any] = {
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

    usual: dict[str, Any] = {
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


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def made(kind: Any, folder: Path | str, data: str, **given: Any) -> Any:
    """A trainer of this class: `model` is a function of the vocabulary's size; other values are SFTConfig's."""
    names = ("model", "peft_config", "formatting_func", "eval_dataset", "processing_class", "train_dataset")
    others = {name: given.pop(name) for name in names if name in given}
    tool = others.pop("processing_class", None) or tokenizer()
    make, adapter = others.pop("model", llama), others.pop("peft_config", None)
    others.setdefault("train_dataset", rows(data) if data else None)
    others["peft_config"] = adapter() if adapter else None
    model = make if isinstance(make, str) else make(len(tool))
    return kind(model, config(folder, **given), processing_class=tool, **others)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


PACKED: dict[str, Any] = {"packing": True, "max_length": 128, "per_device_train_batch_size": 2}
SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
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
}
"""Set-ups that both trainers run."""
SPREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "two processes": ("chat", {"assistant_only_loss": True, "gradient_accumulation_steps": 2}),
    "two processes, LoRA, packed": ("chat", {"peft_config": lora, "dataloader_drop_last": True, **PACKED}),
    "FSDP2": ("chat", {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}),
}
"""Set-ups of two processes."""
