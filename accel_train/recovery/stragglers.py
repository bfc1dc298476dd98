"""Find the process that slows down the others, and its slow part of a step.

A step takes equally long on every process, so the step time does not reveal the slow process. The watch compares the
time in which a process does not wait for others: waiting for data, by the host's clock, and the forward. On a GPU, the
device's events around the forward are read once they have passed. A backward is not timed: it waits for the gradients
of the others, and it is slow if the forward is slow. The averages of a window of steps travel in one small collective.
They are read one window later, so the host does not wait for the device.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median_low
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.engine.run import RunContext

T = TypeVar("T")

LEAST_SHARE = 0.1
"""Minimum wait of the others for a slow process to be named, as a share of a step."""
DATA, COMPUTE = "reading data", "the forward"


class Work(NamedTuple):
    """Seconds of a process per step, averaged over a window."""

    data: float  # reading its samples, or waiting for its data workers
    forward: float  # 0 if the forward is not timed
    whole: float  # from one batch to the next, including waits for other processes

    @property
    def own(self) -> float:
        """Return the seconds in which the process does not wait for other processes."""
        return self.data + self.forward


class HostEvent:
    """A point in time by the host's clock, with the methods of a device's event."""

    def __init__(self, *, enable_timing: bool) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        """Set the time to now."""
        self._seconds = perf_counter()

    def query(self) -> bool:
        """Return True: the host has passed the event."""
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Return the milliseconds from this event to `end`."""
        return 1000 * (end._seconds - self._seconds)


class StragglerWatch:
    """Comparison of the processes of a run. Off with one process, and with `guard.straggler_factor: none`."""

    def __init__(self, run: RunContext) -> None:
        self.run, self.section = run, run.plan.recipe.guard
        self.is_on = self.section.straggler_factor is not None and run.accelerator.num_processes > 1
        self._since, device = perf_counter(), run.accelerator.device.type
        self._event: Any = HostEvent if device == "cpu" else torch.get_device_module(device).Event
        self._begin: Any = None
        self._forwards: deque[tuple[Any, Any]] = deque()
        self._data = self._forward = 0.0
        self._num_steps = 0
        self._sent: Tensor | None = None
        self._slow_rank, self._num_windows = -1, 0

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Return the same batches and measure the wait for each. While they are read, forwards are also timed."""
        return self._timed(batches) if self.is_on else batches

    def compare(self, step: int) -> None:
        """At the end of a window of steps, send this process's averages and compare the previous window's.

        All processes must call it after every step.
        """
        if not self.is_on or step % self.section.straggler_window_steps:
            return
        arrived, self._sent = self._sent, self._send(self.take())
        if arrived is not None:  # its copy to the host was queued at least two steps ago, so it has arrived
            self._name_straggler([Work(*seconds) for seconds in arrived.tolist()], step)

    def take(self) -> Work:
        """Return the averages since the last call."""
        self._read_events()
        now, steps = perf_counter(), max(self._num_steps, 1)
        work = Work(self._data / steps, self._forward / steps, (now - self._since) / steps)
        self._since, self._data, self._forward, self._num_steps = now, 0.0, 0.0, 0
        return work

    def _timed(self, batches: Iterator[T]) -> Iterator[T]:
        hooks = []
        for module in timed_modules(self.run):  # after FSDP2's hook that gathers weights, and before it frees them
            hooks += [
                module.register_forward_pre_hook(self._before),
                module.register_forward_hook(self._after, prepend=True),
            ]
        try:
            begin = perf_counter()
            for batch in batches:
                self._data += perf_counter() - begin
                self._num_steps += 1
                self._read_events()
                yield batch
                begin = perf_counter()
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self._begin = self._event(enable_timing=True)
        self._begin.record()

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training:
            end = self._event(enable_timing=True)
            end.record()
            self._forwards.append((self._begin, end))

    def _read_events(self) -> None:
        """Add the forwards that the device has computed. Those of the last step are usually left for the next call."""
        while self._forwards and self._forwards[0][1].query():
            begin, end = self._forwards.popleft()
            self._forward += begin.elapsed_time(end) / 1000

    def _send(self, work: Work) -> Tensor:
        accelerator = self.run.accelerator
        seconds = torch.zeros(accelerator.num_processes, len(work), device=accelerator.device)
        for place, value in enumerate(work):
            # `value` is passed as a kernel argument, so the host does not wait for a copy.
            seconds[accelerator.process_index, place] = value
        dist.all_reduce(seconds)
        return seconds.to("cpu", non_blocking=True)

    def _name_straggler(self, works: Sequence[Work], step: int) -> None:
        """Report the slow process once it has been slow in enough consecutive windows."""
        assert self.section.straggler_factor is not None, "it is on"
        rank = slowest(works, self.section.straggler_factor)
        self._num_windows = self._num_windows + 1 if rank is not None and rank == self._slow_rank else 1
        self._slow_rank = -1 if rank is None else rank
        if rank is None or self._num_windows != self.section.straggler_windows:  # report once, until it catches up
            return
        heartbeats = self.run.watchdog.heartbeats
        who = heartbeats.describe(rank) if heartbeats is not None else f"rank {rank}"
        part, here, elsewhere = slow_part(works, rank)
        window = self.section.straggler_window_steps
        message = (
            f"{who} slows down the other processes: {part} takes {1000 * here:.3g} ms per step (median of all "
            f"processes: {1000 * elsewhere:.3g} ms), in {self._num_windows * window} steps up to {step - window}"
        )
        slow = "data" if part == DATA else "compute"
        self.run.observer.on_event(
            "straggler", step, message, rank=rank, slow=slow, seconds=here, usual_seconds=elsewhere
        )


def timed_modules(run: RunContext) -> Sequence[nn.Module]:
    """Return the modules whose forward is timed.

    The result is empty for compiled code, because the compiled code would contain the hooks.
    """
    modules, compiled = run.strategy.independent_modules(), run.plan.choices["precision.compile"].value
    is_compiled = compiled == "model" or (compiled == "blocks" and modules != [run.strategy.inner])
    return [] if is_compiled else modules


def slowest(works: Sequence[Work], factor: float) -> int | None:
    """Return the process with the most work if it is slow; otherwise None.

    A process is slow if its work exceeds `factor` times the median, and exceeds the median by `LEAST_SHARE` of a step.
    With two processes, the faster process counts as the median.
    """
    own = [work.own for work in works]
    usual, longest = median_low(own), max(own)
    is_slow = longest > factor * usual and longest - usual > LEAST_SHARE * max(work.whole for work in works)
    return own.index(longest) if is_slow else None


def slow_part(works: Sequence[Work], rank: int) -> tuple[str, float, float]:
    """Return the part of the work in which a slow process loses time, its seconds, and the median seconds."""
    every = ((DATA, [work.data for work in works]), (COMPUTE, [work.forward for work in works]))
    parts = [(name, seconds[rank], median_low(seconds)) for name, seconds in every]
    return max(parts, key=lambda part: part[1] - part[2])
