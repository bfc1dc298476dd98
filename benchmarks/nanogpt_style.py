"""The minimal trainer that people compare with: GPT-2 in plain PyTorch and a loop of one screen, after nanoGPT.

    python -m benchmarks.nanogpt_style --tokens tokens.bin --steps 100 --compile

It has no guard, no checkpoint, no resume and no logging to files: the reference for how fast a step can be.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT-2."""

    vocab_size: int
    block_size: int
    """Tokens per sample."""
    num_layers: int
    num_heads: int
    width: int
    exact_gelu: bool = False
    """The GELU by erf, as nanoGPT has it; else GPT-2's by tanh."""


class Attention(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = (batch, time, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.approximate = "none" if shape.exact_gelu else "tanh"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate=self.approximate))


class GPT(nn.Module):
    """GPT-2 with tied embeddings, biases as in the original, and no dropout."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.block_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith(("projection.weight", "down.weight")):  # what is added to the residual stream
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.num_layers))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, 0-dim; tokens and targets are (B, T) int64."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def fused_adamw(model: nn.Module, *, learning_rate: float) -> torch.optim.AdamW:
    """AdamW as GPT-2 is trained: matrices decay, vectors do not."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def cosine_multiplier(step: int, *, num_steps: int, warmup_steps: int) -> float:
    """Linear from 0 over the warm-up, then a cosine to 0; `step` counts from 0."""
    if step < warmup_steps:
        return step / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, num_steps - warmup_steps)))


def random_batch(tokens: np.ndarray, batch_size: int, block_size: int, device: torch.device) -> list[torch.Tensor]:
    """Inputs and targets (B, T) int64 at random offsets; on CUDA the copy overlaps with the step before."""
    starts = torch.randint(len(tokens) - block_size, (batch_size,)).tolist()
    rows = torch.stack([torch.from_numpy(tokens[i : i + block_size + 1].astype(np.int64)) for i in starts])
    pair = [rows[:, :-1].contiguous(), rows[:, 1:].contiguous()]
    if device.type == "cuda":
        return [part.pin_memory().to(device, non_blocking=True) for part in pair]
    return pair


def train(
    shape: GPTShape,
    tokens_path: Path,
    *,
    batch_size: int,
    num_steps: int,
    device: torch.device,
    bf16: bool,
    compile: bool,
    seed: int = 0,
    learning_rate: float = 6e-4,
    log_every_steps: int = 50,
    on_read: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Train and return the model; `on_read` is called just before each batch is read."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high" if bf16 else "highest")
    tokens = np.memmap(tokens_path, dtype=np.uint16, mode="r")
    model: nn.Module = GPT(shape).to(device)
    parameters = list(model.parameters())
    optimizer = fused_adamw(model, learning_rate=learning_rate)
    step_model = torch.compile(model) if compile else model
    autocast: AbstractContextManager[None] = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
    on_read()
    batch = random_batch(tokens, batch_size, shape.block_size, device)
    for step in range(num_steps):
        multiplier = cosine_multiplier(step, num_steps=num_steps, warmup_steps=max(1, num_steps // 100))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * multiplier
        with autocast:
            loss = step_model(*batch)
        on_read()
        batch = random_batch(tokens, batch_size, shape.block_size, device)  # read while the device computes
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % log_every_steps == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}  learning rate {learning_rate * multiplier:.2e}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=Path, required=True, help="file of uint16 tokens")
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    train(
        GPTShape(arguments.vocab_size, arguments.block_size, arguments.layers, arguments.heads, arguments.width),
        arguments.tokens,
        batch_size=arguments.batch_size,
        num_steps=arguments.steps,
        device=torch.device("cuda" if cuda else "cpu"),
        bf16=cuda,
        compile=arguments.compile,
    )


if __name__ == "__main__":
    main()
