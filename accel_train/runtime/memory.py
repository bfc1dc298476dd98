"""Memory of a run: allocator settings, garbage collection, and the peak of each phase."""

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

GARBAGE_EVERY_STEPS = 1000
EMPTY_CACHE_ABOVE = 0.2
"""Share of the GPU's memory that must be idle in torch's cache before emptying it is worth the new allocations."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next step (mallopt(3)); return False without glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    trim_threshold, mmap_threshold, keep_bytes = -1, -3, 2**30
    return bool(mallopt(trim_threshold, keep_bytes) and mallopt(mmap_threshold, keep_bytes))


@contextmanager
def garbage_collected_at_steps() -> Iterator[None]:
    """Collect garbage only by `collect_garbage` inside the context. A process that stalls for it delays all others."""
    gc.collect()
    # Objects that live now live to the end, so collections can skip them.
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_garbage(step: int) -> None:
    """Collect garbage on every thousandth step, the same on all processes."""
    if step % GARBAGE_EVERY_STEPS == 0:
        gc.collect(1)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or on the host. torch reports this in several kinds of error."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    is_of_torch, text = isinstance(error, RuntimeError), str(error)
    return is_of_torch and ("out of memory" in text or "DefaultCPUAllocator: can't allocate" in text)


class PeakMemory:
    """The largest memory of each phase of a run, in bytes: allocated by tensors on a GPU, resident in RAM on a CPU.

    The kernel's peak of resident memory never falls. On a CPU, a phase therefore shows the largest value up to its end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}
        self._phases: list[str] = []

    @property
    def current_phase(self) -> str:
        """Name of the innermost phase; "" outside of any phase."""
        return self._phases[-1] if self._phases else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record memory inside the context under `name`. An inner phase does not count for the outer one."""
        self._note_peak()
        self._phases.append(name)
        try:
            yield
        finally:
            self._note_peak()
            self._phases.pop()

    def _note_peak(self) -> None:
        # MPS does not count its peak.
        of_gpu = torch.get_device_module(self.device) if self.device.type in ("cuda", "xpu") else None
        if name := self.current_phase:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            peak = of_gpu.max_memory_allocated(self.device) if of_gpu else resident
            self.peaks[name] = max(self.peaks.get(name, 0), peak)
        if of_gpu is None:
            return
        idle = of_gpu.memory_reserved(self.device) - of_gpu.memory_allocated(self.device)
        if idle > EMPTY_CACHE_ABOVE * of_gpu.get_device_properties(self.device).total_memory:
            of_gpu.empty_cache()
        of_gpu.reset_peak_memory_stats(self.device)
