"""What a micro-batch of some size costs in memory: tried on the device by one process alone, or estimated without values."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.compiling import repeated_blocks
from accel_train.memory import is_out_of_memory
from accel_train.memory_estimate import PeakTracker, is_averaged, largest_samples, num_moments, simulate_step
from accel_train.recipe import Recipe
from accel_train.rerun import undisturbed
from accel_train.step import TrainingModule
from accel_train.task import Task, TaskData


class Cost(NamedTuple):
    """What a trial took, in bytes."""

    tensors: int
    """All that was alive at the worst moment: it grows in a line with the samples."""
    least_free: int | None = None
    """What the device had left then, freed memory that an allocator keeps counted as taken; None where that was not seen."""


@dataclass(frozen=True)
class Trials:
    """A training module as it was just built: on its device, in training mode, neither wrapped nor compiled.

    Nothing that it computes here waits for another process or leaves a trace.
    """

    recipe: Recipe
    task: Task
    data: TaskData
    inner: TrainingModule
    accelerator: Accelerator
    build_empty: Callable[[], nn.Module]
    """The model once more, on the meta device."""

    @property
    def device(self) -> torch.device:
        """What the run computes on."""
        return self.accelerator.device

    def collated(self, count: int) -> dict[str, Any]:
        """The micro-batch that takes the most memory."""
        batch = self.data.collate(largest_samples(self.data, self.recipe.seed, count))
        batch.pop("num_targets")
        return batch

    def measure(self, count: int) -> Cost | None:
        """Forward and backward of so many samples, beyond what is there; None where memory ran out.

        Twice, as with accumulation: memory that the first one has freed is in pieces, and not all of use to the second.
        """
        batch, device = self.collated(count), self.device
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
                free, _ = torch.cuda.mem_get_info(device)
                self._forward_backward(batch)
                self._forward_backward(batch)
                tensors = torch.cuda.max_memory_allocated(device) - before
                return Cost(tensors, free + reserved - torch.cuda.max_memory_reserved(device))
            with PeakTracker(None) as tracker, LeastFree() as seen:
                self._forward_backward(batch)
                self._forward_backward(batch)
            return Cost(tracker.peak.total(), seen.num_bytes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        finally:
            _let_go(device)
        return None

    def _forward_backward(self, batch: dict[str, Any]) -> None:
        there = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        with self.accelerator.autocast():
            loss_sum = self.inner(there)
        loss_sum.backward()

    def estimate(self, count: int) -> Cost:
        """The same, found by running the model without values.

        Raises:
            RuntimeError: the forward depends on values.
        """
        peak = simulate_step(
            self.task,
            self.build_empty(),
            self.collated(count),
            mixed_precision=self.accelerator.mixed_precision,
            like_cuda=self.device.type == "cuda",
        )
        return Cost(peak.total())

    @contextmanager
    def as_in_a_step(self) -> Iterator[None]:
        """Inside, memory holds what it does in a step beside activations: gradients, and a block as large as all that is
        still to come. Gradients, buffers and random numbers are put back."""
        kept = [(parameter, parameter.grad) for parameter in self.inner.parameters() if parameter.requires_grad]
        with undisturbed(self.inner, self.device):
            try:
                for parameter, _ in kept:
                    parameter.grad = torch.zeros_like(parameter)
                stand_in = torch.empty(self.bytes_to_come(), dtype=torch.uint8, device=self.device)
                yield
                del stand_in
            finally:
                for parameter, gradient in kept:
                    parameter.grad = gradient
                _let_go(self.device)

    def bytes_to_come(self) -> int:
        """Of what a step finds and a model that was just built has not: moments, averaged weights. DDP adds nothing, for its
        buckets are the gradients (gradient_as_bucket_view)."""
        section = self.recipe.optimizer
        trainable = sum(p.numel() * p.element_size() for p in self.inner.parameters() if p.requires_grad)
        return (num_moments(section) + is_averaged(section)) * trainable

    def bytes_when_spread(self) -> int:
        """Of a process's part of a model that FSDP2 spreads: weights, gradients, moments and averages, and what of it is whole at
        a time."""
        model = self.build_empty()
        section = self.recipe.parallel
        count = sum(parameter.numel() for parameter in model.parameters())
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        copies = 1 + num_moments(self.recipe.optimizer) + is_averaged(self.recipe.optimizer)
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in repeated_blocks(model)]
        num_parts = self.accelerator.num_processes
        if section.dp_shard_size != "auto":
            num_parts = section.dp_shard_size * section.tp_size
        part = 0 if section.cpu_offload else 4 * (count + copies * trainable) // num_parts
        # A block is gathered while the one before it computes; the rest of the model stays gathered.
        at_a_time = count - sum(blocks) + 2 * max(blocks, default=0)
        gathered = at_a_time if section.reshard_after_forward else count
        return part + 4 * gathered + 4 * at_a_time


class Room(NamedTuple):
    """What a device has for a process."""

    total: int
    """Bytes of the device, or of the process's address space."""
    free: int
    """Bytes of them that nothing holds."""


def room_of(device: torch.device) -> Room | None:
    """What the device has for this process now; None where there is no limit that an allocation could fail at.

    On a CPU that is a limit on the address space (RLIMIT_AS, `ulimit -v`). A container's limit is none: the kernel kills. The
    C library keeps what is freed, in pieces, so that there a step may run out where a trial did not; it is then halved.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Room(total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return Room(limit, limit - address_space("VmSize"))


def address_space(name: str) -> int:
    """Bytes of this process's address space, by proc(5): VmSize, or VmPeak, the most it ever had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class LeastFree:
    """How much of the address space was left at the worst moment inside, where that was the worst one so far."""

    num_bytes: int | None = None

    def __enter__(self) -> "LeastFree":
        self._before = 0 if room_of(torch.device("cpu")) is None else address_space("VmPeak")
        return self

    def __exit__(self, *error: object) -> None:
        room = room_of(torch.device("cpu"))
        if room is not None and address_space("VmPeak") > self._before:
            self.num_bytes = room.free + address_space("VmSize") - address_space("VmPeak")


def _let_go(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
