"""The loop of accel_train and a hand-written one in turn, a few steps each, in one process: what the loop itself costs.

    python -m benchmarks.paired --preset micro --save

`benchmarks.overhead` compares whole processes, as a user meets them; two processes of the same program differ by
several per cent here, through memory layout alone. In one process both loops share the layout, the libraries and the
moment, so a few microseconds can be told apart. The hand-written loop has the same model code, attention, optimizer and
first weights.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loops import PRESETS, Preset
from benchmarks.turns import BLOCK_STEPS, Pairs, measure_preset, small_run, train_on


def hand_written_step(config: Any, tokens: NDArray[np.uint16], preset: Preset) -> Callable[[int], None]:
    """A training step as an expert writes it: memory-mapped windows, loss, clip, fused AdamW, cosine by hand."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    generator = np.random.default_rng(0)

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * number / 100_000))
        starts = generator.integers(0, len(tokens) - preset.block - 1, preset.batch)
        windows = torch.from_numpy(np.stack([tokens[i : i + preset.block + 1] for i in starts]).astype(np.int64))
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(name: str, blocks: int, folder: Path) -> Pairs:
    """CPU seconds a step of (accel_train, the hand-written loop), a pair for each turn; logging is
    on, every 50 steps.
    """
    preset, block_steps = PRESETS[name], BLOCK_STEPS[name]
    num_steps = block_steps * blocks + 1
    run = small_run(name, num_steps, folder, log_every_steps=50)
    by_hand = hand_written_step(
        run.strategy.inner.model.config, np.memmap(folder / "tokens.bin", np.uint16, "r"), preset
    )
    pairs: list[tuple[float, float]] = []

    def in_turns(batches: Iterator[Any]) -> Iterator[Any]:
        began = None
        for number, micro_batches in enumerate(batches):
            if number % block_steps == 0:
                ours = None if began is None else (time.process_time() - began) / block_steps
                since = time.process_time()
                for extra in range(block_steps):
                    by_hand(number + extra)
                theirs = (time.process_time() - since) / block_steps
                if ours is not None:
                    pairs.append((ours, theirs))
                began = time.process_time()
            if number == num_steps - 1:
                return  # the last step would save and evaluate
            yield micro_batches

    train_on(run, in_turns)
    return pairs[len(pairs) // 10 :]


def summary(pairs: Pairs) -> dict[str, str]:
    """Medians, and the quartile of quick turns, which other work on the machine disturbs least."""
    ours, theirs = [pair[0] * 1e6 for pair in pairs], [pair[1] * 1e6 for pair in pairs]
    quick = [statistics.quantiles(values, n=4)[0] for values in (ours, theirs)]
    return {
        "hand-written us": f"{statistics.median(theirs):.0f}",
        "accel_train us": f"{statistics.median(ours):.0f}",
        "ratio of medians": f"{statistics.median(ours) / statistics.median(theirs):.4f}",
        "median difference us": f"{statistics.median(a - b for a, b in zip(ours, theirs)):+.0f}",
        "difference of lower quartiles us": f"{quick[0] - quick[1]:+.0f}",
    }


if __name__ == "__main__":
    title = "## One process, in turns: accel_train beside a hand-written PyTorch loop, CPU time a step, 1 thread"
    measure_preset("paired", __doc__, title, {"micro": 250, "tiny": 60}, measure, summary)
