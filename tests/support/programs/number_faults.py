"""A run with faults, started under torchrun or in a test's own process: `python number_fault_program.py PLAN.json`.

The plan: `recipe`; `faults`, each a `number_fault_task.Fault` whose sample is named by (step, rank, micro_batch, row);
`never_applied`, steps to be passed over; `ignored`, places of samples without a target; `kill_at`, a step;
`fp16_scale`: autocast to fp16, with a loss scale from there; `out`, a folder,
where each process leaves what it saw: a digest of its weights and moments after each step, and at the end.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_train.checkpoint.contents import model_tensors, optimizer_tensors
from accel_train.core.state import Rollback, StepResult
from accel_train.engine.run import Extensions, RunContext
from accel_train.observe.observer import Observer
from accel_train.optim.update import FlooredGradScaler
from accel_train.recipe.schema import Recipe
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run
from tests.support.processes import end_group
from tests.support.tasks.number_faults import Fault, FaultyLanguageModel, FaultyRegression
from tests.support.tasks.probe import ProbeTask

TASKS = {
    "tests.support.tasks.probe:ProbeTask": ProbeTask,
    "tests.support.tasks.number_faults:FaultyRegression": FaultyRegression,
    "tests.support.tasks.number_faults:FaultyLanguageModel": FaultyLanguageModel,
}


class Digests(Observer):
    """A digest of everything that is trained, as it is when a step has been made."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.run: RunContext | None = None
        self.by_step: dict[int, str] = {}
        self.skipped: list[int] = []
        self.losses: dict[int, float] = {}

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        assert self.run is not None
        # Batch norm's statistics are by now those of the next step's forward.
        self.by_step[result.step] = digest(self.run, buffers=False)
        self.losses[result.step] = result.loss
        if result.skipped:
            self.skipped.append(result.step)
        if result.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(run: RunContext, *, buffers: bool = True) -> str:
    """SHA-256 of weights, buffers, moments and step counters."""
    model = run.strategy.inner.model
    tensors: dict[str, Tensor] = (
        model_tensors(model) if buffers else {n: p.detach() for n, p in model.named_parameters()}
    )
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(run.strategy.optimizer).items()}
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(name.encode())
        content.update(tensors[name].numpy().tobytes())
    return content.hexdigest()


def sample_of(run: RunContext, fault: dict[str, Any]) -> int:
    """The sample that this process or another reads at a place of the order."""
    if "sample" in fault:
        return int(fault["sample"])
    sizes = run.sizes
    share = run.plan.order.rank_micro_batches(
        fault["step"] - 1, fault["rank"], sizes.world_size, sizes.per_device_batch_size
    )
    return share[fault["micro_batch"]][fault["row"]]


def use_fp16(run: RunContext, scale: float) -> None:
    """fp16 as on a GPU: autocast, and a loss scale that may not fall."""
    run.accelerator.scaler = FlooredGradScaler(
        "cpu", init_scale=scale, growth_interval=10**6, floor=run.plan.recipe.guard.fp16_scale_floor
    )
    forward = run.strategy.inner.forward

    def in_fp16(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return forward(*args, **kwargs)

    run.strategy.inner.forward = in_fp16  # type: ignore[method-assign]


def train_with_faults(plan: dict[str, Any]) -> tuple[RunContext, Digests, list[int]]:
    """All steps of the run; also the samples that were broken, in the order of the plan's faults."""
    watching = Digests(plan.get("kill_at"))
    recipe = Recipe.model_validate(plan["recipe"])
    task = TASKS[recipe.task]()
    run = prepare_run(recipe, task, Extensions(observers=(watching,)))
    watching.run = run
    if plan.get("fp16_scale"):
        use_fp16(run, plan["fp16_scale"])
    samples = [sample_of(run, fault) for fault in plan.get("faults", ())]
    keys = ("place", "name", "value", "once")
    faults = [
        Fault(sample, **{key: fault[key] for key in keys if key in fault})
        for sample, fault in zip(samples, plan.get("faults", ()), strict=True)
    ]
    if faults:
        task.put_in(faults, run.strategy.inner.model, run.plan.data)
    if "ignored" in plan:
        task.ignored = {sample_of(run, place) for place in plan["ignored"]}  # type: ignore[attr-defined]
    if "never_applied" in plan:
        run.state.rollbacks = [
            Rollback(number, step, step - 1, step, step) for number, step in enumerate(plan["never_applied"], start=1)
        ]
    with run.resources, run.stop:
        run_steps(run)
        run.saver.wait()
    return run, watching, samples


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.use_deterministic_algorithms(True)
    run, watching, samples = train_with_faults(plan)
    seen = {
        "final": digest(run),
        "by_step": watching.by_step,
        "skipped": watching.skipped,
        "losses": watching.losses,
        "samples": samples,
        "loss_scale": run.accelerator.scaler and run.accelerator.scaler.get_scale(),
    }
    (Path(plan["out"]) / f"rank-{run.accelerator.process_index}.json").write_text(json.dumps(seen))
    end_group()


if __name__ == "__main__":
    main()
