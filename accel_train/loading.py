"""From the data order to micro-batches on the device: who reads, how far ahead, and how it gets to the GPU."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from accel_train.batching import BatchSizes
from accel_train.sampling import DataOrder
from accel_train.state import Choice
from accel_train.step import MicroBatch
from accel_train.task import TaskData

Collate = Callable[[Sequence[Any]], dict[str, Any]]


def choose_num_workers(requested: int | str, data: TaskData, processes_on_node: int) -> Choice[int]:
    """How many processes read ahead, for each training process."""
    if isinstance(requested, int):
        return Choice(requested, "as the recipe says")
    if data.reading_is_free:
        return Choice(0, "reading memory-mapped samples costs microseconds")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(0, min(4, cores // processes_on_node - 1))
    return Choice(
        share, f"4 at most, and {cores} cores are shared by {processes_on_node} training processes and their readers"
    )


def choose_pin_memory(requested: bool | str, device: torch.device) -> Choice[bool]:
    """Whether host buffers are page-locked, so that copies to the device overlap with work."""
    if isinstance(requested, bool):
        return Choice(requested, "as the recipe says")
    return Choice(
        device.type == "cuda",
        "copies to a GPU can overlap" if device.type == "cuda" else f"no copy to make on {device.type}",
    )


def step_batches(
    data: TaskData,
    order: DataOrder,
    sizes: BatchSizes,
    *,
    first_step: int,
    max_steps: int,
    rank: int,
    device: torch.device,
    num_workers: int,
    pin_memory: bool,
) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step from `first_step` (0-based) on, on the device.

    Only this process's slice of each global batch is read, and nothing is read to be skipped.
    """
    index_lists = (
        indices
        for step in range(first_step, max_steps)
        for indices in order.rank_micro_batches(step, rank, sizes.world_size, sizes.per_device_batch_size)
    )
    micro_batches = read_batches(data.train, data.collate, index_lists, device, num_workers, pin_memory)
    for _ in range(first_step, max_steps):
        yield [next(micro_batches) for _ in range(sizes.gradient_accumulation_steps)]


def read_batches(
    dataset: "Dataset[Any]",
    collate: Collate,
    index_lists: Iterator[list[int]],
    device: torch.device,
    num_workers: int,
    pin_memory: bool,
) -> Iterator[MicroBatch]:
    """Samples by lists of indices, as micro-batches on the device, in the order asked for."""
    if num_workers == 0:
        batches: Iterator[dict[str, Any]] = (collate(fetch(dataset, indices)) for indices in index_lists)
    else:
        loader = DataLoader(
            dataset,
            batch_sampler=_Once(index_lists),
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=4,
            # Of its own, because creating the iterator draws from it, and the global one belongs to the model.
            generator=torch.Generator(),
        )
        batches = iter(loader)
    on_cpu = device.type == "cpu"
    for batch in batches:
        num_targets = batch.pop("num_targets")
        if not on_cpu:
            pin = pin_memory and num_workers == 0
            batch = {name: (t.pin_memory() if pin else t).to(device, non_blocking=True) for name, t in batch.items()}
        yield batch, num_targets


def fetch(dataset: "Dataset[Any]", indices: list[int]) -> Sequence[Any]:
    """Samples by index, in one call where the data set offers it (torch's `__getitems__`)."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many is not None else [dataset[index] for index in indices]


class _Once(torch.utils.data.Sampler[list[int]]):
    """The batch sampler of one pass: hands on lists of indices that are computed elsewhere."""

    def __init__(self, index_lists: Iterator[list[int]]) -> None:
        self.index_lists = index_lists

    def __iter__(self) -> Iterator[list[int]]:
        return self.index_lists
