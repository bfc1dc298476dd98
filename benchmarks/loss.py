"""What the loss of a language model costs with whole logits and in chunks: memory and time of loss and backward.

    python -m benchmarks.loss --save

From hidden states (tokens, width) and an output layer (vocabulary, width) in fp32 to the loss and both gradients, in
one fresh process on one thread. Memory is the peak of what torch allocates beyond those inputs, gradients included, by
its profiler. Time is CPU time; rounds alternate between the two, and the table gives the median (least to most).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from benchmarks.common import (
    arguments_of,
    flags_of,
    markdown_table,
    median_and_range,
    print_result,
    run_child,
    show,
)

BAR_PEAK, BAR_TIME = 0.10, 1.1
"""Of whole logits."""
Result = TypeVar("Result")
HEADERS = ("loss", "peak MiB", "of whole", "bar of peak", "CPU s", "time of whole", "bar of time")


def measure(tokens: int, vocabulary: int, width: int, rounds: int, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Return peak bytes, seconds of each round (of the CPU, or of a GPU in bf16), and the loss, by variant."""
    import torch

    from accel_train.model.kernels.chunked_loss import chunked_loss, summed_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    head = torch.nn.Linear(width, vocabulary, bias=False, **place)
    hidden = torch.randn(1, tokens, width, requires_grad=True, **place)
    labels = torch.randint(0, vocabulary, (1, tokens), device=device)
    variants = {
        "whole logits": lambda: summed_loss(head(hidden), labels),
        "in chunks": lambda: chunked_loss(head, hidden, labels),
    }

    def step(loss_of: Callable[[], torch.Tensor]) -> float:
        head.weight.grad = hidden.grad = None
        loss = loss_of()
        loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        return float(loss)

    clock = time.perf_counter if on_gpu else time.process_time
    found: dict[str, dict[str, Any]] = {}
    for name, loss_of in variants.items():
        head.weight.grad = hidden.grad = None
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = step(loss_of)
            peak = torch.cuda.max_memory_allocated() - before
        else:
            loss, peak = with_peak(partial(step, loss_of))
        found[name] = {"loss": loss, "peak_bytes": peak, "seconds": []}
    for _ in range(rounds):
        for name, loss_of in variants.items():
            began = clock()
            step(loss_of)
            found[name]["seconds"].append(clock() - began)
    return found


def with_peak(run: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of a function, and the most bytes that torch holds at once of those it allocates on the CPU."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return result, peak


def rows_of(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table; a ratio of times compares two steps of one round."""
    whole = found["whole logits"]
    rows = []
    for name, each in found.items():
        share = each["peak_bytes"] / whole["peak_bytes"]
        ratios = [ours / theirs for ours, theirs in zip(each["seconds"], whole["seconds"], strict=True)]
        ratio = statistics.median(ratios)
        row = [name, f"{each['peak_bytes'] / 2**20:,.0f}", f"{share:.1%}", "-"]
        row += [median_and_range(each["seconds"], ".2f"), median_and_range(ratios, ".2f"), "-"]
        if each is not whole:
            row[3] = f"<= {BAR_PEAK:.0%} {'met' if share <= BAR_PEAK else 'MISSED'}"
            row[6] = f"<= {BAR_TIME} {'met' if ratio <= BAR_TIME else 'MISSED'}"
        rows.append(row)
    return rows


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("tokens", "vocabulary", "width", "rounds")}
    if arguments.measure:
        print_result(measure(**sizes, device=arguments.device))
        return
    child = run_child("benchmarks.loss", ["--measure", *flags_of(sizes)], timeout_seconds=3600)
    shape = f"{arguments.tokens:,} tokens, a vocabulary of {arguments.vocabulary:,}, width {arguments.width}"
    lines = [
        f"## Loss and backward from hidden states: {shape}; fp32, one thread, {arguments.rounds} round(s)",
        "",
        markdown_table(HEADERS, rows_of(child.result), text=("loss", "bar of peak", "bar of time")),
        "",
        f"Other processes used {child.others_cores:.2f} cores meanwhile.",
    ]
    record = {"sizes": sizes, "figures": child.result, "others_cores": round(child.others_cores, 2)}
    show(lines, record, save=arguments.save, name="loss")


if __name__ == "__main__":
    main()
