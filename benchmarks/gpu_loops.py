"""The training loops that gpu.py compares, and the models they train."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_train.observe.throughput import model_flops_per_token
from benchmarks.common import gpt2_fields
from benchmarks.gpu_watch import Phases
from benchmarks.nanogpt_style import GPTShape

GPT2_VOCAB, PADDED_VOCAB = 50257, 50304
LEARNING_RATE = 6e-4
LOG_EVERY_STEPS = 50


@dataclass(frozen=True)
class Model:
    shape: GPTShape
    batch_size: int
    vocab_size: int
    """Tokens of the tokenizer; the shape's are padded to a multiple of 64."""

    @property
    def flops_per_token(self) -> int:
        """Padding tokens are no useful work, so they do not count."""
        s = self.shape
        block_parameters = 12 * s.width**2 + 13 * s.width
        parameters = self.vocab_size * s.width + s.num_layers * block_parameters + 2 * s.width
        return model_flops_per_token(parameters, s.num_layers, s.width, s.block_size)


MODELS = {
    "124M": Model(GPTShape(PADDED_VOCAB, 1024, 12, 12, 768), 32, GPT2_VOCAB),
    "350M": Model(GPTShape(PADDED_VOCAB, 1024, 24, 16, 1024), 16, GPT2_VOCAB),
    "check": Model(GPTShape(128, 16, 2, 2, 16), 2, 100),  # for --device cpu: tests this file, measures nothing
}


@dataclass(frozen=True)
class Job:
    model: str
    compile: bool
    variant: str
    device: str
    tokens: Path
    tokenizer: Path
    folder: Path
    phases: Phases


def gpt2_config(shape: GPTShape) -> dict[str, Any]:
    """Return the fields of a GPT-2 of this shape."""
    layers, heads, width = shape.num_layers, shape.num_heads, shape.width
    return gpt2_fields(vocab=shape.vocab_size, block=shape.block_size, layers=layers, heads=heads, width=width)


def train_accel_train(job: Job) -> None:
    from accel_train import Recipe, train

    train(Recipe.model_validate(accel_train_recipe(job)))


def accel_train_recipe(job: Job) -> dict[str, Any]:
    """What a user would write; the rest is the package's own choice."""
    model = MODELS[job.model]
    return {
        "output_dir": str(job.folder / "run"),
        "model": {"config": {"model_type": "gpt2", **gpt2_config(model.shape)}},
        "tokenizer": str(job.tokenizer),
        "data": {
            "train": str(job.tokens),
            "eval_fraction": 0.0,
            "sequence_length": model.shape.block_size,
            "cache_dir": str(job.folder / "cache"),
        },
        "batch": {"global_batch_size": model.batch_size, "per_device_batch_size": model.batch_size},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "schedule": {"max_steps": job.phases.total + 10},
        "precision": {"mixed_precision": "bf16", "compile": job.compile},
        "checkpoint": {"every_steps": 0},
        "evaluate": {"every_steps": 0},
        "log": {"every_steps": LOG_EVERY_STEPS, "progress": False},
    }


def train_nanogpt(job: Job) -> None:
    from benchmarks.nanogpt_style import train

    model = MODELS[job.model]
    train(
        model.shape,
        job.tokens,
        batch_size=model.batch_size,
        num_steps=job.phases.total + 10,
        device=torch.device(job.device),
        bf16=True,
        compile=job.compile,
        learning_rate=LEARNING_RATE,
        log_every_steps=LOG_EVERY_STEPS,
    )


def train_hf_trainer(job: Job) -> None:
    """With the flags that make it fast; its attention is the library's own, as every user of it gets."""
    import numpy as np
    from torch.utils.data import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

    setup, cuda = MODELS[job.model], job.device == "cuda"
    length = setup.shape.block_size
    tokens = np.asarray(np.memmap(job.tokens, dtype=np.uint16, mode="r"))
    rows = tokens[: len(tokens) // length * length].reshape(-1, length)

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return len(rows)

        def __getitems__(self, indices: Sequence[int]) -> Any:
            return rows[indices].astype(np.int64)

    def collate(batch: Any) -> dict[str, Any]:
        ids = torch.from_numpy(batch)
        return {"input_ids": ids, "labels": ids}

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT2LMHeadModel(GPT2Config(**gpt2_config(setup.shape), attn_implementation="sdpa"))
    model.loss_type = "ForCausalLM"  # left out, the loss warns in the middle of the compiled graph and breaks it
    workers: dict[str, Any] = {
        "dataloader_num_workers": 4,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 4,
        "accelerator_config": {"non_blocking": True},
    }
    arguments = TrainingArguments(
        output_dir=str(job.folder / "run"),
        per_device_train_batch_size=setup.batch_size,
        max_steps=job.phases.total + 10,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        optim="adamw_torch_fused",
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=True,
        torch_compile=job.compile,
        logging_steps=LOG_EVERY_STEPS,
        logging_nan_inf_filter=False,
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        **(workers if cuda else {}),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


TRAINERS: Mapping[str, Callable[[Job], None]] = {
    "accel_train": train_accel_train,
    "nanogpt": train_nanogpt,
    "hf_trainer": train_hf_trainer,
}
