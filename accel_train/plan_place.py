"""Where a planned run would be: so many processes, on the device that is here or on one that is only named."""

import os
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from accel_train.observe.throughput import PEAK_TFLOPS, peak_flops
from accel_train.precision import choose_mixed_precision
from accel_train.recipe import Precision, Recipe
from accel_train.scale.estimate import Hardware
from accel_train.scale.hardware import gpu_facts
from accel_train.scale.layout import Layout, choose_layout
from accel_train.sharding import precision_when_gathered
from accel_train.state import Choice


@dataclass(frozen=True)
class Place:
    """Processes and what each of them computes on."""

    device: str
    """The name of a GPU, or `cpu`."""
    device_bytes: int | None
    """Memory of that GPU, where it is known."""
    precision: Choice[str]
    peak_flops: float | None
    """Of one GPU, in this precision; None where it is not known."""
    layout: Layout
    hardware: Hardware

    @property
    def device_type(self) -> str:
        """As torch calls it."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def compute_bytes(self) -> int:
        """Of a number that the forward computes with."""
        return 4 if self.precision.value == "no" else 2


def count_processes(world_size: int | None, gpu: str | None) -> int:
    """Those asked for; else those of the launcher; else one for a GPU that is only named, and the GPUs here."""
    launched = int(os.environ.get("WORLD_SIZE") or 0)
    return world_size or launched or (1 if gpu else max(1, torch.cuda.device_count()))


def choose_place(recipe: Recipe, world_size: int, gpu: str | None, hardware: Hardware) -> Place:
    """The device, the layout of the processes and the precision, chosen as a run there would.

    Raises:
        ValueError: the processes cannot be laid out like this, or the device has not that precision.
    """
    device, device_bytes = _device(gpu)
    section = recipe.precision
    device_type = "cpu" if device == "cpu" else "cuda"
    layout = choose_layout(recipe.parallel, world_size, device_type, hardware.gpus_per_node)
    precision = _precision_on(section, gpu) if gpu else choose_mixed_precision(section, _local_device())
    precision = precision_when_gathered(recipe.parallel, layout.shard_size, precision)
    peak = peak_flops(device, _peak_dtype(section, precision.value))
    return Place(device, device_bytes, precision, peak, layout, hardware)


def _local_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _device(gpu: str | None) -> tuple[str, int | None]:
    if gpu is not None:
        facts = gpu_facts(gpu)
        if facts is None and peak_flops(gpu, "fp32") is None:
            near = get_close_matches(gpu, PEAK_TFLOPS, n=3, cutoff=0.4)
            meant = f"did you mean {' or '.join(near)}?" if near else "H100 and A100 are two"
            raise ValueError(f"--gpu {gpu} is not among the GPUs whose peak is known; {meant}")
        return gpu, None if facts is None else round(facts.memory_gib * 2**30)
    if not torch.cuda.is_available():
        return "cpu", None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory


def _precision_on(section: Precision, gpu: str) -> Choice[str]:
    """As `precision.choose_mixed_precision`, for a GPU that is not here: decided by the table of peaks."""
    asked = section.mixed_precision
    is_known, has_bf16 = peak_flops(gpu, "fp32") is not None, peak_flops(gpu, "bf16") is not None
    if asked == "bf16" and is_known and not has_bf16:
        raise ValueError(f"precision.mixed_precision=bf16 is only emulated, slowly, by {gpu}; use fp16 or auto")
    if asked != "auto":
        return Choice(asked, "as the recipe says")
    if is_known:
        return Choice("bf16", f"{gpu} computes bf16") if has_bf16 else Choice("fp16", f"{gpu} has no bf16")
    return Choice("bf16", f"assumed: {gpu} is not among the known GPUs")


def _peak_dtype(section: Precision, mixed_precision: str) -> str:
    if mixed_precision == "no":
        return "tf32" if section.tf32 is True else "fp32"
    return "bf16" if mixed_precision == "bf16" else "fp16"
