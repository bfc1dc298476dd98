"""Several processes against one, bytes counted on the way; and the model behind `plan` against published figures, to
1,024 GPUs.

    python -m benchmarks.scaling --save
    python -m benchmarks.scaling --rounds 5 --save

Measured: a GPT-2 of 7 million parameters on this CPU, one thread a process, the same batch for each process (weak
scaling). `ddp` reduces gradients while the backward pass goes on, `ddp, after` holds all of them back until it is over,
`fsdp2` spreads the model. A step is the time between two optimizer steps; bytes are what the processes hand to
collectives, counted at the calls (DDP: at its communication hook), beside what `plan` says. More processes than cores
share cores: the efficiency that is left for those is cores / processes, and the table has a column for it.

Modelled: no process is started. `--only model` and `--only measured` do one of the two.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_train.runtime.launcher import free_port
from benchmarks.common import (
    OthersClock,
    arguments_of,
    child_environment,
    markdown_table,
    show,
    write_tokenizer,
    write_tokens,
)

VARIANTS = {"one": (1,), "ddp": (2, 4), "ddp, after": (2, 4), "fsdp2": (2, 4)}
"""And on how many processes each runs."""
PER_DEVICE, BLOCK, VOCAB = 4, 128, 2048
CONFIG = {
    **{"model_type": "gpt2", "n_layer": 8, "n_head": 4, "n_embd": 256, "n_positions": BLOCK},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


# --- a measured process -------------------------------------------------------------------------------------------


def recipe_of(variant: str, world_size: int, folder: Path, num_steps: int) -> dict[str, Any]:
    """The run that is measured, and planned."""
    data = {"train": str(folder / "tokens.bin"), "eval_fraction": 0, "cache_dir": str(folder / "cache")}
    return {
        "output_dir": str(folder / f"run-{variant}-{world_size}"),
        "model": {"config": CONFIG},
        "tokenizer": str(folder / "tokenizer"),
        "data": {**data, "sequence_length": BLOCK},
        "batch": {"global_batch_size": PER_DEVICE * world_size, "per_device_batch_size": PER_DEVICE},
        "schedule": {"max_steps": num_steps},
        "parallel": {"strategy": "fsdp2" if variant == "fsdp2" else "ddp"},
        "checkpoint": {"every_steps": 0},
        "guard": {"drift_check_steps": 0},
        "log": {"every_steps": 1000, "progress": False},
    }


def measure_here(variant: str, recipe: Mapping[str, Any], warmup_steps: int) -> dict[str, Any]:
    """Train in this process, with the others; when each step ended, and what was sent."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from accel_train import Recipe
    from accel_train.parallel.ddp import Ddp
    from accel_train.training.loop import run_steps
    from accel_train.training.setup import prepare_run
    from benchmarks.counting import count_collectives, per_step

    counts = count_collectives()
    run = prepare_run(Recipe.model_validate(recipe))
    if variant == "ddp, after":
        assert isinstance(run.strategy, Ddp)
        reduce_after_backward(run.strategy.reduction)
    ended: list[float] = []

    def after_step(*_: Any) -> None:
        ended.append(time.perf_counter())
        if len(ended) == warmup_steps:
            counts.clear()
        if len(ended) == run.plan.max_steps:
            sent.update(per_step(counts, run.plan.max_steps - warmup_steps))

    sent: dict[str, float] = {}
    register_optimizer_step_post_hook(after_step)
    with run.resources:
        run_steps(run)
    steps = [later - sooner for sooner, later in zip(ended[warmup_steps - 1 :], ended[warmup_steps:])]
    return {
        "step_seconds": statistics.median(steps),
        "sent": sent,
        "parameters": sum(p.numel() for p in run.strategy.parameters),
    }


def reduce_after_backward(reduction: Any) -> None:
    """Let DDP hold every bucket back until the last one is full, and reduce them then: nothing runs beside it."""
    import torch
    import torch.distributed as dist

    held: list[tuple[Any, Any]] = []

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduction.note(bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        held.append((bucket.buffer(), future))
        if bucket.is_last():
            for buffer, promised in held:
                size = dist.get_world_size()
                dist.all_reduce(buffer.div_(size))
                promised.set_result(buffer)
            held.clear()
        return future

    reduction.reduce = reduce


# --- the parent ---------------------------------------------------------------------------------------------------


def launch(variant: str, world_size: int, folder: Path, num_steps: int, warmup_steps: int) -> list[dict[str, Any]]:
    """Run one variant in processes that are forked off this one, which has imported all of it; the result of each.

    Raises:
        RuntimeError: one of them failed.
    """
    port = str(free_port())
    recipe = recipe_of(variant, world_size, folder, num_steps)
    shutil.rmtree(recipe["output_dir"], ignore_errors=True)  # of the round before: it would be gone on with
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(world_size)}
            if world_size > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), **rendezvous)
            os._exit(_forked(variant, recipe, warmup_steps, folder, rank))
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        printed = "\n".join((folder / f"output-{rank}").read_text()[-1500:] for rank in range(world_size))
        raise RuntimeError(f"{variant} on {world_size}: exit codes {codes}\n{printed}")
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world_size)]


def _forked(variant: str, recipe: Mapping[str, Any], warmup_steps: int, folder: Path, rank: int) -> int:
    with (folder / f"output-{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            result = measure_here(variant, recipe, warmup_steps)
        except BaseException:
            traceback.print_exc()
            return 1
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        return 0


def import_everything() -> None:
    """What the measured processes need, once for all of them."""
    for name in ("accelerate", "torch.distributed", "accel_train.training.train", "accel_train.tasks.causal_lm.task"):
        import_module(name)
    for name in ("AutoModelForCausalLM", "GPT2LMHeadModel"):
        getattr(import_module("transformers"), name)  # loaded when it is named


def with_environment() -> None:
    """Begin anew where the environment is not that of a measured process: OpenMP and malloc read it at the start."""
    wanted = {**child_environment(1), "GOMP_SPINCOUNT": "1000"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.scaling", *sys.argv[1:]], wanted)


def measure(rounds: int, num_steps: int, warmup_steps: int, most_processes: int) -> list[dict[str, Any]]:
    """A row for each variant and number of processes: the median over rounds, which alternate between them."""
    cases = [(variant, size) for variant, sizes in VARIANTS.items() for size in sizes if size <= most_processes]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    sent: dict[tuple[str, int], dict[str, float]] = {}
    planned: dict[tuple[str, int], dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer", vocab_size=VOCAB)
        num_tokens = (num_steps + 4) * 4 * PER_DEVICE * BLOCK + 1
        write_tokens(folder / "tokens.bin", num_tokens=num_tokens, vocab_size=VOCAB, seed=0)
        for _ in range(rounds):
            for variant, size in cases:
                results = launch(variant, size, folder, num_steps, warmup_steps)
                seconds[variant, size].append(max(each["step_seconds"] for each in results))
                sent[variant, size] = results[0]["sent"]
        for variant, size in cases:
            planned[variant, size] = planned_bytes(recipe_of(variant, size, folder, num_steps), size)
    alone = statistics.median(seconds["one", 1])
    cores = len(os.sched_getaffinity(0))
    return [
        {
            "variant": variant,
            "processes": size,
            "step_seconds": seconds[variant, size],
            "efficiency": alone / statistics.median(seconds[variant, size]),
            "possible": min(1.0, cores / size),
            "sent_bytes": sent[variant, size],
            "planned_bytes": planned[variant, size],
        }
        for variant, size in cases
    ]


def planned_bytes(recipe: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """What `plan` says of the same run."""
    from accel_train import Recipe
    from accel_train.plan.plan import resolve_plan

    traffic = resolve_plan(Recipe.model_validate(recipe), world_size).scale.traffic
    return {each.kind: each.payload_bytes for each in traffic}


def measured_text(rows: Sequence[Mapping[str, Any]], others_cores: float) -> str:
    """The table of measured rows."""
    cells = [
        [
            row["variant"],
            str(row["processes"]),
            f"{1e3 * statistics.median(row['step_seconds']):.0f}",
            f"{row['efficiency']:.2f}",
            f"{row['possible']:.2f}",
            "; ".join(f"{kind} {total:,.0f}" for kind, total in row["sent_bytes"].items()) or "-",
            "yes" if {k: float(v) for k, v in row["planned_bytes"].items()} == row["sent_bytes"] else "NO",
        ]
        for row in rows
    ]
    headers = [
        "variant",
        "processes",
        "ms/step",
        "efficiency",
        "at most, by cores",
        "bytes a process and step, counted",
        "as planned",
    ]
    return "\n".join(
        [
            f"## Measured: GPT-2, 8 layers of 256, fp32, {PER_DEVICE} x {BLOCK} tokens a process, "
            f"{len(rows[0]['step_seconds'])} round(s)",
            "",
            markdown_table(headers, cells, text=("variant", headers[5], "as planned")),
            "",
            "Efficiency: the step of one process alone over this one; processes and gloo's threads share the cores. "
            "`ddp, after`: gradients",
            f"are reduced when the backward pass is over. Other processes used {others_cores:.2f} cores meanwhile"
            + (": NOT a quiet machine, so the times say little." if others_cores > 0.1 else "."),
        ]
    )


def main() -> None:
    """Measure, model, print, and save if asked."""
    parser = arguments_of(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--most-processes", type=int, default=4)
    parser.add_argument("--only", choices=("measured", "model"))
    arguments = parser.parse_args()
    with_environment()
    texts: list[str] = []
    record: dict[str, Any] = {"settings": {"rounds": arguments.rounds, "steps": arguments.steps}}
    if arguments.only != "model":
        import_everything()
        clock = OthersClock()
        record["measured"] = measure(arguments.rounds, arguments.steps, arguments.warmup, arguments.most_processes)
        record["others_cores"] = round(clock.read()[1], 2)
        texts.append(measured_text(record["measured"], record["others_cores"]))
    if arguments.only != "measured":
        from benchmarks.scaling_model import model_text

        text, record["model"] = model_text()
        texts.append(text)
    show(["\n\n".join(texts), ""], record, save=arguments.save, name="scaling")


if __name__ == "__main__":
    main()
