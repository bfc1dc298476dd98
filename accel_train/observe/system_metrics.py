"""Measure what the machine does while a run trains: CPU, memory, and the GPU of the main process."""

import time
from collections.abc import Callable
from typing import Any

from accel_train.core.state import JsonRecord

LEAST_SECONDS = 1.0
"""Time between two samples at least."""
LARGEST_SHARE = 0.001
"""Largest share of the time that sampling may take: a slow driver is asked less often."""
OF_GPU: dict[str, tuple[str, float]] = {
    "gpu_percent": ("utilization", 1.0),
    "gpu_memory_bytes": ("device_memory_used", 1.0),
    "gpu_celsius": ("temperature", 1.0),
    "gpu_watts": ("power_draw", 0.001),  # of milliwatts
}
"""The function of torch.cuda that tells it, and its unit in ours. They need the package nvidia-ml-py."""


class SystemMetrics:
    """Samples the machine; `device` is the torch device of this process.

    A sample has `cpu_percent` (of all cores together, 0 to 100), `process_cpu_percent` (100 is one core), `memory_bytes` (used on
    this machine) and `process_memory_bytes` (resident, data workers left out); on a GPU those of `OF_GPU` that can be read, and
    `gpu_reserved_bytes` (by torch's allocator).
    """

    def __init__(self, device: Any, *, clock: Callable[[], float] = time.perf_counter) -> None:
        import psutil

        self._device, self._clock, self._next = device, clock, clock()
        self._process = psutil.Process()
        psutil.cpu_percent()  # the first call begins the interval of the next one
        self._process.cpu_percent()
        self._of_gpu = dict(OF_GPU) if device.type == "cuda" else {}

    def sample(self) -> JsonRecord:
        """Return the numbers since the last sample; empty where that was a moment ago."""
        began = self._clock()
        if began < self._next:
            return {}
        import psutil

        memory = psutil.virtual_memory()
        numbers: JsonRecord = {
            "cpu_percent": psutil.cpu_percent(),
            "process_cpu_percent": self._process.cpu_percent(),
            "memory_bytes": memory.total - memory.available,
            "process_memory_bytes": self._process.memory_info().rss,
            **self._gpu_numbers(),
        }
        cost = self._clock() - began
        self._next = began + max(LEAST_SECONDS, cost / LARGEST_SHARE)
        return numbers

    def _gpu_numbers(self) -> JsonRecord:
        if self._device.type != "cuda":
            return {}
        import torch

        numbers: JsonRecord = {"gpu_reserved_bytes": torch.cuda.memory_reserved(self._device)}
        for name, (function, unit) in list(self._of_gpu.items()):
            try:
                value = getattr(torch.cuda, function)(self._device) * unit
                numbers[name] = int(value) if name.endswith("_bytes") else float(value)
            except (
                Exception
            ):  # no nvidia-ml-py, or a driver or GPU that does not tell: it would not at the next sample either
                del self._of_gpu[name]
        return numbers
