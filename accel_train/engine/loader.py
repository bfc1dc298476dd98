"""From the data order to micro-batches on the device: who reads, how far ahead, and how it gets to the GPU."""

import multiprocessing
import operator
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel_train.batching import BatchSizes
from accel_train.ending import exits_are_errors
from accel_train.launcher import die_with_parent
from accel_train.sampling import DataOrder
from accel_train.sharding import processes_on_machine
from accel_train.state import Choice, DataError, ExitedEarly
from accel_train.step import MicroBatch
from accel_train.task import TaskData

Collate = Callable[[Sequence[Any]], dict[str, Any]]


def choose_num_workers(requested: int | str, data: TaskData, world_size: int) -> Choice[int]:
    """How many processes read ahead, for each training process: cores are shared with those of the same machine alone."""
    if isinstance(requested, int):
        return Choice(requested, "as the recipe says")
    if data.reading_is_free:
        return Choice(0, "reading memory-mapped samples costs microseconds")
    cores, processes = usable_cores(), processes_on_machine(world_size)
    share = max(0, min(4, cores.value // processes - 1))
    return Choice(
        share,
        f"4 at most; {cores.value} cores {cores.reason} are shared by its {processes} training "
        f"process{'es' * (processes > 1)} and their readers",
    )


def usable_cores(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Choice[int]:
    """Return how many CPU cores this process may use, and what says so: its affinity, or a smaller CPU quota of its container.

    The quota is cgroup v2's `cpu.max`, "MICROSECONDS PERIOD" or "max PERIOD", of the process's group or of one above it
    (https://docs.kernel.org/admin-guide/cgroup-v2.html). Part of a core counts as none, but one is left.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    reason = "in this process's affinity" if cores < (os.cpu_count() or 1) else "of this machine"
    with suppress(OSError):  # no Linux
        groups = [line.removeprefix("0::/") for line in cgroup.read_text().splitlines() if line.startswith("0::/")]
        for group in [Path(name) for name in groups[:1]]:
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # the root group has no such file, and "max" is no limit
                    quota, period = map(int, (root / folder / "cpu.max").read_text().split())
                    if quota // period < cores:
                        cores, reason = max(1, quota // period), "by the CPU quota of its container (cpu.max)"
    return Choice(cores, reason)


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
    timeout_seconds: float = 0,
    passed_over: Callable[[int], bool] = lambda step: False,
    in_lockstep: bool = False,
) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Each step from `first_step` (0-based) on that is not passed over, with its micro-batches on the device.

    Only this process's slice of each global batch is read, and nothing is read to be skipped. Where a short step leaves a
    process without samples it forwards one of another's, which counts as no target: the processes meet in the backward pass.
    `in_lockstep` they meet in each forward as well, so each forwards as many micro-batches as any of them.
    """
    if data.step_batches is not None:
        for step, own in enumerate(data.step_batches(first_step), start=first_step):
            if not passed_over(step):
                yield step, [(_to_device(batch, device, pin_memory), _checked(count)) for batch, count in own]
        return
    dataset = data.train if data.draw is None else Drawn(data.draw, order.seed, order.num_samples)

    def steps() -> Iterator[int]:
        return (step for step in range(first_step, max_steps) if not passed_over(step))

    def shares() -> Iterator[list[list[int]]]:
        for step in steps():
            share = order.rank_micro_batches(
                step, rank, sizes.world_size, sizes.per_device_batch_size, as_draws=data.draw is not None
            )
            others = order.step_samples if data.draw is None else order.step_draws
            wanted = 1
            if in_lockstep and len(share) < sizes.gradient_accumulation_steps:
                largest_share = -(-len(others(step)) // sizes.world_size)
                wanted = -(-largest_share // sizes.per_device_batch_size)
            fillers = max(wanted - len(share), 0)
            counts.append((len(share), fillers))
            yield share + [others(step)[:1].tolist()] * fillers if fillers else share

    # Micro-batches, and those that only fill up, of the steps that readers have been told of: they run ahead.
    counts: deque[tuple[int, int]] = deque()
    index_lists = (indices for share in shares() for indices in share)
    micro_batches = read_batches(dataset, data.collate, index_lists, device, num_workers, pin_memory, timeout_seconds)
    for step in steps():
        first = next(micro_batches)  # readers put the counts there before they read
        count, fillers = counts.popleft()
        rest: list[MicroBatch] = [next(micro_batches) for _ in range(count + fillers - 1)]
        share = [first, *rest]
        yield step, [*share[:count], *((batch, 0) for batch, _ in share[count:])]


class Drawn(Dataset[Any]):
    """Training samples by draw: each with its augmentation, seeded by (seed, epoch, index) and nothing else."""

    def __init__(self, draw: Callable[[int, np.random.Generator], Any], seed: int, num_samples: int) -> None:
        self.draw, self.seed, self.num_samples = draw, seed, num_samples

    def __getitem__(self, number: int) -> Any:
        epoch, index = divmod(number, self.num_samples)
        return self.draw(index, np.random.default_rng((self.seed, epoch, index)))


def read_batches(
    dataset: "Dataset[Any]",
    collate: Collate,
    index_lists: Iterator[list[int]],
    device: torch.device,
    num_workers: int,
    pin_memory: bool,
    timeout_seconds: float = 0,
) -> Iterator[MicroBatch]:
    """Samples by lists of indices, as micro-batches on the device, in the order asked for.

    Raises:
        RuntimeError: a worker has died, or gave no batch for `timeout_seconds` (0: it is waited for).
    """
    if num_workers == 0:
        batches: Iterator[dict[str, Any]] = (collate(fetch(dataset, indices)) for indices in index_lists)
    else:
        loader = DataLoader(
            _InWorker(dataset, collate),
            batch_sampler=_Once(index_lists),
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=4,
            timeout=timeout_seconds,
            worker_init_fn=partial(
                _listen_to_parent_alone, stays=threading.current_thread() is threading.main_thread()
            ),
            # Of its own, because creating the iterator draws from it, and the global one belongs to the model.
            generator=torch.Generator(),
        )
        batches = _from_workers(loader)
    for batch in batches:
        num_targets = _checked(batch.pop("num_targets", None))
        yield _to_device(batch, device, pin_memory and num_workers == 0), num_targets


def _checked(num_targets: Any) -> int:
    """The number of targets that a batch brings, as an int.

    Raises:
        DataError: it is no count: a negative one would turn every gradient of its step round.
    """
    try:
        count = operator.index(num_targets)
    except TypeError:
        count = -1
    if count < 0:
        shown = "nothing" if num_targets is None else f"{type(num_targets).__name__} {num_targets!r}"
        raise DataError(
            f"num_targets of a batch is {shown}, and must be a whole number of at least 0; let `collate` of the task's data "
            "count the targets of its batch"
        )
    return count


def _from_workers(loader: "DataLoader[Any]") -> Iterator[dict[str, Any]]:
    try:
        yield from loader
    except ExitedEarly as error:  # torch has put the worker's traceback before it
        raise ExitedEarly(str(error).strip().splitlines()[-1].partition(": ")[2]) from error
    except (OSError, EOFError) as error:
        if str(error).startswith("Caught "):  # by a worker, in reading: torch raises it here again
            raise
        raise RuntimeError(f"DataLoader worker is gone, with a batch half handed over ({error!r})") from error


def _listen_to_parent_alone(worker: int, *, stays: bool) -> None:
    """In a worker: what asks the job to stop (Ctrl-C, a closed terminal, a scheduler's signal to all its processes) is for the training to answer.

    It needs its workers for the step that it ends with, and ends them itself. Where it was killed, or ended without waiting
    for a worker that hangs in a read, that worker would be left, with the memory and the connections of both. So it dies with
    its parent, if the thread that began it `stays` until then.
    """
    if stays:
        die_with_parent()
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_parent_asks, daemon=True).start()


def _end_when_the_parent_asks() -> None:
    parent = multiprocessing.parent_process()  # os.getppid() may be a server that only forks
    sender = None
    assert parent is not None
    while sender != parent.pid:  # a scheduler's signal comes from elsewhere, and is for the training to answer
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
    os._exit(0)


def _to_device(batch: dict[str, Any], device: torch.device, pin: bool) -> dict[str, Any]:
    if device.type == "cpu":
        return batch
    return {
        name: (value.pin_memory() if pin else value).to(device, non_blocking=True)
        if isinstance(value, Tensor)
        else value
        for name, value in batch.items()
    }


def fetch(dataset: "Dataset[Any]", indices: list[int]) -> Sequence[Any]:
    """Samples by index, in one call where the data set offers it (torch's `__getitems__`)."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many is not None else [dataset[index] for index in indices]


class _InWorker(Dataset[Any]):
    """Reads and collates in a worker, where `sys.exit()` would end the worker alone, with nothing said."""

    def __init__(self, dataset: "Dataset[Any]", collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        with exits_are_errors():
            return self.collate(fetch(self.dataset, indices))


def _as_it_is(batch: Any) -> Any:
    return batch


class _Once(torch.utils.data.Sampler[list[int]]):
    """The batch sampler of one pass: hands on lists of indices that are computed elsewhere."""

    def __init__(self, index_lists: Iterator[list[int]]) -> None:
        self.index_lists = index_lists

    def __iter__(self) -> Iterator[list[int]]:
        return self.index_lists
