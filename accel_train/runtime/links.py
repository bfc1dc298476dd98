"""Transfers between the processes of a run, checked and timed: the collectives of the trainer, and each pair."""

import statistics
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from accel_train.core.hardware import GB
from accel_train.runtime.process_group import start_processes, wait_for_all

REPETITIONS = 10
SENT = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""Parts of n that each of n processes sends n - 1 times, by collective. A broadcast and a pair send the whole once."""


def transfers(num_processes: int) -> dict[str, tuple[int, ...]]:
    """Return the transfers to measure by name, with the ranks of sender and receiver; empty for a collective."""
    pairs = combinations(range(num_processes), 2)
    return {**dict.fromkeys((*SENT, "broadcast"), ()), **{f"rank {a} to {b}": (a, b) for a, b in pairs}}


def bus_gb_per_second(name: str, num_bytes: int, seconds: float, num_processes: int) -> float:
    """Return the bus bandwidth of a transfer, as nccl-tests defines it: the rate of its busiest link in one direction.

    `num_bytes` is the size of the whole tensor, such as the result of an all-gather.
    """
    factor = SENT[name] * (num_processes - 1) / num_processes if name in SENT else 1
    return num_bytes * factor / seconds / GB


def measure(name: str, pair: tuple[int, ...], num_bytes: int, folder: Path) -> None:
    """Check and time a transfer on this process. Write the median seconds to the file NAME-RANK in `folder`.

    All processes call this, and those outside of a pair only wait for the others. `num_bytes` must be divisible by
    four times their number.

    Raises:
        RuntimeError: this process received wrong values.
    """
    processes = start_processes()
    wait_for_all()
    rank, size, device = processes.process_index, processes.num_processes, processes.device
    if pair and rank not in pair:
        return
    ones, zeros = torch.ones(num_bytes // 4, device=device), torch.zeros(num_bytes // 4, device=device)
    part = len(ones) // size
    # Each function, the tensor that it fills, and its other argument. A sender's tensor stays as it is.
    calls: dict[str, Any] = {
        "all-reduce": (dist.all_reduce, ones),
        "all-gather": (dist.all_gather_into_tensor, zeros, ones[:part]),
        "reduce-scatter": (dist.reduce_scatter_tensor, zeros[:part], ones),
        "all-to-all": (dist.all_to_all_single, zeros, ones),
        "broadcast": (dist.broadcast, zeros if rank else ones, 0),
    }
    if pair:
        sender, receiver = pair
        calls[name] = (dist.send, ones, receiver) if rank == sender else (dist.recv, zeros, sender)
    operation = partial(*calls[name])
    received = operation.args[0]
    # The first call also connects the processes.
    operation()
    if not (received == (size if "reduce" in name else 1)).all():
        raise RuntimeError(f"process {rank} received wrong values")
    # Its clock waits for the GPU. Each process measures equally often.
    measured = Timer("operation()", globals={"operation": operation})
    seconds = statistics.median(measured.timeit(1).mean for _ in range(REPETITIONS))
    (folder / f"{name}-{rank}").write_text(str(seconds))
