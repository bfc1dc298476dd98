"""Run rows of benchmarks/gpu.py on a pretended GPU, in this process: python rows.py FOLDER [WORD ...].

The models keep their kind, vocabulary, and layout of heads, but are small. What a CPU build of torch does not have is
left out: compilation, the profiler's trace, and random weights written from the GPU.
"""

import gc
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft  # noqa: F401 (it asks for streams of a CUDA build if there are GPUs)
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim import optimizer

import accel_train.training.setup  # noqa: F401 (its modules are patched)
from accel_train.engine.step import StepOutcome
from accel_train.training import build
from benchmarks import gpu, gpu_loops
from benchmarks.gpu_loops import MODELS, SETTINGS, Job, Model
from benchmarks.gpu_watch import Phases
from tests.cuda_pretended.pretend import Pretend, pretended_gpus

PHASES = Phases(2, 3, 1, 2)
WIDTH, HEADS, LENGTH, LAYERS, BATCH = 64, 4, 64, 2, 2
LOSS_SIZES = (64, 1024, 32, 2)


def small(model: Model) -> Model:
    """Return a small model of the same kind."""
    shape = replace(model.shape, width=WIDTH, num_heads=HEADS, block_size=LENGTH, num_layers=LAYERS)
    groups = 1 if model.llama is None else model.shape.num_heads // model.llama[1]
    return replace(model, shape=shape, batch_size=BATCH, llama=model.llama and (2 * WIDTH, max(1, HEADS // groups)))


class Profile:
    """A profiler that saw one kernel per step."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> None:
        events = [{"cat": "kernel", "name": "gemm", "ts": 10 * number, "dur": 5} for number in range(PHASES.profiled)]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def in_this_process(pretend: Pretend) -> Callable[..., SimpleNamespace]:
    """Return a stand-in of `run_child` that calls the module's own `main` with the same words."""

    def run_child(
        module: str, words: Sequence[str], *, environment: Mapping[str, str], timeout_seconds: float
    ) -> SimpleNamespace:
        assert all(isinstance(each, str) for each in [*environment, *environment.values(), *words])
        assert timeout_seconds > 0
        child, printed = importlib.import_module(module), []
        AcceleratorState._reset_state(True)
        pretend.counts = False
        with ExitStack() as stack:
            stack.callback(optimizer._global_optimizer_post_hooks.clear)
            stack.enter_context(mock.patch.object(sys, "argv", [module, *words]))
            stack.enter_context(mock.patch.object(child, "print_result", printed.append))
            try:
                child.main()
            except Exception:
                traceback.print_exc()
                raise
            finally:
                gc.collect()
        return SimpleNamespace(result=json.loads(json.dumps(printed[-1])))

    return run_child


def patches(pretend: Pretend) -> Iterator[Any]:
    """Yield the patches of everything but the GPU itself."""
    models = {name: small(model) for name, model in MODELS.items()}
    for module in (gpu, gpu_loops):
        yield mock.patch.object(module, "MODELS", models)
    yield mock.patch.object(gpu, "PHASES", {})
    yield mock.patch.object(gpu, "USUAL_PHASES", PHASES)
    yield mock.patch.dict(gpu.LOSS_SIZES, cuda=LOSS_SIZES)
    yield mock.patch.dict(SETTINGS, checkpoints={"checkpoint": {"every_steps": 4, "keep": 1}})
    yield mock.patch.object(gpu, "run_child", in_this_process(pretend))
    yield mock.patch.object(torch.profiler, "profile", Profile)

    def check_syncs(mode: str) -> None:
        pretend.counts = mode == "error"

    def wait(what: str) -> None:
        if pretend.counts and what != "torch.cuda.synchronize":
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")

    yield mock.patch.object(torch.cuda, "set_sync_debug_mode", check_syncs)
    yield mock.patch.object(pretend, "wait", wait)
    yield mock.patch.object(torch, "compile", lambda model=None, **_: model or (lambda function: function))
    yield mock.patch.object(nn.Module, "compile")
    write_base = gpu_loops.write_base

    def write_on_host(job: Job) -> None:
        write_base(replace(job, device="cpu"))

    yield mock.patch.object(gpu, "write_base", write_on_host)
    yield mock.patch.object(gpu_loops, "CHECKS", models)
    unpack = StepOutcome.unpack

    def with_targets(outcome: StepOutcome, num_counts: int) -> Any:
        *wires, counts = unpack(outcome, num_counts)
        return *(each._replace(num_targets=each.num_targets or 1) for each in wires), counts

    def alone(number: int) -> list[int]:
        return [number]

    # Pretended tensors cannot be swapped, so that the base is read whole.
    yield mock.patch.object(build, "check_plain_weights", side_effect=ValueError("pretended"))
    for module in [each for each in sys.modules.values() if "gather_number" in vars(each)]:
        yield mock.patch.object(module, "gather_number", alone)
    # All values read from the device are 0, and a step without labels would end the run.
    yield mock.patch.object(StepOutcome, "unpack", with_targets)


def main(folder: Path, words: Sequence[str]) -> None:
    """Run the rows whose names hold one of the words, all rows without words."""
    flags = ["--minutes", "60", "--row-minutes", "60", "--save", str(folder / "results")]
    with ExitStack() as stack:
        pretend = stack.enter_context(pretended_gpus(1))
        for each in patches(pretend):
            stack.enter_context(each)
        arguments = gpu.parse_arguments([*flags, *(["--only", *words] if words else [])])
        (folder / "rows").mkdir()
        gpu.run_rows(arguments, folder / "rows", sys.float_info.max)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
