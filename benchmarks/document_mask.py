"""What it costs to keep packed documents apart in attention: under a dense mask, and each document by itself.

    python -m benchmarks.document_mask --save

A step of a small GPT-2 (forward, loss and backward) on one row of 8 documents of one length, in fp32, in one fresh
process on one thread. Memory is the peak of what torch allocates beyond weights and their gradients, by its profiler.
Time is CPU time; rounds alternate between the two, and the table gives the median (least to most).
"""

import argparse
import statistics
import time
from functools import partial
from typing import Any

from benchmarks.common import (
    arguments_of,
    flags_of,
    markdown_table,
    median_and_range,
    print_result,
    run_child,
    show,
)
from benchmarks.loss import with_peak

LENGTHS = (1024, 4096)
VARIANTS = {"dense mask": "sdpa", "per document": "auto"}
"""The values of `model.attn_implementation`."""
BAR_GROWTH = 1.1
"""Of the peak per token of the longest row to that of the shortest."""
HEADERS = ("documents", "tokens", "peak MiB", "of dense", "bytes a token", "bar of growth", "CPU ms", "time of dense")


def measure(documents: int, layers: int, width: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return peak bytes, CPU seconds of each round, and the loss, by variant and length."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    from accel_train.data.text.tokens import collate_windows
    from accel_train.model.kernels.attention import choose_attention
    from accel_train.tasks.causal_lm.task import CausalLM

    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for length in LENGTHS:
        rows = np.random.default_rng(0).integers(1, 256, (1, length + 1))
        rows[:, :: length // documents] = 0
        batch = collate_windows(rows, separator_id=0, mask_documents=True)
        sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 32, "n_positions": length, "vocab_size": 256}
        models = {}
        for name, requested in VARIANTS.items():
            torch.manual_seed(0)
            config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            attention = choose_attention(requested, GPT2LMHeadModel, config, length).value
            models[name] = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()

        def step(model: Any, batch: dict[str, Any] = batch) -> float:
            loss = CausalLM().loss_sum(model, batch)
            loss.backward()
            return float(loss)

        for name, model in models.items():
            step(model)  # makes the gradients
            loss, peak = with_peak(partial(step, model))
            key = f"{name}, {length}"
            found[key] = {"tokens": length, "loss": loss, "peak_bytes": peak, "cpu_seconds": []}
        for _ in range(rounds):
            for name, model in models.items():
                began = time.process_time()
                step(model)
                found[f"{name}, {length}"]["cpu_seconds"].append(time.process_time() - began)
    return found


def rows_of(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table; a ratio of times compares two steps of one round."""
    rows = []
    for length in LENGTHS:
        for name in VARIANTS:
            each, dense = found[f"{name}, {length}"], found[f"dense mask, {length}"]
            first = found[f"{name}, {LENGTHS[0]}"]
            per_token = each["peak_bytes"] / length
            growth, bar = per_token / (first["peak_bytes"] / LENGTHS[0]), "-"
            if name != "dense mask" and length != LENGTHS[0]:
                bar = f"<= {BAR_GROWTH} x: {growth:.2f} {'met' if growth <= BAR_GROWTH else 'MISSED'}"
            pairs = zip(each["cpu_seconds"], dense["cpu_seconds"], strict=True)
            ratios = [ours / theirs for ours, theirs in pairs]
            times = [1e3 * seconds for seconds in each["cpu_seconds"]]
            row = [name, f"{length:,}", f"{each['peak_bytes'] / 2**20:,.1f}"]
            row += [f"{each['peak_bytes'] / dense['peak_bytes']:.1%}", f"{per_token:,.0f}", bar]
            rows.append([*row, median_and_range(times, ".0f"), f"{statistics.median(ratios):.2f}"])
    return rows


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("documents", "layers", "width", "rounds")}
    if arguments.measure:
        print_result(measure(**sizes))
        return
    child = run_child("benchmarks.document_mask", ["--measure", *flags_of(sizes)], timeout_seconds=1800)
    shape = f"{arguments.documents} documents in a row, GPT-2 with {arguments.layers} layers, {arguments.width} wide"
    lines = [
        f"## Documents kept apart: {shape}; fp32, one thread, {arguments.rounds} round(s)",
        "",
        markdown_table(HEADERS, rows_of(child.result), text=("documents", "bar of growth")),
        "",
        f"Other processes used {child.others_cores:.2f} cores meanwhile.",
    ]
    record = {"sizes": sizes, "figures": child.result, "others_cores": round(child.others_cores, 2)}
    show(lines, record, save=arguments.save, name="document_mask")


if __name__ == "__main__":
    main()
