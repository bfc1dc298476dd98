"""The loops that overhead.py compares, each training the same small GPT-2 on the same tokens on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import FetchClock, gpt2_fields

VARIANTS = ("raw", "accelerate", "hf_trainer", "accel_train")
LOG_EVERY_STEPS = 50
LEARNING_RATE = 1e-3
WARMUP_LR_STEPS = 10
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Preset:
    """A model and batch, how long to run it, and the bar that accel_train is held to."""

    layers: int
    heads: int
    width: int
    block: int
    batch: int
    vocab: int
    steps: int
    warmup_steps: int
    bar_ratio: float | None = None
    """CPU time per step over raw's."""
    bar_extra_us: float | None = None
    """CPU time per step above raw's."""


PRESETS = {
    "tiny": Preset(4, 4, 128, 64, 12, 65, steps=160, warmup_steps=40, bar_ratio=1.0),
    "micro": Preset(4, 2, 16, 8, 2, 65, steps=1500, warmup_steps=300, bar_extra_us=60.0),
}


@dataclass(frozen=True)
class Run:
    """Everything a variant is told."""

    preset: Preset
    tokens: Path
    tokenizer: Path
    folder: Path
    """Its own, for whatever it writes."""
    steps: int
    seed: int
    attention: str
    in_order: bool
    """Read the windows in the order of the file, so that all variants can be compared weight by weight."""


def gpt2_config(preset: Preset) -> dict[str, Any]:
    """Return the fields of the preset's GPT-2."""
    sizes = {name: getattr(preset, name) for name in ("vocab", "block", "layers", "heads", "width")}
    return gpt2_fields(**sizes)


# --- the variants: each trains `run.steps` steps and returns its weights -------------------------------------------


def train_raw(run: Run, clock: FetchClock) -> list[Any]:
    """The reference: nothing that a step does not need."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from benchmarks.nanogpt_style import cosine_multiplier, fused_adamw

    model = _gpt2(run)
    parameters = list(model.parameters())
    optimizer = fused_adamw(model, learning_rate=LEARNING_RATE)
    windows = _windows(run)
    order = np.arange(len(windows)) if run.in_order else np.random.default_rng(run.seed).permutation(len(windows))
    size, history = run.preset.batch, []
    for step in range(run.steps):
        learning_rate = LEARNING_RATE * cosine_multiplier(step, num_steps=run.steps, warmup_steps=WARMUP_LR_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        clock.stamp()
        rows = torch.from_numpy(windows[order[step * size : (step + 1) * size]].astype(np.int64))
        logits = model(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % LOG_EVERY_STEPS == 0:
            history.append((step + 1, loss.item(), grad_norm.item(), learning_rate))
    return parameters


def train_raw_gc_off(run: Run, clock: FetchClock) -> list[Any]:
    """The reference, when its expert also knows that collecting garbage costs a loop some percent
    of its Python time.
    """
    import gc

    gc.collect()
    gc.disable()
    return train_raw(run, clock)


def train_accelerate(run: Run, clock: FetchClock) -> list[Any]:
    """Accelerate as its documentation shows it."""
    import torch
    import torch.nn.functional as F
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import get_cosine_schedule_with_warmup

    from benchmarks.nanogpt_style import fused_adamw

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    model = _gpt2(run)
    optimizer: Any = fused_adamw(model, learning_rate=LEARNING_RATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_LR_STEPS, run.steps)
    loader: Any = DataLoader(
        _stamped_dataset(run, clock),
        batch_size=run.preset.batch,
        shuffle=not run.in_order,
        collate_fn=_collate,
        generator=torch.Generator().manual_seed(run.seed),
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    history: list[tuple[int, float, float, float]] = []
    for step, batch in zip(range(run.steps), loader, strict=False):
        with accelerator.accumulate(model):
            logits = model(input_ids=batch["input_ids"]).logits
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["shift_labels"].view(-1))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % LOG_EVERY_STEPS == 0:
            history.append((step + 1, loss.item(), grad_norm.item(), schedule.get_last_lr()[0]))
    return list(model.parameters())


def train_hf_trainer(run: Run, clock: FetchClock) -> list[Any]:
    """transformers.Trainer, with everything off that costs time and can be turned off."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model = _gpt2(run)
    arguments = TrainingArguments(
        output_dir=str(run.folder),
        per_device_train_batch_size=run.preset.batch,
        max_steps=run.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP_LR_STEPS,
        optim="adamw_torch_fused",
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=LOG_EVERY_STEPS,
        logging_nan_inf_filter=False,
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        seed=run.seed,
        use_cpu=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential" if run.in_order else "random",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_stamped_dataset(run, clock), data_collator=_collate)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return list(model.parameters())


def train_accel_train(run: Run, clock: FetchClock) -> list[Any]:
    """The package as a user calls it."""
    from safetensors.torch import load_file

    from accel_train import Recipe, train
    from accel_train.data.text.tokens import WindowDataset

    read = WindowDataset.__getitems__

    def stamped(self: WindowDataset, indices: Sequence[int]) -> Any:
        clock.stamp()
        return read(self, indices)

    WindowDataset.__getitems__ = stamped  # type: ignore[method-assign]
    train(Recipe(**accel_train_recipe(run)))
    weights: dict[str, Any] = {}
    for file in sorted((run.folder / "model").glob("*.safetensors")):
        weights.update(load_file(file))
    return list(weights.values())


def accel_train_recipe(run: Run) -> dict[str, Any]:
    """The same training as the other variants: the guard and metrics.jsonl on, as they are by default."""
    return {
        "output_dir": str(run.folder),
        "seed": run.seed,
        "model": {
            "config": {"model_type": "gpt2", **gpt2_config(run.preset)},
            "pad_vocab_to_multiple_of": 0,
            "fused_kernels": False,  # the same model code in all loops; `benchmarks.model_path` measures the model
        },
        "tokenizer": str(run.tokenizer),
        "data": {
            "train": str(run.tokens),
            "eval_fraction": 0.0,
            "sequence_length": run.preset.block,
            "shuffle": not run.in_order,
            "num_workers": 0,
            "cache_dir": str(run.folder / "cache"),
        },
        "batch": {"global_batch_size": run.preset.batch, "per_device_batch_size": run.preset.batch},
        "optimizer": {"learning_rate": LEARNING_RATE, "weight_decay": 0.1, "max_grad_norm": MAX_GRAD_NORM},
        "schedule": {"type": "warmup_cosine", "max_steps": run.steps, "warmup_steps": WARMUP_LR_STEPS},
        "precision": {"mixed_precision": "no"},
        "checkpoint": {"every_steps": 0},
        "evaluate": {"every_steps": 0},
        "log": {"every_steps": LOG_EVERY_STEPS, "progress": False},
    }


def train_nanogpt(run: Run, clock: FetchClock) -> list[Any]:
    """nanoGPT's own model and loop."""
    import torch

    from benchmarks.nanogpt_style import GPTShape, train

    preset = run.preset
    model = train(
        GPTShape(preset.vocab, preset.block, preset.layers, preset.heads, preset.width),
        run.tokens,
        batch_size=preset.batch,
        num_steps=run.steps,
        device=torch.device("cpu"),
        bf16=False,
        compile=False,
        seed=run.seed,
        learning_rate=LEARNING_RATE,
        log_every_steps=LOG_EVERY_STEPS,
        on_read=clock.stamp,
    )
    return list(model.parameters())


TRAINERS: Mapping[str, Callable[[Run, FetchClock], list[Any]]] = {
    "raw": train_raw,
    "raw_gc_off": train_raw_gc_off,
    "accelerate": train_accelerate,
    "hf_trainer": train_hf_trainer,
    "accel_train": train_accel_train,
    "nanogpt": train_nanogpt,
}


# --- what the variants share -------------------------------------------------------------------------------------


def _gpt2(run: Run) -> Any:
    import torch
    import torch.nn.functional as F
    from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

    def causal(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=kwargs.get("scaling"))
        return mixed.transpose(1, 2), None

    # transformers' own `sdpa` reads a tensor on the host in every forward to look for packed documents. An expert's
    # loop
    # does not pay that, and neither should Accelerate or Trainer be blamed for it: the same attention for all.
    AttentionInterface.register("benchmark_causal", causal)
    torch.manual_seed(run.seed)
    name = "benchmark_causal" if run.attention == "causal" else "sdpa"
    return GPT2LMHeadModel(GPT2Config(**gpt2_config(run.preset), attn_implementation=name)).train()


def _windows(run: Run) -> Any:
    """(windows, T + 1) uint16, a view of the mapped file."""
    import numpy as np

    tokens = np.asarray(np.memmap(run.tokens, dtype=np.uint16, mode="r"))
    return np.lib.stride_tricks.sliding_window_view(tokens, run.preset.block + 1)[:: run.preset.block]


def _stamped_dataset(run: Run, clock: FetchClock) -> Any:
    import numpy as np
    from torch.utils.data import Dataset

    windows = _windows(run)

    class Windows(Dataset[Any]):
        def __len__(self) -> int:
            return len(windows)

        def __getitems__(self, indices: Sequence[int]) -> Any:
            clock.stamp()
            return windows[indices].astype(np.int64)

    return Windows()


def _collate(rows: Any) -> dict[str, Any]:
    """`shift_labels` are targets that the model does not shift again, so that all T positions count
    in every variant.
    """
    import torch

    tokens = torch.from_numpy(rows)
    targets = tokens[:, 1:].contiguous()
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": targets, "shift_labels": targets}
