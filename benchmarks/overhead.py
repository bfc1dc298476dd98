"""What a training loop costs beside the arithmetic: one step of GPT-2 on a CPU under four loops.

    python -m benchmarks.overhead --preset micro --rounds 7 --save
    python -m benchmarks.overhead --preset micro --count-reads

raw          a PyTorch loop as an expert writes it by hand
accelerate   the loop of Accelerate's documentation: prepare, accumulate, backward, clip, step, scheduler
hf_trainer   transformers.Trainer with quick settings: no tracker, no bar, fused AdamW, no NaN filter
accel_train  accel_train.train(recipe): guard on, metrics.jsonl every 50 steps
and on request raw_gc_off, the raw loop without Python's garbage collector (accel_train collects every 1000 steps), and
nanogpt, the model and loop of nanogpt_style.py (another model code, so not a measure of a loop).

All read the same token file, train the same architecture with the same AdamW groups and clip in fp32, and log every 50
steps. Each round starts a fresh process for each, and lets them compute in turns of 0.4 s, one at a time; a ratio
compares two processes of one round, over the steps that were done while all of them trained. A step is the time between
two reads of a batch, seen from the data set, so no loop is touched. `micro` is so small that a step is nearly all
Python; `tiny` is nanoGPT's CPU example.
"""

import argparse
import statistics
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import (
    FetchClock,
    arguments_of,
    child_environment,
    common_time,
    markdown_table,
    median_and_range,
    print_result,
    run_children_in_turns,
    show,
    step_times,
    write_tokenizer,
    write_tokens,
)
from benchmarks.loops import PRESETS, TRAINERS, VARIANTS, Preset, Run

# --- a child process: one variant, measured --------------------------------------------------------------------


def run_variant(variant: str, run: Run, *, threads: int, warmup_steps: int, count_reads: bool) -> dict[str, Any]:
    """Train one variant in this process and report its steps, or its host reads."""
    import torch

    torch.set_num_threads(threads)
    clock = FetchClock()
    reads = count_host_reads(warmup_steps, run.steps - warmup_steps) if count_reads else None
    weights = TRAINERS[variant](run, clock)
    result: dict[str, Any] = {
        "num_parameters": sum(weight.numel() for weight in weights),
        "weights_l1": float(sum(weight.detach().double().abs().sum() for weight in weights)),
    }
    if reads is not None:
        return {**result, "reads_per_step": {line: n / (run.steps - warmup_steps) for line, n in reads.items()}}
    return {**result, **clock.stamps(warmup_steps=warmup_steps, num_steps=run.steps)}


def count_host_reads(first_step: int, num_steps: int) -> Counter[str]:
    """Count, from the end of one optimizer step to that of another, what makes a GPU wait: .item(), bool(), nonzero().

    The counter fills while training runs; its keys are the Python lines outside torch that caused the reads. On a CPU
    `.tolist()` and `.numpy()` are not seen; a GPU run with `torch.cuda.set_sync_debug_mode` sees those too (gpu.py).
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils._python_dispatch import TorchDispatchMode

    found: Counter[str] = Counter()
    reading = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    class CountReads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in reading:
                stack = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
                frame = stack[-1]
                place = "/".join(Path(frame.filename).parts[-2:])
                found[f"{place}:{frame.lineno} {frame.name}: {frame.line}"] += 1
            return func(*args, **(kwargs or {}))

    mode, steps_done = CountReads(), 0

    def after_step(*_: Any) -> None:
        nonlocal steps_done
        steps_done += 1
        if steps_done == first_step:
            mode.__enter__()
        elif steps_done == first_step + num_steps:
            mode.__exit__(None, None, None)

    register_optimizer_step_post_hook(after_step)
    return found


# --- the parent: rounds, ratios, bars ----------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Results by variant, one entry per round."""
    preset = PRESETS[arguments.preset]
    steps = arguments.steps or preset.steps
    tokens, tokenizer = folder / "tokens.bin", folder / "tokenizer"
    write_tokenizer(tokenizer, vocab_size=preset.vocab)
    # Long enough that no epoch ends inside a run.
    write_tokens(tokens, num_tokens=(steps + 8) * preset.batch * preset.block + 1, vocab_size=preset.vocab, seed=0)
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in arguments.variants}
    for number in range(arguments.rounds):
        children = run_children_in_turns(
            "benchmarks.overhead",
            [
                [
                    *("--variant", variant, "--preset", arguments.preset, "--threads", str(arguments.threads)),
                    *("--steps", str(steps), "--warmup", str(arguments.warmup or preset.warmup_steps)),
                    *("--seed", str(arguments.seed), "--attention", arguments.attention, "--tokens", str(tokens)),
                    *("--tokenizer", str(tokenizer), "--folder", str(folder / f"{variant}-{number}")),
                    *(["--in-order"] if arguments.in_order else []),
                    *(["--count-reads"] if arguments.count_reads else []),
                ]
                for variant in arguments.variants
            ],
            environment=child_environment(arguments.threads),
            timeout_seconds=1800,
        )
        between = None if arguments.count_reads else common_time([child.result for child in children])
        for variant, child in zip(arguments.variants, children, strict=True):
            result = child.result
            times = {} if between is None else step_times(result, between)
            kept = {name: value for name, value in result.items() if not name.endswith("_ns")}
            results[variant].append({**kept, **times, "others_cores": round(child.others_cores, 2)})
    return results


def step_table(results: Mapping[str, list[dict[str, Any]]], preset: Preset) -> str:
    """Medians over rounds; ratio and difference are medians over rounds of the paired figures (least to most)."""
    raw = results["raw"]
    rows = []
    for variant, runs in results.items():
        ratios = [run["cpu_us"] / base["cpu_us"] for run, base in zip(runs, raw, strict=True)]
        extra = [run["cpu_us"] - base["cpu_us"] for run, base in zip(runs, raw, strict=True)]
        wall = [run["wall_us"] / base["wall_us"] for run, base in zip(runs, raw, strict=True)]
        quick = [run["cpu_us_quick"] - base["cpu_us_quick"] for run, base in zip(runs, raw, strict=True)]
        mean = [run["cpu_us_mean"] / base["cpu_us_mean"] for run, base in zip(runs, raw, strict=True)]
        rows.append(
            [
                variant,
                f"{statistics.median(run['cpu_us'] for run in runs):.0f}",
                f"{statistics.median(run['wall_us'] for run in runs):.0f}",
                median_and_range(ratios, ".3f"),
                median_and_range(extra, "+.0f"),
                f"{statistics.median(quick):+.0f}",
                median_and_range(wall, ".3f"),
                f"{statistics.median(mean):.3f}",
                bar_verdict(preset, variant, statistics.median(ratios), statistics.median(extra)),
            ]
        )
    headers = [
        "variant",
        "CPU us/step",
        "wall us/step",
        "CPU / raw",
        "CPU - raw, us",
        "quickest tenth - raw, us",
        "wall / raw",
        "mean CPU / raw, with log steps",
        "bar",
    ]
    return markdown_table(headers, rows, text=("variant", "bar"))


def bar_verdict(preset: Preset, variant: str, ratio: float, extra_us: float) -> str:
    if variant != "accel_train":
        return "-"
    if preset.bar_ratio is not None:
        return f"<= {preset.bar_ratio:.2f} {'met' if ratio <= preset.bar_ratio else 'MISSED'}"
    assert preset.bar_extra_us is not None
    return f"<= +{preset.bar_extra_us:.0f} us {'met' if extra_us <= preset.bar_extra_us else 'MISSED'}"


def reads_table(results: Mapping[str, list[dict[str, Any]]]) -> str:
    """Host reads of tensors per steady step, by the line that causes them; a variant without any has one row of 0."""
    rows = []
    for variant, runs in results.items():
        lines: Mapping[str, float] = runs[0]["reads_per_step"]
        for line, count in lines.items() or {"none": 0.0}.items():
            rows.append([variant, f"{count:.2f}", line.replace("|", "\\|")[:140]])
    return markdown_table(["variant", "reads/step", "line"], rows, text=("variant", "line"))


def report(arguments: argparse.Namespace, results: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    preset = PRESETS[arguments.preset]
    table = reads_table(results) if arguments.count_reads else step_table(results, preset)
    others = max(run["others_cores"] for runs in results.values() for run in runs)
    shape = f"GPT-2 {preset.layers}L/{preset.heads}H/{preset.width}, T={preset.block}, batch {preset.batch}"
    sizes = {run["num_parameters"] for variant, runs in results.items() for run in runs if variant != "nanogpt"}
    same = (
        "the same number of parameters in all" if len(sizes) == 1 else f"NOT THE SAME MODEL: {sorted(sizes)} parameters"
    )
    return [
        f"## Step overhead, preset {arguments.preset}: {shape}, fp32, {arguments.threads} thread(s), "
        f"{arguments.rounds} round(s), attention {arguments.attention}",
        "",
        table,
        "",
        f"{same}; other processes used up to {others:.2f} cores meanwhile.",
    ]


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, help="steps per run (default: the preset's)")
    parser.add_argument("--warmup", type=int, help="steps left out at the start (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=TRAINERS, default=list(VARIANTS), help="raw must be one")
    parser.add_argument("--attention", choices=("causal", "sdpa"), default="causal", help="of the reference variants")
    parser.add_argument(
        "--in-order", action="store_true", help="read the file in order: all end with comparable weights"
    )
    parser.add_argument("--count-reads", action="store_true", help="count host reads of tensors; no timing")
    for hidden in ("--variant", "--tokens", "--tokenizer", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        run = Run(
            PRESETS[arguments.preset],
            Path(arguments.tokens),
            Path(arguments.tokenizer),
            Path(arguments.folder),
            arguments.steps,
            arguments.seed,
            arguments.attention,
            arguments.in_order,
        )
        run.folder.mkdir(parents=True, exist_ok=True)
        print_result(
            run_variant(
                arguments.variant,
                run,
                threads=arguments.threads,
                warmup_steps=arguments.warmup,
                count_reads=arguments.count_reads,
            )
        )
        return
    if "raw" not in arguments.variants:
        parser.error("--variants needs raw, which the others are compared with")
    if arguments.count_reads:
        arguments.rounds, arguments.steps, arguments.warmup = 1, 40, 10
    with tempfile.TemporaryDirectory() as folder:
        results = measure(arguments, Path(folder))
    name = f"overhead-{arguments.preset}" + ("-reads" if arguments.count_reads else "")
    settings = {option: str(value) for option, value in vars(arguments).items() if option != "save"}
    record = {"preset": asdict(PRESETS[arguments.preset]), "runs": results, "settings": settings}
    show(report(arguments, results), record, save=arguments.save, name=name)


if __name__ == "__main__":
    main()
