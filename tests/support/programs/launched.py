"""Train with fit and both Trainers, and write the types of the outputs to found.json of the folder given."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import accel_train

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def watched(layer: nn.Module) -> set[str]:
    types: set[str] = set()
    layer.register_forward_hook(lambda module, inputs, output: types.add(str(output.dtype)))
    return types


def main(folder: Path) -> None:
    model = nn.Linear(4, 2)
    found = {"fit": watched(model)}
    rows: Any = [(torch.ones(4) * number, number % 2) for number in range(8)]
    loss = nn.functional.cross_entropy
    accel_train.fit(
        model, rows, loss=lambda model, batch: loss(model(batch[0]), batch[1]), output_dir=folder / "fit", max_steps=2
    )
    texts = [{"input_ids": [5, 6, 7], "labels": number % 2} for number in range(8)]
    for trainer in (transformers.Trainer, accel_train.Trainer):
        bert = BertForSequenceClassification(BertConfig(vocab_size=32, **SIZES))
        found[trainer.__module__] = watched(bert.classifier)
        arguments = TrainingArguments(str(folder / trainer.__module__), max_steps=2, use_cpu=True, report_to="none")
        trainer(bert, arguments, train_dataset=texts).train()  # type: ignore[arg-type]
    (folder / "found.json").write_text(json.dumps({name: sorted(types) for name, types in found.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
