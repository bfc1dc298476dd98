"""How fast models train on one GPU: accel_train, a plain loop (nanoGPT's), and transformers.Trainer with its best
flags.

    python -m benchmarks.gpu --minutes 9 --save           # all rows in order of value, as far as the time goes
    python -m benchmarks.gpu --minutes 9 --save           # again: goes on with the rows that are missing
    python -m benchmarks.gpu --only LoRA loss --save      # rows whose name holds one of these words, measured again
    python -m benchmarks.gpu --save --compare             # also each row beside the one that was saved before

GPT-2 of 124M, 350M and 1.5B, compiled, with the loss in chunks and whole, by block and whole, and as CUDA graphs; then
accel_train alone: float8, LoRA on 8B, document masks, checkpoints. Compiled code is kept between rows. bf16, fused
AdamW, clip 1.0, synthetic tokens from a memory-mapped file. Each row runs in a fresh process, is watched from
outside through torch's hook after every optimizer step, and is written as soon as it is measured. What no longer fits
says so. MFU counts 6 N + 12 L D T operations a token, N without position embeddings and padding tokens, over the GPU's
table peak, and over an 8192^3 bf16 matrix product measured in the same run. GPU idle: 1 - (time in which a kernel or
copy runs) / wall, over profiled steps. Host syncs: steps under `torch.cuda.set_sync_debug_mode("error")`. Planned: what
`accel-train plan` says of memory and of a step. The longest step less the median one is what a checkpoint stalls.
Without CUDA this says so and ends with 0.
"""

import argparse
import json
import math
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_train.core.hardware import peak_flops
from benchmarks.common import (
    RESULTS,
    arguments_of,
    child_environment,
    facts_of_now,
    flags_of,
    markdown_table,
    print_result,
    run_child,
    run_to_end,
    show,
    write,
    write_tokenizer,
    write_tokens,
)
from benchmarks.gpu_loops import CHECKS, MODELS, OTHER_WORK, TRAINERS, Job, Model, accel_train_recipe, write_base
from benchmarks.gpu_watch import Measured, Phases, StepWatch, synchronizing_line

SHORTEST_JOB_SECONDS = 40.0
"""With less time left than this, the next row is not begun."""
NO_TIME = "no time left"
TEST_MINUTES = 4
"""Minutes after which no further test that needs a GPU begins. They are in order of value."""
PHASES = {"124M": Phases(15, 40, 10, 20), "checkpoints": Phases(10, 60, 2, 4)}
USUAL_PHASES, CHECK_PHASES = Phases(10, 20, 5, 10), Phases(2, 3, 1, 1)
LOSS_SIZES = {"cuda": (4096, 152_000, 4096, 10), "cpu": (64, 512, 16, 1)}
"""Tokens, vocabulary, width, rounds."""
OURS = "accel_train"
COMPILED = ("whole logits", "whole model", "whole model and logits", "CUDA graphs")
"""Settings that compute what plain bf16 does, in other graphs."""


def planned_rows() -> Iterator[dict[str, Any]]:
    """All rows in order of value: jobs of training, the loss alone, the tests that need a GPU."""

    def row(model: str, setting: str = "bf16", *, variant: str = OURS, compiled: bool = True) -> dict[str, Any]:
        names = [model, "" if setting == "bf16" else setting, variant, "" if compiled else "eager"]
        name = " ".join(name for name in names if name)
        return {"row": name, "model": model, "setting": setting, "variant": variant, "compile": compiled}

    ours, *others = TRAINERS
    for model in ("124M", "350M", "1.5B"):
        yield row(model, variant=ours)
        yield from (row(model, setting) for setting in (COMPILED if model == "124M" else COMPILED[2:3]))
        yield from (row(model, variant=variant) for variant in others)
    yield {"row": "loss"}
    yield from (row("llama-1.4B", setting) for setting in ("bf16", "float8"))
    yield from (row("llama-8B", setting, compiled=False) for setting in ("LoRA", "LoRA, 4-bit base"))
    yield from (row("llama-long", setting, compiled=False) for setting in ("document masks", "dense document masks"))
    yield row("llama-long", "document masks")
    yield row("llama-1.4B", "checkpoints", compiled=False)
    yield from (row("124M", setting) for setting in ("Muon", "Muon, fp32 products"))
    yield {"row": "tests"}
    yield from (row("124M", variant=variant, compiled=False) for variant in TRAINERS)


# --- a child process ---------------------------------------------------------------------------------------------


def run_job(job: Job) -> dict[str, Any]:
    """Train one variant in this process until everything is measured."""
    watch = StepWatch(job.phases, torch.device(job.device), job.folder / "trace.json")
    register_optimizer_step_post_hook(watch.after_step)
    try:
        if job.variant == OURS:
            watch.result |= plan_of(job)
        TRAINERS[job.variant](job)
    except Measured:
        return {**watch.result, **saved(job.folder / "run")}
    except Exception as error:
        place = synchronizing_line(error)
        if place is None:
            raise
        torch.cuda.set_sync_debug_mode("default")
        return {**watch.result, "sync": place}
    raise AssertionError(f"{job.variant} ended after {watch.steps} optimizer steps, before step {job.phases.total}")


def plan_of(job: Job) -> dict[str, Any]:
    """What `accel-train plan` says of the run: bytes that torch allocates, and the time of a step."""
    from accel_train.plan.plan import resolve_plan
    from accel_train.recipe.schema import Recipe

    if "LoRA" in job.setting and not job.base.exists():
        write_base(job)
    plan = resolve_plan(Recipe.model_validate(accel_train_recipe(job)), 1)
    not_allocated_by_torch = ("CUDA context", "NCCL buffers", "fragmentation")
    planned = [part.num_bytes or 0 for part in plan.memory if part.name not in not_allocated_by_torch]
    step = plan.scale.step
    return {"planned_gib": sum(planned) / 2**30, "planned_ms": None if step is None else step.seconds * 1e3}


def saved(run: Path) -> dict[str, float]:
    """Size and rate of the newest checkpoint of a run; nothing where it saved none."""
    events = run / "events.jsonl"
    lines = map(json.loads, events.read_text().splitlines()) if events.exists() else ()
    saves = [event for event in lines if event["event"] == "checkpoint"]
    folder = run / "checkpoints" / f"step-{saves[-1]['step']:08d}" if saves else run / "none"
    if not folder.exists():
        return {}
    gigabytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9
    return {"saved_gb": gigabytes, "saved_gb_per_second": gigabytes / saves[-1]["seconds"]}


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


def measure(row: dict[str, Any], arguments: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Any]:
    """Return the figures of one row.

    Raises:
        RuntimeError: it failed or ran past the time.
    """
    if row["row"] == "loss":
        return measure_loss(arguments, seconds)
    if row["row"] == "tests":
        return run_tests(arguments, seconds)
    return measure_training(prepare_job(row, arguments.device, folder), arguments, seconds)


def measure_loss(arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return memory and time of the loss alone."""
    sizes = dict(zip(("tokens", "vocabulary", "width", "rounds"), LOSS_SIZES[arguments.device], strict=True))
    flags = ["--measure", *flags_of(sizes), "--device", arguments.device]
    environment = child_environment(arguments.threads)
    return {"losses": run_child("benchmarks.loss", flags, environment=environment, timeout_seconds=seconds).result}


def measure_training(job: Job, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return the figures of a job, which runs in its own process."""
    flags, environment = ["--job", json.dumps(asdict(job), default=str)], child_environment(arguments.threads)
    figures = run_child("benchmarks.gpu", flags, environment=environment, timeout_seconds=seconds).result
    figures["tokens_per_second"] = job.setup.batch_size * job.setup.shape.block_size / (figures["step_ms_mean"] / 1e3)
    return figures


def prepare_job(row: Mapping[str, Any], device: str, folder: Path) -> Job:
    """Write the tokens of a model, and make the folder of its row."""
    model, setting = row["model"], row["setting"]
    setup: Model = (MODELS if device == "cuda" else CHECKS)[model]
    phases = PHASES.get(setting, PHASES.get(model, USUAL_PHASES)) if device == "cuda" else CHECK_PHASES
    tokens, tokenizer = folder / f"{model}.bin", folder / f"tokenizer-{model}"
    if not tokens.exists():
        most = max(each.total for each in (USUAL_PHASES, *PHASES.values()))
        count = (most + 16) * setup.batch_size * setup.shape.block_size + 1
        write_tokens(tokens, num_tokens=count, vocab_size=min(setup.vocab_size, 2**16), seed=0)
        write_tokenizer(tokenizer, vocab_size=setup.vocab_size)
    place = folder / str(row["row"]).replace(" ", "-").replace(",", "")
    place.mkdir()
    base = folder / f"base-{model}"
    return Job(model, row["compile"], row["variant"], setting, device, tokens, tokenizer, place, base, phases)


def run_tests(arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return how the tests that need a GPU ended, also if they run past the time; on a CPU they are skipped."""
    # The project's own options hide the outcome of each test.
    words = ["-m", "pytest", "-v", "--tb=line", "-o", "addopts=", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
    words += ["--minutes", str(TEST_MINUTES)]
    environment = child_environment(arguments.threads)
    code, printed = run_to_end([sys.executable, *words], environment=environment, timeout_seconds=seconds)
    outcomes, failed = outcomes_of(printed)
    if not outcomes:
        raise RuntimeError(f"the tests ended with exit code {code}:\n{printed[-2000:]}")
    said = ", ".join(f"{number} {outcome.lower()}" for outcome, number in sorted(outcomes.items()))
    return {"tests": said if code is not None else f"{said}, then no time left", "failed": failed}


def outcomes_of(printed: str) -> tuple[Counter[str], list[str]]:
    """Return how often each outcome stands in what `pytest -v` has printed, and the tests that failed."""
    lines = [words for line in printed.splitlines() if len(words := line.split()) > 1 and "::" in words[0]]
    ended = {name: outcome for name, outcome, *_ in lines if outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failed = [f"{outcome} {name}" for name, outcome in ended.items() if outcome in ("FAILED", "ERROR")]
    return Counter(ended.values()), failed


def add_mfu(row: dict[str, Any], *, table_peak: float | None, matmul_peak: float | None) -> None:
    """Add the MFU of a row that trains all weights in bf16."""
    if row["setting"] not in OTHER_WORK:
        flops = row["tokens_per_second"] * MODELS[row["model"]].flops_per_token
        row["mfu"] = None if table_peak is None else flops / table_peak
        row["mfu_of_matmul"] = None if matmul_peak is None else flops / matmul_peak


COLUMNS = {
    "ms/step": ("step_ms", ".2f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "MFU of peak": ("mfu", ".1%"),
    "MFU of matmul": ("mfu_of_matmul", ".1%"),
    "peak GiB": ("peak_gib", ".1f"),
    "planned GiB": ("planned_gib", ".1f"),
    "planned ms": ("planned_ms", ".2f"),
    "GPU idle": ("gpu_idle", ".1%"),
    "kernels/step": ("kernels_per_step", ".0f"),
    "stall, ms": ("stall_ms", ".1f"),
    "first step, s": ("first_step_seconds", ".0f"),
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per row that trains; `-` is what was not measured."""
    lines = []
    for row in rows:
        cells = ["-" if row.get(name) is None else format(row[name], form) for name, form in COLUMNS.values()]
        sync = str(row.get("problem") or row.get("sync", "-")).replace("|", "/")
        lines.append([row["model"], row["setting"], "on" if row["compile"] else "off", row["variant"], *cells, sync])
    headers = ("model", "setting", "compile", "variant", *COLUMNS, "host sync")
    return markdown_table(headers, lines, text=("model", "setting", "compile", "variant", "host sync"))


def other_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows measured that train no model, and how fast checkpoints were written."""
    lines = []
    for row in rows:
        if "model" not in row and "problem" in row:
            lines.append(f"- {row['row']}: {row['problem']}")
        if "losses" in row:
            whole, chunks = row["losses"]["whole logits"], row["losses"]["in chunks"]
            memory = chunks["peak_bytes"] / whole["peak_bytes"]
            seconds = min(chunks["seconds"]) / min(whole["seconds"])
            lines.append(f"- loss in chunks / whole logits: peak {memory:.1%}, quickest time {seconds:.2f}")
        if "tests" in row:
            lines += [f"- tests that need a GPU: {row['tests']}", *(f"  - {line}" for line in row["failed"])]
        if row.get("saved_gb_per_second"):
            lines.append(f"- checkpoints: {row['saved_gb']:.1f} GB, written at {row['saved_gb_per_second']:.2f} GB/s")
    return lines


MFU_BARS = {"124M": 0.40, "350M": 0.45}
NANOGPT_BAR, TRAINER_BAR, COMPILE_BAR, LORA_BAR = 1.05, 1.5, 1.3, 12_473


def bars(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What accel_train is held to, one line each, for the rows that were measured."""
    plain = [r for r in rows if r.get("setting") == "bf16" and "tokens_per_second" in r]
    rates = {(r["model"], r["compile"], r["variant"]): r["tokens_per_second"] for r in plain}
    mfu = {r["model"]: r["mfu"] for r in plain if r.get("mfu") and r["compile"] and r["variant"] == OURS}
    judged = [(f"{name}: MFU of accel_train, compiled", share, MFU_BARS.get(name)) for name, share in mfu.items()]
    for (name, compiled, variant), rate in rates.items():
        if not compiled or variant != "accel_train":
            continue
        trainer, eager = rates.get((name, True, "hf_trainer")), rates.get((name, False, "accel_train"))
        if plain_loop := rates.get((name, True, "nanogpt")):
            judged.append((f"{name}: accel_train / nanogpt, both compiled", rate / plain_loop, NANOGPT_BAR))
        if trainer:
            judged.append((f"{name}: accel_train / hf_trainer, both compiled", rate / trainer, TRAINER_BAR))
        if eager:
            judged.append((f"{name}: accel_train compiled / not", rate / eager, COMPILE_BAR))
    by_name = {r["row"]: r["tokens_per_second"] for r in rows if "tokens_per_second" in r}
    if lora := by_name.get("llama-8B LoRA accel_train eager"):
        judged.append(("llama-8B with LoRA: tokens/s, published for an H100", lora, LORA_BAR))
    return [
        f"- {what}: {value:.3f}, bar {bar} {'met' if value >= bar else 'MISSED'}" for what, value, bar in judged if bar
    ]


def report(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]], matmul: float | None) -> list[str]:
    """Return the text of all rows so far."""
    if arguments.device == "cpu":
        heading = "## A check of this program on a CPU: these are no figures"
    else:
        heading = f"## Training on one {torch.cuda.get_device_name()}, bf16"
    product = [f"bf16 matrix product 8192^3: {matmul:.0f} TFLOP/s."] if matmul else []
    judged = [] if arguments.device == "cpu" else bars(rows)
    trained, known = [row for row in rows if "model" in row], {row["row"] for row in rows if "problem" not in row}
    missing = "; ".join(row["row"] for row in planned_rows() if row["row"] not in known)
    rest = [f"- not measured: {missing}"] if missing else []
    return [heading, "", table(trained), "", *other_lines(rows), *judged, *rest, "", *product]


def comparison(rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per row that was measured now and before: ms a step, their ratio, and peak memory."""
    known = {row["row"]: row for row in before if "step_ms" in row}
    lines = [
        [row["row"], *(f"{each['step_ms']:.2f}" for each in (was, row)), f"{row['step_ms'] / was['step_ms']:.3f}"]
        + ["-" if each.get("peak_gib") is None else f"{each['peak_gib']:.1f}" for each in (was, row)]
        for row in rows
        if "step_ms" in row and (was := known.get(row["row"])) is not None
    ]
    headers = ("row", "ms/step before", "now", "now / before", "peak GiB before", "now, GiB")
    return markdown_table(headers, lines, text=("row",))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments_of(__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="what does not fit is left out, and said")
    parser.add_argument("--row-minutes", type=float, default=4.0, help="a row that takes longer has failed")
    parser.add_argument("--again", action="store_true", help="also measure rows that the saved file has")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only rows whose name holds one of these words")
    parser.add_argument(
        "--compare", nargs="?", const=RESULTS / "gpu.json", type=Path, metavar="FILE",
        help="also print each row beside the one that this file had (default: the saved results)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    names = [row["row"] for row in planned_rows()]
    for word in arguments.only or ():
        if not any(word in name for name in names):
            parser.error(f"no row's name holds {word!r}; --list prints them")
    if arguments.device == "cpu":
        arguments.threads = 1
    return arguments


def saved_record(file: Path) -> dict[str, Any]:
    """Return what an earlier call measured on the same GPU with the same versions, without the rows that failed."""
    if not file.exists():
        return {"rows": []}
    found, now = json.loads(file.read_text()), facts_of_now()
    for facts in (found, now):
        # Saved results make a clean working tree dirty.
        facts["versions"]["commit"] = facts["versions"]["commit"].removesuffix("-dirty")
    if found["machine"].get("gpus") != now["machine"].get("gpus") or found["versions"] != now["versions"]:
        return {"rows": []}
    return {**found, "rows": [row for row in found["rows"] if "problem" not in row]}


def finite(value: Any) -> Any:
    """Return the value with None for each number that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def matmul_of_this_gpu(arguments: argparse.Namespace) -> float | None:
    """Return TFLOP/s of a matrix product here; None on a CPU, or if it fails."""
    if arguments.device == "cpu":
        return None
    environment = child_environment(arguments.threads)
    try:
        child = run_child("benchmarks.gpu", ["--job", "matmul"], environment=environment, timeout_seconds=120)
    except RuntimeError as error:
        print(f"the matrix product failed: {error}", flush=True)
        return None
    return float(child.result["tflops"])


def run_rows(arguments: argparse.Namespace, folder: Path, deadline: float) -> bool:
    """Measure the rows and save after each; print all at the end, also of an interruption. Return whether one failed.

    Rows of an earlier call stay in the saved file. They are measured again if `--only` or `--again` asks for it.
    """
    name = "gpu" if arguments.device == "cuda" else "gpu-check"
    before = None if arguments.compare is None else json.loads(arguments.compare.read_text())["rows"]
    record = {"rows": []} if arguments.save is None else saved_record(arguments.save / f"{name}.json")
    earlier: dict[str, dict[str, Any]] = {row["row"]: row for row in record["rows"]}
    planned = list(planned_rows())
    wanted = [row for row in planned if not arguments.only or any(word in row["row"] for word in arguments.only)]
    if not (arguments.again or arguments.only):
        wanted = [row for row in wanted if row["row"] not in earlier]
    matmul = (matmul_of_this_gpu(arguments) if wanted else None) or record.get("matmul_tflops")
    table_peak = peak_flops(torch.cuda.get_device_name(), "bf16") if arguments.device == "cuda" else None
    done: dict[str, dict[str, Any]] = {}

    def results() -> tuple[list[str], dict[str, Any]]:
        rows = [(earlier | done)[row["row"]] for row in planned if row["row"] in earlier | done]
        return report(arguments, rows, matmul), {"matmul_tflops": matmul, "table_peak_flops": table_peak, "rows": rows}

    try:
        for row in wanted:
            began = time.monotonic()
            seconds = min(deadline - began, 60 * arguments.row_minutes)
            if deadline - began < SHORTEST_JOB_SECONDS:
                row["problem"] = NO_TIME
            else:
                measure_row(row, arguments, folder, seconds)
            if "step_ms_mean" in row:
                add_mfu(row, table_peak=table_peak, matmul_peak=None if matmul is None else matmul * 1e12)
            row["seconds"] = round(time.monotonic() - began, 1)
            # A row that failed now leaves what was measured before.
            if "problem" not in row or row["row"] not in earlier:
                done[row["row"]] = finite(row)
            print(f"{row['row']}: {row['seconds']:.0f} s {row.get('problem', '')}", flush=True)
            if arguments.save is not None:
                write(*results(), save=arguments.save, name=name)
    finally:
        lines, kept = results()
        show(lines, kept, save=arguments.save, name=name)
        if before is not None:
            print(comparison(kept["rows"], before))
    return any(row.get("problem", NO_TIME) != NO_TIME or row.get("failed") for row in wanted)


def measure_row(row: dict[str, Any], arguments: argparse.Namespace, folder: Path, seconds: float) -> None:
    """Add the figures of a row to it, or its problem: no row ends the others."""
    try:
        row |= measure(row, arguments, folder, seconds)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        row["problem"] = problem_in(text)
        print(f"{row['row']} failed: {text}", flush=True)


def problem_in(text: str) -> str:
    """Return the line that names the last error of a text, or the timeout. Hints may follow it, as CUDA prints them."""
    lines = text.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Needed|Stopped): |.* ran past \d+ s$", line)]
    return (named or lines)[-1][:160]


def run_child_job(text: str) -> dict[str, Any]:
    """Return what a child process measures: the matrix product, or a job as JSON."""
    if text == "matmul":
        return {"tflops": matmul_tflops()}
    fields = json.loads(text)
    paths = {name: Path(fields[name]) for name in ("tokens", "tokenizer", "folder", "base")}
    return run_job(Job(**{**fields, **paths, "phases": Phases(**fields["phases"])}))


def main() -> None:
    arguments = parse_arguments()
    if arguments.list:
        print("\n".join(row["row"] for row in planned_rows()))
        return
    if arguments.job:
        print_result(run_child_job(arguments.job))
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu is skipped: torch sees no CUDA device on this machine.")
        return
    # `timeout` and schedulers send it: the child ends too, and the rows so far are printed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        has_failed = run_rows(arguments, Path(folder), deadline)
    if has_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
