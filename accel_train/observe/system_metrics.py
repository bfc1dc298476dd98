"""Measure the machine during training: CPU, memory, and the main process's GPU."""

import time
from collections.abc import Callable
from typing import Any

from accel_train.core.state import JsonRecord

LEAST_SECONDS = 1.0
"""Minimum time between two samples, in seconds."""
LARGEST_SHARE = 0.001
"""Maximum share of the run's time that sampling may take. A slow driver is sampled less often."""
OF_GPU: dict[str, tuple[str, float]] = {
    "gpu_percent": ("utilization", 1.0),
    "gpu_memory_bytes": ("device_memory_used", 1.0),
    "gpu_celsius": ("temperature", 1.0),
    # torch returns milliwatts.
    "gpu_watts": ("power_draw", 0.001),
}
"""Functions of torch.cuda that measure each metric, with the factor to our unit. They need the package nvidia-ml-py."""


class SystemMetrics:
    """A sampler of machine metrics. `device` is the torch device of this process.

    A sample always has four numbers:

    - `cpu_percent`: load of all cores together, 0 to 100.
    - `process_cpu_percent`: load of this process, where 100 is one core.
    - `memory_bytes`: memory in use on this machine.
    - `process_memory_bytes`: resident memory of this process, without data workers.

    On a GPU it also has `gpu_reserved_bytes` (reserved by torch's allocator) and the metrics of `OF_GPU` that can be
    read.
    """

    def __init__(self, device: Any, *, clock: Callable[[], float] = time.perf_counter) -> None:
        import psutil

        self._device, self._clock, self._next = device, clock, clock()
        self._process = psutil.Process()
        # The first call starts the interval that the next call measures.
        psutil.cpu_percent()
        self._process.cpu_percent()
        self._of_gpu = dict(OF_GPU) if device.type == "cuda" else {}

    def sample(self) -> JsonRecord:
        """Return the metrics since the last sample, or an empty dict if that sample is too recent."""
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
            # Without nvidia-ml-py or support by the driver or GPU, later samples would fail too.
            except Exception:
                del self._of_gpu[name]
        return numbers
