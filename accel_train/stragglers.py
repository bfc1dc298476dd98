"""Whether one process keeps the others waiting: what each does by itself in a step, compared every some steps, off the hot path.

A step takes every process as long as it takes the slowest, so its wall time names nobody. What is compared is work that waits
for no other process: reading data (host time) and the forward (device time, by events that are read once they are ready; a
backward waits for the others' gradients, and is slow where the forward is). The figures of a window of steps travel in one small
collective, and are read a window later, so neither host nor device waits for them.
"""

import time
from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_train.data_group import data_group
from accel_train.run import Run

T = TypeVar("T")

MOST_EVENTS = 64
"""Forwards of a window that are timed on a GPU; the others count as these did."""
LEAST_SHARE = 0.1
"""Of a step: a process that keeps the others waiting for less is not worth a word."""


class Work(NamedTuple):
    """Seconds of a process in a step, on average over a window."""

    data: float
    """Reading its samples, or waiting for its own readers."""
    forward: float
    whole: float
    """The step from one batch to the next, waiting included."""

    @property
    def own(self) -> float:
        """What waits for no other process."""
        return self.data + self.forward


class Stopwatch:
    """Measures what this process does by itself, from one `take` to the next.

    The forward is timed from inside of DDP's, which may wait for the running statistics of the first process; with FSDP2 block
    by block, each once its weights are gathered, which is what a process waits for others in. Where processes split layers or
    sequences, or ZeRO's stage 3 gathers weights, it waits in the midst of computing, and compiled code cannot be timed so: what
    is slow is then seen where it is the data.
    """

    def __init__(self, timed: Sequence[nn.Module], device: torch.device) -> None:
        self.timed, self.device = timed, device
        self._begin: Any = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._since = time.perf_counter()
        self._data = self._forward = 0.0
        self._num_steps = self._num_forwards = self._num_timed = 0

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; while they are read, forwards in training are timed as well."""
        hooks = [
            hook
            for module in self.timed  # after FSDP2's own hook, which gathers weights, and before it lets go of them
            for hook in (
                module.register_forward_pre_hook(self._before),
                module.register_forward_hook(self._after, prepend=True),
            )
        ]
        try:
            begin = time.perf_counter()
            for batch in batches:
                self._data += time.perf_counter() - begin
                self._num_steps += 1
                yield batch
                begin = time.perf_counter()
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> Work:
        """What was measured since the last time, for a step on average."""
        now, steps = time.perf_counter(), max(self._num_steps, 1)
        pairs, self._pairs = self._pairs, []
        for begin, end in pairs:
            if end.query():
                self._note(begin.elapsed_time(end) / 1000)
            else:
                self._pairs.append((begin, end))  # the device is not as far as the host: counted next time
        forward = self._forward / max(self._num_timed, 1) * self._num_forwards
        work = Work(self._data / steps, forward / steps, (now - self._since) / steps)
        self._since, self._data, self._forward = now, 0.0, 0.0
        self._num_steps = self._num_forwards = self._num_timed = 0
        return work

    def _before(self, module: nn.Module, given: Any) -> None:
        if not module.training:
            return
        if self.device.type != "cuda":
            self._begin = time.perf_counter()
        elif len(self._pairs) < MOST_EVENTS:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()

    def _after(self, module: nn.Module, given: Any, result: Any) -> None:
        if not module.training:
            return
        self._num_forwards += 1
        begin, self._begin = self._begin, None
        if isinstance(begin, float):
            self._note(time.perf_counter() - begin)
        elif begin is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._pairs.append((begin, end))

    def _note(self, seconds: float) -> None:
        self._forward += seconds
        self._num_timed += 1


class StragglerWatch:
    """Compares the processes of a run; `compare` is called after every step, by all of them alike."""

    def __init__(self, run: Run) -> None:
        self.run, self.section = run, run.recipe.guard
        self.rank, self.world_size = run.accelerator.process_index, run.accelerator.num_processes
        self.is_on = self.section.straggler_factor is not None and self.world_size > 1
        self.stopwatch = Stopwatch(_computing_alone(run), run.accelerator.device)
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._arriving: tuple[torch.Tensor, Any] | None = None
        self._slow_rank, self._num_windows = -1, 0

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches, with what they take this process measured."""
        return self.stopwatch.reading(batches) if self.is_on else batches

    def compare(self, step: int) -> None:
        """Where a window of steps ends: send this process's figures, and judge all those of the window before."""
        if not self.is_on:
            return
        self._fetch()
        if step % self.section.straggler_window_steps == 0:
            if self._arriving is not None:
                host, event = self._arriving
                if event is not None:
                    event.synchronize()  # of a window ago
                self._judge([Work(*figures) for figures in host.tolist()], step)
            self._send(self.stopwatch.take())

    def _send(self, work: Work) -> None:
        numbers = torch.zeros(self.world_size, len(work), dtype=torch.float64)
        numbers[self.rank] = torch.tensor(work, dtype=torch.float64)
        if self.run.accelerator.device.type == "cuda":
            numbers = numbers.pin_memory().to(self.run.accelerator.device, non_blocking=True)
        self._sent = numbers, dist.all_reduce(numbers, async_op=True)

    def _fetch(self) -> None:
        """The step after a window's last has met the others, so that the figures are here: on their way to the host."""
        if self._sent is None:
            return
        (numbers, arrival), self._sent = self._sent, None
        arrival.wait()
        if numbers.device.type != "cuda":
            self._arriving = numbers, None
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._arriving = host, event

    def _judge(self, works: Sequence[Work], step: int) -> None:
        assert self.section.straggler_factor is not None, "asked before"
        rank = slowest(works, self.section.straggler_factor)
        self._num_windows = self._num_windows + 1 if rank is not None and rank == self._slow_rank else 1
        self._slow_rank = -1 if rank is None else rank
        if rank is None or self._num_windows != self.section.straggler_windows:  # said once, until it has caught up
            return
        peers = self.run.watchdog.peers if self.run.watchdog is not None else None
        what, here, elsewhere = slow_part(works, rank)
        window = self.section.straggler_window_steps
        said = (
            f"{peers.describe(rank) if peers is not None else f'rank {rank}'} keeps the others waiting: {what} takes it "
            f"{_milliseconds(here)} a step, and {_milliseconds(elsewhere)} elsewhere (median), in "
            f"{self._num_windows * window} steps up to {step - window}"
        )
        part = "data" if what == DATA else "compute"
        self.run.observer.on_event("straggler", step, said, rank=rank, slow=part, seconds=here, usual_seconds=elsewhere)


def _computing_alone(run: Run) -> Sequence[nn.Module]:
    """The modules of the forward that wait for no other process once they have begun; empty where each does."""
    compiled = run.choices["precision.compile"].value
    blocks = [each for each in list(run.inner.modules())[1:] if isinstance(each, FSDPModule)]
    is_traced = compiled == "model" or (compiled == "blocks" and bool(blocks))  # hooks would be compiled with it
    gathers = run.zero is not None and run.zero.spreads_weights
    if is_traced or gathers or data_group(run.accelerator).num_sharing > 1:
        return []
    return blocks or [run.inner]


DATA, COMPUTE = "reading data", "the forward"


def slowest(works: Sequence[Work], factor: float) -> int | None:
    """The process whose own work takes the longest, where that is `factor` times what is usual, and a part of the step.

    Usual is the median, the lower one of two: of two processes the faster one is the measure.
    """
    own = [work.own for work in works]
    usual, longest = median_low(own), max(own)
    is_slow = longest > factor * usual and longest - usual > LEAST_SHARE * max(work.whole for work in works)
    return own.index(longest) if is_slow else None


def slow_part(works: Sequence[Work], rank: int) -> tuple[str, float, float]:
    """Which part of its work a slow process loses its time with, its seconds, and the usual ones."""
    parts = [
        (name, seconds[rank], median_low(seconds))
        for name, seconds in ((DATA, [w.data for w in works]), (COMPUTE, [w.forward for w in works]))
    ]
    return max(parts, key=lambda part: part[1] - part[2])


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
