"""The place of a planned run: nodes, groups of processes that share a model, and a local or named device."""

import os
from dataclasses import dataclass, replace

import torch

from accel_train.core.hardware import has_float8, known_gpu, peak_flops
from accel_train.core.state import Choice
from accel_train.parallel.dims import choose_sequences
from accel_train.parallel.precision import choose_mixed_precision, precision_on_gpu
from accel_train.parallel.strategies import open_strategy
from accel_train.parallel.strategy import Strategy
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Recipe
from accel_train.runtime.process_group import has_accelerator

USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Layout:
    """A layout of processes on nodes. Processes that share a model copy are neighbors, as in Accelerate's mesh."""

    world_size: int
    gpus_per_node: int
    strategy: Strategy
    reason: str

    @property
    def shard_size(self) -> int:
        """Number of processes that share one copy of the model by rows.

        1 if each process holds the whole model, or if ZeRO shards it.
        """
        return self.strategy.shard_size

    @property
    def tp_size(self) -> int:
        """Number of neighboring processes that split each layer."""
        return self.strategy.section.tp_size

    @property
    def sp_size(self) -> int:
        """Number of neighboring processes that split each sequence."""
        return self.strategy.section.sp_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes, all of them full."""
        return self.world_size // self.gpus_per_node

    @property
    def num_copies(self) -> int:
        """Number of copies of the model whose gradients are averaged."""
        return self.world_size // (self.shard_size * self.tp_size)


def choose_layout(section: Parallel, world_size: int, device_type: str, gpus_per_node: int | None = None) -> Layout:
    """Return the layout of `world_size` processes on nodes of `gpus_per_node`.

    By default a node has 8 GPUs, or the next smaller number that the processes fill.

    Raises:
        ValueError: the processes do not fill the nodes, or a run would refuse this sharding.
    """
    filled = [n for n in range(min(USUAL_GPUS_PER_NODE, world_size), 0, -1) if world_size % n == 0]
    size = filled[0] if gpus_per_node is None else gpus_per_node
    if size < 1:
        raise ValueError(f"--gpus-per-node={size}: must be at least 1")
    if world_size % size:
        fitting = ", ".join(map(str, filled))
        raise ValueError(
            f"--gpus-per-node={size}: {world_size} processes do not fill nodes of this size. Use {fitting}"
        )
    strategy = open_strategy(section, world_size, torch.device(device_type))
    sequences = choose_sequences(section, world_size, size)
    reason = strategy.choice.reason + (f"; {sequences.reason}" if sequences.value > 1 else "")
    return Layout(world_size, size, strategy, reason)


@dataclass(frozen=True)
class Hardware:
    """The hardware of a plan, from the command's flags."""

    gpus_per_node: int | None = None
    interconnect: str | None = None
    mfu: float | None = None
    mtbf_hours: float | None = None
    """Mean time between two failures of the whole run, in hours. Default: None, a published rate."""


@dataclass(frozen=True)
class Place:
    """The layout of the processes, and the device and precision of each."""

    device: str
    """Name of a GPU, or `cpu`."""
    device_bytes: int | None
    """Memory of that GPU in bytes, or None if unknown."""
    precision: Choice[str]
    peak_flops: float | None
    """Peak of one GPU in this precision, in FLOP/s, or None if unknown."""
    layout: Layout
    hardware: Hardware

    @property
    def device_type(self) -> str:
        """Type of the device in torch's terms: `cpu` or `cuda`."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the forward pass."""
        return 4 if self.precision.value == "no" else 2


def count_processes(world_size: int | None, gpu: str | None) -> int:
    """Return the number of processes: from the flag, the launcher, or the accelerators of this machine, in this order.

    Without a flag and a launcher, a GPU that is only named counts as one process.
    """
    launched = int(os.environ.get("WORLD_SIZE") or 0)
    return world_size or launched or (1 if gpu or not has_accelerator() else max(1, torch.accelerator.device_count()))


def choose_place(recipe: Recipe, world_size: int, gpu: str | None, hardware: Hardware) -> Place:
    """Return the device, the layout of the processes, and the precision, chosen as in a run on that device.

    Raises:
        ValueError: the processes cannot be laid out like this, or the device does not support the precision.
    """
    device, device_bytes = _device(gpu)
    section = recipe.precision
    device_type = "cpu" if device == "cpu" else "cuda"
    layout = choose_layout(recipe.parallel, world_size, device_type, hardware.gpus_per_node)
    if gpu:
        has_bf16 = peak_flops(gpu, "bf16") is not None
        precision = precision_on_gpu(section.mixed_precision, gpu, has_bf16=has_bf16, has_fp8=has_float8(gpu))
    else:
        precision = choose_mixed_precision(section, torch.device(device_type))
    precision = layout.strategy.precision(precision)
    if precision.value == "fp8":
        precision = replace(precision, reason=f"{precision.reason}; time and memory are planned as for bf16")
    of_fp32 = "tf32" if section.tf32 is True else "fp32"
    dtype = {"no": of_fp32, "fp8": "bf16"}.get(precision.value, precision.value)
    return Place(device, device_bytes, precision, peak_flops(device, dtype), layout, hardware)


def _device(gpu: str | None) -> tuple[str, int | None]:
    if gpu is not None:
        return gpu, round(known_gpu(gpu).memory_gib * 2**30) or None
    if not torch.cuda.is_available():
        return "cpu", None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory
