"""A tiny T5 with data and arguments, for the tests of Seq2SeqTrainer."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from tests.support.hf_models import USUAL_ARGUMENTS

Row = dict[str, list[int]]


def seq2seq_model() -> Any:
    """Two layers without dropout, trained a little: its texts are of different tokens and lengths."""
    return deepcopy(_trained())


@cache
def _trained() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = T5Config(vocab_size=24, **sizes)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    model.generation_config.max_length = 12
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = collate(seq2seq_rows(16, seed=4))
    for _ in range(60):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def seq2seq_rows(count: int, seed: int = 1) -> list[Row]:
    """Sources of different lengths, and the reverse of each as its target."""
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randint(2, 24, (3 + number * 5 % 9,), generator=generator).tolist() for number in range(count)]
    return [{"input_ids": [*ids, 1], "labels": [*ids[::-1], 1]} for ids in sources]


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Pad to the longest of a batch, with decoder inputs as transformers' own collator makes them."""

    def padded(name: str, filler: int) -> Tensor:
        width = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])

    ids, labels = padded("input_ids", 0), padded("labels", -100)
    shifted = torch.cat([torch.zeros(len(rows), 1, dtype=torch.long), labels[:, :-1].clamp(min=0)], dim=1)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels, "decoder_input_ids": shifted}


def seq2seq_arguments(folder: Path, **changes: Any) -> Seq2SeqTrainingArguments:
    """Small complete arguments; evaluations generate."""
    return Seq2SeqTrainingArguments(str(folder), **{**USUAL_ARGUMENTS, "predict_with_generate": True, **changes})
