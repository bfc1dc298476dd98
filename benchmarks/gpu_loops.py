"""The training loops that gpu.py compares, the models they train, and the settings that only accel_train has."""

import shutil
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
    llama: tuple[int, int] | None = None
    """Width of the MLP and number of key-value heads of a Llama; None: a GPT-2."""

    @property
    def num_parameters(self) -> int:
        """Without position embeddings and without padding tokens, which are no useful work."""
        s = self.shape
        if self.llama is None:
            return self.vocab_size * s.width + s.num_layers * (12 * s.width**2 + 13 * s.width) + 2 * s.width
        inner, kv_heads = self.llama
        attention = 2 * s.width**2 + 2 * s.width * (s.width // s.num_heads) * kv_heads
        return 2 * self.vocab_size * s.width + s.num_layers * (attention + 3 * s.width * inner + 2 * s.width) + s.width

    @property
    def flops_per_token(self) -> int:
        """An embedding that is not tied to the output layer is a table to look up, no product."""
        s = self.shape
        looked_up = 0 if self.llama is None else self.vocab_size * s.width
        return model_flops_per_token(self.num_parameters - looked_up, s.num_layers, s.width, s.block_size)


MODELS = {
    "124M": Model(GPTShape(PADDED_VOCAB, 1024, 12, 12, 768), 32, GPT2_VOCAB),
    "350M": Model(GPTShape(PADDED_VOCAB, 1024, 24, 16, 1024), 16, GPT2_VOCAB),
    "1.5B": Model(GPTShape(PADDED_VOCAB, 1024, 48, 25, 1600), 8, GPT2_VOCAB),
    "llama-1.4B": Model(GPTShape(32_000, 2048, 24, 16, 2048), 8, 32_000, llama=(5632, 16)),
    "llama-8B": Model(GPTShape(128_256, 4096, 32, 32, 4096), 2, 128_256, llama=(14_336, 8)),
    "llama-long": Model(GPTShape(32_000, 8192, 12, 16, 1024), 4, 32_000, llama=(2816, 16)),
}
CHECKS = {
    "124M": Model(GPTShape(128, 16, 2, 2, 16), 2, 100),
    "llama-1.4B": Model(GPTShape(112, 16, 2, 2, 32), 2, 112, llama=(48, 1)),
}
CHECKS |= {"350M": CHECKS["124M"], "1.5B": CHECKS["124M"]}
CHECKS |= {"llama-8B": CHECKS["llama-1.4B"], "llama-long": CHECKS["llama-1.4B"]}
"""In their place for --device cpu, which tests this program and measures nothing."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "whole logits": {"loss": {"chunked": False}},
    "whole model": {"precision": {"compile": "model"}},
    "whole model and logits": {"precision": {"compile": "model"}, "loss": {"chunked": False}},
    "CUDA graphs": {
        "precision": {"compile": "model", "compile_mode": "reduce-overhead"},
        "loss": {"chunked": False},
    },
    "Muon": {"optimizer": {"name": "muon"}},
    "Muon, fp32 products": {"optimizer": {"name": "muon", "muon_dtype": "fp32"}},
    "float8": {"precision": {"mixed_precision": "fp8"}},
    "LoRA": {"model": {"lora": {"rank": 16}}},
    "LoRA, 4-bit base": {"model": {"lora": {"rank": 16}, "frozen_dtype": "nf4"}},
    "document masks": {"data": {"mask_documents": True}},
    "dense document masks": {"data": {"mask_documents": True}, "model": {"attn_implementation": "sdpa"}},
    "checkpoints": {"checkpoint": {"every_steps": 40, "keep": 1}},
}
"""What accel_train trains beside the plain run of each loop, and what is set for it."""
OTHER_WORK = {
    "Muon",
    "Muon, fp32 products",
    "float8",
    "LoRA",
    "LoRA, 4-bit base",
    "document masks",
    "dense document masks",
}
"""Settings that do not multiply all weights in bf16, so that their rate is no MFU."""


@dataclass(frozen=True)
class Job:
    """One row: a loop that trains a model."""

    model: str
    compile: bool
    variant: str
    setting: str
    device: str
    tokens: Path
    tokenizer: Path
    folder: Path
    base: Path
    """Where a pretrained base of this model is, or is to be made."""
    phases: Phases

    @property
    def setup(self) -> Model:
        """The model, on a CPU a tiny one."""
        return (MODELS if self.device == "cuda" else CHECKS)[self.model]


def model_config(setup: Model) -> dict[str, Any]:
    """Return the fields of a transformers configuration of this shape."""
    shape = setup.shape
    layers, heads, width = shape.num_layers, shape.num_heads, shape.width
    if setup.llama is None:
        fields = gpt2_fields(vocab=shape.vocab_size, block=shape.block_size, layers=layers, heads=heads, width=width)
        return {"model_type": "gpt2", **fields}
    inner, kv_heads = setup.llama
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"hidden_size": width, "intermediate_size": inner, "vocab_size": shape.vocab_size}
    return {"model_type": "llama", **sizes, "max_position_embeddings": shape.block_size, "use_cache": False}


def write_base(job: Job) -> None:
    """Write a model with random weights in bf16, as a user has it from a hub."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = model_config(job.setup)
    with torch.device(job.device):
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # A row that is ended here leaves none to the next one.
    half = job.base.with_name(f"{job.base.name}-half")
    shutil.rmtree(half, ignore_errors=True)
    model.save_pretrained(half)
    half.rename(job.base)
    del model
    if job.device == "cuda":
        torch.cuda.empty_cache()


def train_accel_train(job: Job) -> None:
    from accel_train import Recipe, train

    train(Recipe.model_validate(accel_train_recipe(job)))


def accel_train_recipe(job: Job) -> dict[str, Any]:
    """What a user would write; the rest is the package's own choice."""
    model = job.setup
    recipe: dict[str, Any] = {
        "output_dir": str(job.folder / "run"),
        "model": {"config": model_config(model)},
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
    for section, values in SETTINGS[job.setting].items():
        recipe[section] = {**recipe.get(section, {}), **values}
    if "lora" in recipe["model"]:
        del recipe["model"]["config"]
        recipe["model"]["pretrained"] = str(job.base)
    if job.device == "cpu":  # where float8 is refused, and a run has a few steps
        recipe["precision"]["mixed_precision"] = "bf16"
        recipe["checkpoint"]["every_steps"] = min(recipe["checkpoint"]["every_steps"], 3)
    return recipe


def train_nanogpt(job: Job) -> None:
    from benchmarks.nanogpt_style import train

    model = job.setup
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

    setup, cuda = job.setup, job.device == "cuda"
    length, fields = setup.shape.block_size, model_config(setup)
    del fields["model_type"]
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
    model = GPT2LMHeadModel(GPT2Config(**fields, attn_implementation="sdpa"))
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
