"""Report the cost of torch.compile: seconds of the first step, cache state, graphs, and recompilations."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from accel_train.core.state import StepResult
from accel_train.engine.run import RunContext
from accel_train.observe.goodput import LaunchClock
from accel_train.observe.observer import Observer
from accel_train.runtime.private import watch_compiling


def watch_compiler(run: RunContext, observer: Observer, clock: LaunchClock) -> tuple[Observer, ...]:
    """Return a `CompileWatch` that reports to `observer`, in a tuple.

    The tuple is empty if the run does not compile, and on all but the main process.
    """
    is_on = "compile_cache" in run.plan.choices and run.accelerator.is_main_process
    return (CompileWatch(run, observer, clock),) if is_on else ()


class CompileWatch(Observer):
    """Observer that emits one event after the first step of a start, and one for each later step that recompiled.

    A step is seen after the forward of the next step, so the first event counts the graphs of two steps. Graphs of
    evaluations are not counted: an evaluation computes without gradients and so compiles separate graphs.
    """

    def __init__(self, run: RunContext, observer: Observer, clock: LaunchClock) -> None:
        self._clock, self._unwatch = clock, ExitStack()
        self._graphs, self._observer = run.graphs, observer
        self._folder = Path(run.plan.choices["compile_cache"].value)
        self._begin, self._num_files, self._num_graphs = perf_counter(), count_files(self._folder), 0
        self._is_first = True

    def __enter__(self) -> Self:
        self._unwatch.enter_context(watch_compiling(lambda: self._clock.enter("compile"), self._clock.leave))
        return self

    def __exit__(self, *_: object) -> None:
        self._unwatch.close()

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Record the time of the start."""
        if kind in ("start", "resume"):
            self._begin = perf_counter()

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        """Exclude the time and the graphs of an evaluation."""
        self._begin, self._num_graphs = perf_counter(), self._graphs.num_graphs

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Emit the event of the first step, or of a step that recompiled."""
        num_new, self._num_graphs = self._graphs.num_graphs - self._num_graphs, self._graphs.num_graphs
        if self._is_first:
            self._is_first = False
            seconds = (result.ended or perf_counter()) - self._begin
            num_files = max(0, count_files(self._folder) - self._num_files)
            found = f"cold: {num_files} new files of compiled code" if num_files else "warm: compiled code was there"
            message = f"the first step took {seconds:.1f} s ({found}); {_graphs(num_new)}"
            facts: dict[str, Any] = {
                "first_step_seconds": round(seconds, 3),
                "warm": not num_files,
                "num_graphs": num_new,
            }
            self._observer.on_event("compiled", result.step, message, **facts)
        elif num_new:
            message = f"{_graphs(num_new)} compiled again: the inputs are of another shape or type than before"
            self._observer.on_event("recompiled", result.step, message, num_graphs=num_new)


def count_files(folder: Path) -> int:
    """Return the number of files below a folder; 0 if it does not exist."""
    return sum(len(files) for _, _, files in os.walk(folder))


def _graphs(count: int) -> str:
    return f"{count} graph{'s' * (count != 1)}"
