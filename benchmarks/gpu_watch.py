"""Measures a training run on a GPU from outside: torch's hook after every optimizer step switches
the parts on and off.
"""

import json
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MOST_KERNELS = 20
"""Names of kernels that a row lists with their milliseconds a step."""


@dataclass(frozen=True)
class Phases:
    """Steps of each part of a run, in this order."""

    warmup: int
    timed: int
    profiled: int
    checked: int

    @property
    def total(self) -> int:
        return self.warmup + self.timed + self.profiled + self.checked


class Measured(BaseException):
    """Ends a run when everything is measured: no variant spends minutes on a last checkpoint."""


class StepWatch:
    """Counts optimizer steps and switches the measurements on and off between them."""

    def __init__(self, phases: Phases, device: torch.device, trace_file: Path) -> None:
        self.cuda = device.type == "cuda"
        self.phases, self.trace_file = phases, trace_file
        self.steps = 0
        self.begin_seconds = time.perf_counter()
        self.marks: list[Any] = []
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if self.cuda else None
        self.result: dict[str, Any] = {"sync": "not checked"}

    def after_step(self, *_: Any) -> None:
        self.steps += 1
        phases = self.phases
        timed_from, timed_to = phases.warmup, phases.warmup + phases.timed
        profiled_to = timed_to + phases.profiled
        if self.steps == 1:
            self.result["first_step_seconds"] = time.perf_counter() - self.begin_seconds
        if self.steps == timed_from and self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if timed_from <= self.steps <= timed_to:
            self.marks.append(self._mark())
        if self.steps == timed_to:
            self._end_timing()
            if self.profiler is not None:
                self.profiler.start()
        if self.steps == profiled_to:
            self._end_profile()
            self._check_syncs("error")
        if self.steps == phases.total:
            self._check_syncs("default")
            raise Measured

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) if self.cuda else (second - first) * 1e3

    def _end_timing(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            self.result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        steps = [self._milliseconds(a, b) for a, b in zip(self.marks[:-1], self.marks[1:], strict=True)]
        self.result["step_ms"] = statistics.median(steps)
        self.result["stall_ms"] = max(steps) - self.result["step_ms"]
        self.result["step_ms_mean"] = self._milliseconds(self.marks[0], self.marks[-1]) / len(steps)

    def _end_profile(self) -> None:
        if self.profiler is None:
            return
        torch.cuda.synchronize()
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(self.trace_file))
        events = json.loads(self.trace_file.read_text())["traceEvents"]
        self.result |= gpu_idle(events, self.phases.profiled)
        self.trace_file.unlink()

    def _check_syncs(self, mode: str) -> None:
        if self.cuda:
            torch.cuda.set_sync_debug_mode(mode)
            self.result["sync"] = "checking" if mode == "error" else "none"


def gpu_idle(events: Sequence[Mapping[str, Any]], num_steps: int) -> dict[str, Any]:
    """Idle share, kernels per step, and the kernels that take longest, from the events of a chrome trace.

    Kernels may overlap, so intervals are merged.
    """
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in on_gpu)
    assert spans, "the profiler saw no kernel"
    busy, begin, end = 0.0, *spans[0]
    for start, stop in spans[1:]:
        if start > end:
            busy += end - begin
            begin = start
        end = max(end, stop)
    busy += end - begin
    times: Counter[str] = Counter()
    for event in on_gpu:
        times[str(event["name"])[:120]] += event["dur"]
    longest = {name: round(us / 1e3 / num_steps, 3) for name, us in times.most_common(MOST_KERNELS)}
    return {
        "gpu_idle": 1 - busy / (end - spans[0][0]),
        "kernels_per_step": len(spans) / num_steps,
        "longest_kernels_ms": longest,
    }


def synchronizing_line(error: BaseException | None) -> str | None:
    """The Python line outside torch that made the host wait for the GPU; None when the error is another one."""
    while error is not None:
        if "synchronizing CUDA operation" in str(error):
            frames = traceback.extract_tb(error.__traceback__)
            outside = [frame for frame in frames if "/torch/" not in frame.filename] or list(frames)
            frame = outside[-1]
            return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.line}"
        error = error.__cause__ or error.__context__
    return None
