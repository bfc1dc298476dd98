"""What can be seen of a bad step without computing it again: its numbers as they were read, the weights, and the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.step import MicroBatch


def weights_not_finite(parts: Mapping[str, Tensor], shared_on: torch.device | None = None) -> list[str]:
    """Which weights hold a NaN or Inf, by name.

    Where each process holds a part of them, all call this at once, with the device that they talk on, and find the same.
    """
    named = {name: part for name, part in parts.items() if shared_on is not None or part.numel()}
    if not named:
        return []
    # max() of nothing is an error, and a process may hold nothing of a parameter.
    held = [part if part.numel() else part.new_zeros(1) for part in named.values()]
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(held, math.inf)])
    are_broken = ~torch.isfinite(largest)
    if shared_on is not None:
        broken_here = are_broken.to(shared_on, torch.float32)
        dist.all_reduce(broken_here, op=dist.ReduceOp.MAX)
        are_broken = broken_here > 0
    return [name for name, is_broken in zip(named, are_broken.tolist(), strict=True) if is_broken]


def describe_columns(batch: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape, kind, smallest and largest number of each tensor of a batch, and how many of them are NaN or Inf."""
    columns = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        facts: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        facts["not_finite"] = 0
        if value.numel() and not value.is_complex() and value.dtype != torch.bool:
            facts["not_finite"] = int((~torch.isfinite(value)).sum()) if value.is_floating_point() else 0
            facts |= {"min": value.min().item(), "max": value.max().item()}
        columns[name] = facts
    return columns


def describe_device(device: torch.device) -> str:
    """`cuda:3 (NVIDIA H200)`, `cpu`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


class SamplesOf:
    """A micro-batch, its samples by index, and parts of it."""

    def __init__(self, micro_batch: MicroBatch, indices: list[int] | None) -> None:
        self.batch, self.num_targets = micro_batch
        sizes = [value.shape[0] for value in self.batch.values() if isinstance(value, Tensor) and value.dim()]
        self.num_rows = len(indices) if indices else max(set(sizes), key=sizes.count, default=0)
        # Rows that are packed into one, say, cannot be told apart by cutting.
        self.can_be_cut = self.num_targets > 0 and self.num_rows > 0 and self.num_rows in sizes
        self.indices = indices or list(range(self.num_rows))

    def part(self, rows: Sequence[int]) -> MicroBatch:
        """These rows alone; what has no row a sample stays whole."""
        index = torch.as_tensor(rows)
        batch = {
            name: value.index_select(0, index.to(value.device))
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == self.num_rows
            else value
            for name, value in self.batch.items()
        }
        return batch, self.num_targets
