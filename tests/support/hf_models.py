"""What the tests of the Trainer face share: tiny models, data, arguments, and both trainers on them."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from accel_train.core.errors import SettingError
from accel_train.hf import Trainer
from accel_train.hf.argument_table import FIELDS, Rule

Row = Given = dict[str, Any]
"""A sample; and arguments by name."""
CLOCKS = ("_runtime", "_per_second", "_preparation_time")
CLOSE = 1e-5
KINDS = (transformers.Trainer, Trainer)


def bert(kind: Any = BertForSequenceClassification, *, num_labels: int = 3, seed: int = 0, **config: Any) -> Any:
    """Two layers without dropout, so that both trainers compute the same."""
    torch.manual_seed(seed)
    settings: Given = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": num_labels,
    }
    return kind(BertConfig(**settings | config))


def llama(seed: int = 0) -> Any:
    """A causal language model whose loss takes num_items_in_batch."""
    torch.manual_seed(seed)
    sizes: Given = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))


def vit(seed: int = 0) -> Any:
    """A model of images of 3 x 16 x 16, saved under other weight names than its own."""
    torch.manual_seed(seed)
    sizes: Given = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    sizes |= {"intermediate_size": 32, "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes))


def adapted() -> Any:
    """A model with an adapter whose weights are not zero."""
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    model = bert()
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


class Plain(nn.Module):
    """No transformers model: a layer, its mean loss in a tuple, and no `num_items_in_batch`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 3)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = self.layer(features)
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Grows(Plain):
    """A model with a buffer that grows in each forward, which its own load_state_dict makes room for."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("order", torch.zeros(0))

    def forward(self, features: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.training:
            self.order = torch.cat([self.order, torch.tensor([float(len(self.order) + 1)])])
        return super().forward(features, labels)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.order = torch.zeros_like(state_dict["order"])
        return super().load_state_dict(state_dict, strict, assign)


def rows(count: int, *, length: int = 12, seed: int = 1) -> list[Row]:
    """Texts of one length with a class each; which class follows from the text, so it can be learned."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 64, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0]) % 3} for ids in texts]


def plain_rows(count: int, seed: int = 1) -> list[Row]:
    """Rows of `Plain`."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 8, generator=generator)
    return [{"features": feature, "labels": int(feature[0] > 0)} for feature in features]


def worse_rows(count: int) -> list[Row]:
    """Rows of `Plain` whose loss grows while it learns `plain_rows`."""
    return [{**row, "labels": 2} for row in plain_rows(count)]


def token_rows(count: int, seed: int = 1) -> list[Row]:
    """Texts of different lengths with a class for each token, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(1, 64, (4 + number * 5 % 9,), generator=generator)
        labels = ids % 3
        labels[0] = -100
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return made


def pad(samples: list[Row]) -> dict[str, Tensor]:
    """A collator that pads to the longest of the batch."""
    width = max(len(sample["input_ids"]) for sample in samples)
    ids = [sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples]
    labels = [sample["labels"] + [-100] * (width - len(sample["labels"])) for sample in samples]
    mask = [[1] * len(sample["input_ids"]) + [0] * (width - len(sample["input_ids"])) for sample in samples]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


def token_bert() -> Any:
    """A model for `token_rows`."""
    return bert(BertForTokenClassification)


USUAL_ARGUMENTS: Given = {
    "use_cpu": True,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "learning_rate": 1e-3,
    "logging_steps": 2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Small complete arguments."""
    return TrainingArguments(str(folder), **{**USUAL_ARGUMENTS, "num_train_epochs": 2, **changes})


def made(folder: Path, model: Any, data: Any = None, *, kind: Any = Trainer, **given: Any) -> Any:
    """A trainer: `given` are fields of TrainingArguments and parameters of the trainer, mixed."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    args = {name: value for name, value in given.items() if name in names}
    others = {name: value for name, value in given.items() if name not in names}
    return kind(model, arguments(folder, **args), train_dataset=data, **others)


def trained(folder: Path, model: Any, data: Any, resume: Any = None, **given: Any) -> Any:
    """A trainer as `made`, after train()."""
    trainer = made(folder, model, data, **given)
    trainer.train(resume)
    return trainer


def trained_plain(folder: Path, count: int, resume: Any = None, **given: Any) -> Any:
    """A trainer of `Plain` on so many rows, after train()."""
    return trained(folder, Plain(), plain_rows(count), resume, **given)


def every(steps: int, *events: str) -> Given:
    """Arguments for an `eval`, a `save`, or `logging` after so many steps."""
    given: Given = {f"{event}_strategy": "steps" for event in events}
    return given | {f"{event}_steps": steps for event in events}


def both(
    folder: Path,
    make_model: Any = bert,
    kinds: tuple[Any, Any] = KINDS,
    *,
    overrides: type = object,
    act: Any = lambda trainer: trainer.train(),
    args: Given | None = None,
    **setup: Any,
) -> Any:
    """The same trainer twice, transformers' and ours, and what each gives: (theirs, ours, expected, found).

    One after the other, because TrainingArguments take down what an earlier trainer computes on. Arguments are given
    as `args` or among the others, and what each trainer needs anew as `make_NAME=function`. Both trainers get the
    methods of `overrides`.
    """
    trainers, given = [], []
    for kind, name in zip(kinds, ("theirs", "ours"), strict=True):
        chosen = {
            key.removeprefix("make_"): value() if key.startswith("make_") else value for key, value in setup.items()
        }
        data = chosen.pop("train_dataset", None)
        own = kind if overrides is object else type(overrides.__name__, (overrides, kind), {})
        trainers.append(made(folder / name, make_model(), data, kind=own, **(args or {}), **chosen))
        given.append(act(trainers[-1]))
    return *trainers, *given


def refused(act: Callable[[], Any], *settings: str) -> SettingError:
    """The error of an action, which has to be about these settings."""
    with pytest.raises(SettingError) as caught:
        act()
    assert set(settings) <= set(caught.value.settings)
    return caught.value


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' weights."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.cpu().float() - b.cpu().float()).abs().max()) for a, b in pairs)


def history(trainer: Any) -> list[dict[str, float]]:
    """The log without its clocks."""
    return [
        {name: value for name, value in line.items() if not name.endswith(CLOCKS)} for line in trainer.state.log_history
    ]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean()), "count": len(found.label_ids)}


def rates(trainer: Any) -> list[float]:
    """The learning rates of the log."""
    return [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]


def same_log(theirs: Any, ours: Any) -> None:
    assert [sorted(line) for line in history(theirs)] == [sorted(line) for line in history(ours)]
    for one, other in zip(history(theirs), history(ours), strict=True):
        assert other == pytest.approx(one, abs=CLOSE)


def same(theirs: Any, ours: Any) -> None:
    """Both trainers have the same weights and the same log."""
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)


def flat(value: Any) -> list[float]:
    """All numbers of a nested value, in order."""
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in flat(value[name])]
    return [number for item in value for number in flat(item)] if isinstance(value, list) else [float(value)]


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "head_dim": 8,
}


def small_config(model_type: str) -> Any:
    known = AutoConfig.for_model(model_type)
    names = {**getattr(known, "attribute_map", {})}
    fields = {name: value for name, value in SIZES.items() if name in known.to_dict() or name in names}
    return AutoConfig.for_model(model_type, **fields)


def table(fields: Mapping[str, Rule] = FIELDS, kind: str = "TrainingArguments") -> str:
    """Return the table of docs/hf_trainer.md for these fields, with a line per field."""
    lines = [f"| {kind} | here | how, or what to do instead |", "|---|---|---|"]
    for name, rule in fields.items():
        remedy = f"; other values are refused: {rule.remedy}" if rule.remedy else ""
        lines.append(f"| `{name}` | {rule.kind} | {rule.text}{remedy} |")
    return "\n".join(lines)
