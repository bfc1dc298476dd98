"""Run steps of recipes on pretended GPUs, and print what they did as JSON: python drive.py CASES (a JSON file)."""

import gc
import json
import multiprocessing
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import peft  # noqa: F401 (it asks for streams of a CUDA build if there are GPUs)
import torch
from accelerate.state import AcceleratorState

from accel_train import Recipe
from accel_train.engine.run import Extensions
from accel_train.engine.step import StepOutcome
from accel_train.observe.observer import Observer
from accel_train.recovery import unused_parameters
from accel_train.runtime.signals import StopRequest
from accel_train.runtime.watchdog import Watchdog
from accel_train.tasks.sentence_embedding import losses
from accel_train.training import build
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run
from tests.cuda_pretended import SMALL_BYTES
from tests.cuda_pretended.pretend import Call, Pretend, pretended_gpus

WARM_STEPS, STEPS = 2, 4
"""Steps before the steady state, in which lazy state is made, and all steps."""


class Done(Exception):
    """All steps are done, and a run would go on."""


class Watch(Observer):
    """Counts the steps after the warm ones, and ends the run."""

    def __init__(self, pretend: Pretend) -> None:
        self.pretend = pretend

    def on_step_begin(self, step: int) -> None:
        if step == WARM_STEPS:
            self.pretend.counts, self.pretend.peak_bytes = True, self.pretend.live_bytes
        if step == STEPS:
            self.pretend.counts = False
            raise Done


def drive(sections: dict[str, Any], world_size: int, rank: int = 0, heard: Sequence[Any] = ()) -> Pretend:
    """Take the steps of a recipe as one process, and return what it did."""
    AcceleratorState._reset_state(True)
    recipe = Recipe.model_validate(sections)

    def everywhere(number: int) -> list[int]:
        return [number] * world_size

    def exchanged(count: int, device: torch.device) -> list[int]:
        exchange(count, device)
        return [count] * world_size

    def without_digests(_: Any, frozen: Any, *__: Any) -> dict[str, str]:
        return dict.fromkeys(frozen, "")

    def with_targets(outcome: StepOutcome, num_counts: int) -> Any:
        *wires, counts = unpack(outcome, num_counts)
        return *(each._replace(num_targets=each.num_targets or world_size) for each in wires), counts

    unpack, exchange = StepOutcome.unpack, losses._exchange_count
    with ExitStack() as stack:
        # All values read from the device are 0, and a step without labels would end the run.
        stack.enter_context(mock.patch.object(StepOutcome, "unpack", with_targets))
        pretend = stack.enter_context(pretended_gpus(world_size, rank, heard))
        # The other processes have as many texts.
        stack.enter_context(mock.patch.object(losses, "_exchange_count", exchanged))
        # Weights have no values to digest.
        stack.enter_context(mock.patch.object(build, "digests_of_base", without_digests))
        # The other processes use the weights that this one uses.
        here = mock.patch.object(unused_parameters, "_without_gradient", lambda strategy: strategy.without_gradient())
        stack.enter_context(here)
        for module in [each for each in sys.modules.values() if "gather_number" in vars(each)]:
            stack.enter_context(mock.patch.object(module, "gather_number", everywhere))
        watchdog = Watchdog(StopRequest(), Path(recipe.output_dir), 600.0, None)
        extensions = Extensions((Watch(pretend),), watchdog=watchdog, materialize=False)
        run = prepare_run(recipe, extensions=extensions)
        try:
            with run.resources:
                run_steps(run)
        except Done:
            pass  # raised by `Watch` at the end of the last step
    return pretend


def steady(pretend: Pretend) -> dict[str, Any]:
    """Return waits, collectives, and peak memory of the steps in the steady state."""
    steps = STEPS - WARM_STEPS
    traffic: dict[str, list[float]] = {}
    for kind, num_bytes in pretend.collectives:
        if num_bytes <= SMALL_BYTES:
            continue
        of_kind = traffic.setdefault(kind, [0, 0])
        of_kind[0] += 1 / steps
        of_kind[1] += num_bytes / steps
    return {
        "waits": pretend.waits, "traffic": traffic, "on_host": pretend.on_host, "peak_bytes": pretend.peak_bytes,
        "between_hosts": {kind: count / steps for kind, count in pretend.between_hosts.items()},
    }  # fmt: skip


def difference(main: Sequence[Call], other: Sequence[Call] | str, rank: int) -> str:
    """Return the first collective in which another process differs from rank 0, or an empty string.

    All processes call the same kinds with as many others, so groups that they do not share are compared too. The bytes
    of an all-to-all may differ.
    """
    if isinstance(other, str):
        return other
    for number, (one, two) in enumerate(zip_longest(main, other)):
        is_same = one is not None and two is not None and (one.kind, len(one.ranks)) == (two.kind, len(two.ranks))
        if not is_same or (one.num_bytes != two.num_bytes and one.kind != "all-to-all"):
            return f"collective {number}: rank 0 calls {one}, rank {rank} {two}"
    return ""


def start_last(sections: dict[str, Any], world_size: int) -> Any:
    """Start a process that is the last one of a run; return the pipe to it.

    It receives what rank 0 broadcasts, and sends its calls or an error. It begins before this process takes a step,
    because torch keeps names of groups, and other processes do not know the groups of rank 0.
    """
    here, there = multiprocessing.get_context("fork").Pipe()

    def take_steps() -> None:
        try:
            there.send(drive(sections, world_size, world_size - 1, there.recv()).calls)
        except Exception as problem:
            there.send("".join(traceback.format_exception(problem)))

    multiprocessing.get_context("fork").Process(target=take_steps, daemon=True).start()
    return here


def run_cases(path: Path) -> None:
    """Run each case, {name: [world size, recipe, whether to compare]}, and print a line with its name and findings."""
    cases = json.loads(path.read_text())
    others = {name: start_last(sections, size) for name, (size, sections, compares) in cases.items() if compares}
    for name, (world_size, sections, _) in cases.items():
        try:
            main = drive(sections, world_size)
            found = steady(main)
            if name in others:
                others[name].send(main.sent)
                found["difference"] = difference(main.calls, others[name].recv(), world_size - 1)
        except Exception as problem:
            found = {"error": "".join(traceback.format_exception(problem))}
        print(json.dumps({"case": name, **found}), flush=True)
        gc.collect()


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]))
