"""Tokens and samples per second of a run, model FLOPs utilization, and machine load."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from accel_train.core.state import JsonRecord


def model_flops_per_token(
    num_parameters_without_position_embeddings: int,
    num_layers: int,
    hidden_size: int,
    sequence_length: int,
    *,
    num_frozen: int = 0,
) -> int:
    """Return the floating-point operations of one training token, forward and backward: 6 N - 2 F + 12 L D T.

    N is the number of parameters without position embeddings, and F the number of frozen ones. Gradients pass through
    frozen parameters but are not computed for them. L is the number of layers, D the hidden size, and T the context
    length in tokens. Recomputation does not count, and causal attention is not halved. Sources: PaLM (arXiv:2204.02311)
    appendix B; nanoGPT's `estimate_mfu`.
    """
    weights = 6 * num_parameters_without_position_embeddings - 2 * num_frozen
    return weights + 12 * num_layers * hidden_size * sequence_length


class Rates(NamedTuple):
    """Rates over an interval of training, or None if the interval took no time.

    `mfu` is also None if the model's operations or the hardware's peak are unknown.
    """

    tokens_per_second: float | None
    samples_per_second: float | None
    mfu: float | None
    """Model FLOPs utilization: operations that the model needs, divided by the peak of all devices (0 to 1)."""


class Meter:
    """A clock of training time that returns rates since the last log line or over the whole launch.

    Use `paused()` to leave out evaluation and checkpoints. All numbers cover the whole run, over all processes.

    Args:
        flops_per_token: result of `model_flops_per_token`. None if the model's shape is unknown; MFU is then None.
        peak_flops: operations per second of all devices together. None if unknown; MFU is then None.
        train_seconds: training time of earlier launches, from the checkpoint.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | None,
        peak_flops: float | None,
        train_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mfu_per_token_rate = flops_per_token / peak_flops if flops_per_token and peak_flops else None
        self._clock = clock
        self._seconds_before = train_seconds
        self._paused_since: float | None = None
        self._num_tokens = self._num_samples = 0
        self._window_tokens = self._window_samples = 0
        self._begin = self._window_begin = clock()

    def add(self, num_tokens: int, num_samples: int) -> None:
        self._num_tokens += num_tokens
        self._num_samples += num_samples

    @property
    def train_seconds(self) -> float:
        """Training time over all launches in seconds, without pauses."""
        return self.train_seconds_at(None)

    def train_seconds_at(self, time: float | None) -> float:
        """Return the training time in seconds up to `time` on the clock, or up to now if None.

        No pause may lie after `time`.
        """
        return self._seconds_before + (self._now() if time is None else time) - self._begin

    def window(self, *, restart: bool, until: float | None = None) -> Rates:
        """Return the rates since the last restart, up to `until` on the clock, or up to now if None.

        No pause may lie after `until`. `restart` begins the next window there.
        """
        now = self._now() if until is None else until
        rates = self._rates(
            self._num_tokens - self._window_tokens, self._num_samples - self._window_samples, now - self._window_begin
        )
        if restart:
            self._window_begin, self._window_tokens, self._window_samples = now, self._num_tokens, self._num_samples
        return rates

    def overall(self) -> Rates:
        """Return the rates of this launch, including its first steps (compilation, allocator warm-up)."""
        return self._rates(self._num_tokens, self._num_samples, self._now() - self._begin)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context for time that is not training. Pauses may be nested."""
        if self._paused_since is not None:
            yield
            return
        self._paused_since = self._clock()
        try:
            yield
        finally:
            pause_seconds = self._clock() - self._paused_since
            self._paused_since = None
            # Moving both origins by the pause has the effect of a clock that stood still.
            self._begin += pause_seconds
            self._window_begin += pause_seconds

    def _now(self) -> float:
        return self._clock() if self._paused_since is None else self._paused_since

    def _rates(self, num_tokens: int, num_samples: int, seconds: float) -> Rates:
        if seconds <= 0:
            return Rates(None, None, None)
        tokens_per_second = num_tokens / seconds
        mfu = None if self._mfu_per_token_rate is None else tokens_per_second * self._mfu_per_token_rate
        return Rates(tokens_per_second, num_samples / seconds, mfu)


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
        self._of_gpu = dict(OF_GPU)

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
