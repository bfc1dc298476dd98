"""How fast GPT-2 trains on one GPU: accel_train, nanoGPT's model and loop, and transformers.Trainer, in one run.

    python -m benchmarks.gpu --save                 # 124M and 350M, compiled and not: within 10 minutes on an H200
    python -m benchmarks.gpu --quick                # 124M only

T = 1024, bf16, fused AdamW, clip 1.0, synthetic tokens from a memory-mapped file, a log line every 50 steps. Each variant
runs in a fresh process and is watched from outside, through torch's hook after every optimizer step; no loop is touched.
MFU counts 6 N + 12 L D T operations a token, N without position embeddings and with GPT-2's 50257 tokens, over the
GPU's table peak, and over an 8192^3 bf16 matrix product measured in the same run.
GPU idle: 1 - (time in which a kernel or copy runs) / wall, over profiled steps. Host syncs: 20 steps under
`torch.cuda.set_sync_debug_mode("error")`. Where there is no CUDA this says so and ends with 0.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_train.core.hardware import peak_flops
from benchmarks.common import (
    arguments_of,
    child_environment,
    markdown_table,
    print_result,
    run_child,
    show,
    write_tokenizer,
    write_tokens,
)
from benchmarks.gpu_loops import MODELS, TRAINERS, Job
from benchmarks.gpu_watch import Measured, Phases, StepWatch, synchronizing_line

SHORTEST_JOB_SECONDS = 40.0
"""With less time left than this, the next job is not begun."""
NO_TIME = "no time left"


# --- a child process ---------------------------------------------------------------------------------------------


def run_job(job: Job) -> dict[str, Any]:
    """Train one variant in this process until everything is measured."""
    watch = StepWatch(job.phases, torch.device(job.device), job.folder / "trace.json")
    register_optimizer_step_post_hook(watch.after_step)
    try:
        TRAINERS[job.variant](job)
    except Measured:
        return watch.result
    except Exception as error:
        place = synchronizing_line(error)
        if place is None:
            raise
        torch.cuda.set_sync_debug_mode("default")
        return {**watch.result, "sync": place}
    raise AssertionError(f"{job.variant} ended after {watch.steps} optimizer steps, before step {job.phases.total}")


def matmul_tflops(size: int = 8192, repeats: int = 10) -> float:
    """What a bf16 matrix product of random numbers reaches on this GPU now."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        a @ b
    last.record()
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (first.elapsed_time(last) / 1e3) / 1e12


# --- the parent ------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, folder: Path, deadline: float) -> list[dict[str, Any]]:
    """One row per job, in the order of importance; what no longer fits says so."""
    rows = []
    for name in arguments.models:
        setup = MODELS[name]
        steps = arguments.phases.total + 16
        tokens, tokenizer = folder / f"{name}.bin", folder / f"tokenizer-{name}"
        count = steps * setup.batch_size * setup.shape.block_size + 1
        write_tokens(tokens, num_tokens=count, vocab_size=setup.vocab_size, seed=0)
        write_tokenizer(tokenizer, vocab_size=setup.vocab_size)
        for compiled in arguments.compile:
            for variant in arguments.variants:
                row: dict[str, Any] = {"model": name, "compile": compiled, "variant": variant}
                rows.append(row)
                left = deadline - time.monotonic()
                if left < SHORTEST_JOB_SECONDS:
                    row["problem"] = NO_TIME
                    continue
                place = folder / f"{name}-{variant}-{compiled}"
                place.mkdir()
                job = Job(name, compiled, variant, arguments.device, tokens, tokenizer, place, arguments.phases)
                try:
                    child = run_child(
                        "benchmarks.gpu",
                        ["--job", json.dumps(asdict(job), default=str)],
                        environment=child_environment(arguments.threads),
                        timeout_seconds=left,
                    )
                    row |= child.result
                    row["seconds"] = child.wall_seconds
                    print(f"{name} {variant} compile={compiled}: {child.wall_seconds:.0f} s", flush=True)
                except RuntimeError as error:
                    row["problem"] = str(error).strip().splitlines()[-1][:160]
                    print(f"{name} {variant} compile={compiled} failed: {error}", flush=True)
    return rows


def add_rates(row: dict[str, Any], *, table_peak: float | None, matmul_peak: float | None) -> None:
    """tokens/s and MFU from the mean step."""
    setup = MODELS[row["model"]]
    row["tokens_per_second"] = setup.batch_size * setup.shape.block_size / (row["step_ms_mean"] / 1e3)
    flops = row["tokens_per_second"] * setup.flops_per_token
    row["mfu"] = None if table_peak is None else flops / table_peak
    row["mfu_of_matmul"] = None if matmul_peak is None else flops / matmul_peak


HEADERS = (
    "model",
    "compile",
    "variant",
    "ms/step",
    "tokens/s",
    "MFU of peak",
    "MFU of matmul",
    "peak GiB",
    "GPU idle",
    "kernels/step",
    "host sync",
    "first step, s",
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row per job; `-` is what was not measured."""

    def figure(row: Mapping[str, Any], name: str, form: str) -> str:
        return "-" if row.get(name) is None else format(row[name], form)

    cells = [
        [
            row["model"],
            "on" if row["compile"] else "off",
            row["variant"],
            figure(row, "step_ms", ".2f"),
            figure(row, "tokens_per_second", ",.0f"),
            figure(row, "mfu", ".1%"),
            figure(row, "mfu_of_matmul", ".1%"),
            figure(row, "peak_gib", ".1f"),
            figure(row, "gpu_idle", ".1%"),
            figure(row, "kernels_per_step", ".0f"),
            str(row.get("problem") or row.get("sync", "-")).replace("|", "/"),
            figure(row, "first_step_seconds", ".0f"),
        ]
        for row in rows
    ]
    return markdown_table(HEADERS, cells, text=("model", "compile", "variant", "host sync"))


MFU_BARS = {"124M": 0.40, "350M": 0.45}
TRAINER_BAR, COMPILE_BAR = 1.5, 1.3


def bars(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What accel_train is held to, one line each, for the rows that were measured."""
    rates = {(r["model"], r["compile"], r["variant"]): r["tokens_per_second"] for r in rows if "tokens_per_second" in r}
    mfu = {r["model"]: r["mfu"] for r in rows if r.get("mfu") and r["compile"] and r["variant"] == "accel_train"}
    judged = [(f"{name}: MFU of accel_train, compiled", share, MFU_BARS.get(name)) for name, share in mfu.items()]
    for (name, compiled, variant), rate in rates.items():
        if not compiled or variant != "accel_train":
            continue
        trainer, eager = rates.get((name, True, "hf_trainer")), rates.get((name, False, "accel_train"))
        if trainer:
            judged.append((f"{name}: accel_train / hf_trainer, both compiled", rate / trainer, TRAINER_BAR))
        if eager:
            judged.append((f"{name}: accel_train compiled / not", rate / eager, COMPILE_BAR))
    return [
        f"- {what}: {value:.3f}, bar {bar} {'met' if value >= bar else 'MISSED'}" for what, value, bar in judged if bar
    ]


def report(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]], matmul: float | None) -> list[str]:
    if arguments.device == "cpu":
        heading = "## A check of this program on a CPU: these are no figures"
    else:
        batches = ", ".join(f"{name}: batch {MODELS[name].batch_size}" for name in arguments.models)
        heading = f"## GPT-2 on one {torch.cuda.get_device_name()}, bf16, T=1024 ({batches})"
    product = [f"bf16 matrix product 8192^3: {matmul:.0f} TFLOP/s."] if matmul else []
    judged = [] if arguments.device == "cpu" else [*bars(rows), ""]
    return [heading, "", table(rows), "", *judged, *product]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=("124M", "350M"), default=["124M", "350M"])
    parser.add_argument("--variants", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--compile", choices=("on", "off", "both"), default="both")
    parser.add_argument("--quick", action="store_true", help="124M only, fewer steps: about 4 minutes")
    parser.add_argument("--budget-seconds", type=float, default=560.0, help="what does not fit is left out, and said")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.compile = {"on": [True], "off": [False], "both": [True, False]}[arguments.compile]
    arguments.phases = Phases(15, 40, 10, 20)
    if arguments.quick:
        arguments.models, arguments.phases = ["124M"], Phases(10, 15, 5, 20)
    if arguments.device == "cpu":
        arguments.models, arguments.phases, arguments.threads = ["check"], Phases(2, 3, 1, 1), 1
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.job == "matmul":
        print_result({"tflops": matmul_tflops()})
        return
    if arguments.job:
        fields = json.loads(arguments.job)
        paths = {name: Path(fields[name]) for name in ("tokens", "tokenizer", "folder")}
        print_result(run_job(Job(**{**fields, **paths, "phases": Phases(**fields["phases"])})))
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu is skipped: torch sees no CUDA device on this machine.")
        return
    deadline = time.monotonic() + arguments.budget_seconds
    environment = child_environment(arguments.threads)
    matmul, table_peak = None, None
    if arguments.device == "cuda":
        child = run_child("benchmarks.gpu", ["--job", "matmul"], environment=environment, timeout_seconds=120)
        matmul, table_peak = child.result["tflops"], peak_flops(torch.cuda.get_device_name(), "bf16")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder), deadline)
    for row in rows:
        if "step_ms_mean" in row:
            add_rates(row, table_peak=table_peak, matmul_peak=None if matmul is None else matmul * 1e12)
    record = {"matmul_tflops": matmul, "table_peak_flops": table_peak, "rows": rows, "phases": asdict(arguments.phases)}
    name = "gpu" if arguments.device == "cuda" else "gpu-check"
    show(report(arguments, rows, matmul), record, save=arguments.save, name=name)
    if any(row.get("problem", NO_TIME) != NO_TIME for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
