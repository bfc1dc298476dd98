"""Yield the micro-batches of each step: data order, reader processes, read-ahead, and copies to the device."""

import ast
import multiprocessing
import operator
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel_train.core.errors import DataError, DataWorkerGone, ExitedEarly, SettingError
from accel_train.core.hardware import usable_cores
from accel_train.core.state import Choice, Choices
from accel_train.core.work import helped
from accel_train.data.cache import DigestCheck
from accel_train.data.samples import Drawn, SeededReads, fetch
from accel_train.engine.block_order import SHARDS_AHEAD, BlockOrder
from accel_train.engine.broken import FAULTS, collate_readable
from accel_train.engine.mixed_order import MixedOrder
from accel_train.engine.mixture import WithSources, collate_with_sources
from accel_train.engine.step import MicroBatch
from accel_train.guard.guard import is_skipped_by_rollback
from accel_train.parallel.dims import processes_on_machine
from accel_train.recipe.data import Data
from accel_train.runtime.exit import exits_are_errors
from accel_train.runtime.launcher import stop_with_parent
from accel_train.runtime.private import end_workers
from accel_train.task import Collate, Collated, TaskData

if TYPE_CHECKING:
    from accel_train.engine.run import RunContext

_HELPERS_NICE = 10
_POLL_SECONDS = 0.1

Steps = Iterator[tuple[int, list[MicroBatch]]]
"""Iterator of 0-based steps with their micro-batches on the device."""


def training_batches(run: "RunContext", first_step: int) -> Steps:
    """Yield this process's micro-batches of each step from `first_step` on, without the steps that a rollback skips.

    Raises:
        DataError: a large file differs from its digest, or a batch has no count of targets.
    """
    if run.state.stopped_early:
        return run.observer.reading(iter(()))
    batches = _read_order(run, first_step) if run.plan.data.step_batches is None else _read_stream(run, first_step)
    if run.plan.data.shards is not None:
        batches = _while_made(run.plan.order, run.plan.data.shards, batches, run.accelerator.num_processes)
    if run.digest_check is not None:
        batches = _checked(run, run.digest_check, batches, first_step)
    return run.observer.reading(batches)


def _is_skipped(run: "RunContext", step: int) -> bool:
    return bool(run.state.rollbacks) and is_skipped_by_rollback(step + 1, run.state.rollbacks)


def _read_stream(run: "RunContext", first_step: int) -> Steps:
    data, device, pin = run.plan.data, run.accelerator.device, run.plan.reading.pin_memory
    assert data.step_batches is not None
    for step, own in enumerate(data.step_batches(first_step), start=first_step):
        if not _is_skipped(run, step):
            yield step, [(to_device(batch, device, pin=pin), checked_count(count)) for batch, count in own]


def _read_order(run: "RunContext", first_step: int) -> Steps:
    """Yield steps that contain only this process's slice of each global batch. Skipped steps are not read.

    A process without samples in a short step forwards a sample of another process and counts no targets. It does so
    because processes meet in the backward pass. With a sharded model, processes also meet in each forward, so every
    process forwards the same number of micro-batches.
    """
    data, order, sizes = run.plan.data, run.plan.order, run.sizes
    is_drawn, all_forward_alike = data.draw is not None or data.seeds_reading, not run.strategy.is_replicated
    dataset: Any = data.train
    if data.draw is not None:
        dataset = Drawn(data.draw, order.seed, order.num_samples)
    elif data.seeds_reading:
        dataset = SeededReads(dataset, order.seed, order.num_samples)
    step_samples = order.step_draws if is_drawn else order.step_samples
    collate = data.collate
    if isinstance(order, MixedOrder) and run.plan.task.counted is not None:
        dataset, collate = WithSources(dataset, order), partial(collate_with_sources, data.collate)
    if data.max_broken:
        # The function reads the samples itself.
        dataset, collate = range(sys.maxsize), partial(collate_readable, dataset, collate, data.max_broken)
    # Number of micro-batches and of fillers, for each step that the readers have started. Readers run ahead.
    counts: deque[tuple[int, int]] = deque()

    def steps() -> Iterator[int]:
        return (step for step in range(first_step, run.plan.max_steps) if not _is_skipped(run, step))

    def index_lists() -> Iterator[list[int]]:
        for step in steps():
            share = order.rank_micro_batches(
                step, run.strategy.dims.rank, sizes.world_size, sizes.per_device_batch_size, as_draws=is_drawn
            )
            wanted = 1
            if all_forward_alike and len(share) < sizes.gradient_accumulation_steps:
                largest_share = -(-len(step_samples(step)) // sizes.world_size)
                wanted = -(-largest_share // sizes.per_device_batch_size)
            fillers = max(wanted - len(share), 0)
            counts.append((len(share), fillers))
            yield from share
            if fillers:
                yield from [step_samples(step)[:1].tolist()] * fillers

    device, met = run.accelerator.device, run.faults.here
    micro_batches = read_batches(dataset, collate, index_lists(), device, run.plan.reading, met)
    for step in steps():
        first = next(micro_batches)  # readers append to `counts` before they read
        count, fillers = counts.popleft()
        share = [first, *(next(micro_batches) for _ in range(count + fillers - 1))]
        yield step, [*share[:count], *((batch, 0) for batch, _ in share[count:])]


def _while_made(order: Any, windows: Any, batches: Steps, world_size: int) -> Steps:
    """Yield steps while forked processes make the shards of the next blocks, with all cores.

    They only help: without them, a process makes the shards that it reads.
    """
    parts: Sequence[BlockOrder] = order.blocks if isinstance(order, MixedOrder) else [order]
    num_read = multiprocessing.Array("q", [part.num_read for part in parts])
    windows.shards.choose_encoder()
    cores = usable_cores().value // processes_on_machine(world_size)
    stays = threading.current_thread() is threading.main_thread()
    with helped(max(1, cores), _make_ahead, parts, windows.shards, num_read, stays):
        for step in batches:
            num_read[:] = [part.num_read for part in parts]
            yield step


def _make_ahead(parts: Sequence[BlockOrder], shards: Any, num_read: Any, stays: bool) -> None:
    """Make shards in the order of the first epoch, at most `SHARDS_AHEAD` after those that are read of a source."""
    _ignore_stop_signals(0, stays=stays)
    os.nice(_HELPERS_NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The process that reads the shard finds the same error, and says so.
    with suppress(DataError):
        left = {at: deque(part.shards_from(0, part.num_shards, 0).tolist()) for at, part in enumerate(parts)}
        while left:
            ahead = {at: parts[at].num_shards - len(numbers) - num_read[at] for at, numbers in left.items()}
            at = min(ahead, key=ahead.__getitem__)
            if ahead[at] > SHARDS_AHEAD:
                time.sleep(_POLL_SECONDS)
                continue
            number = left[at].popleft()
            # One that was removed to save space is made again by its reader.
            if shards.num_tokens(number) is None:
                shards.make(number)
            if not left[at]:
                del left[at]


def _checked(run: "RunContext", check: DigestCheck, batches: Steps, first_step: int) -> Steps:
    """Compare large files with their digests while batches are read. The end of the epoch waits for the comparison."""
    check.start()
    epoch_at = run.plan.order.epoch_at
    next_epoch = int(epoch_at(first_step)) + 1
    for step, micro_batches in batches:
        if check.is_running and epoch_at(step) >= next_epoch:
            check.wait()
        check.raise_if_damaged()
        yield step, micro_batches
    if check.is_running and epoch_at(run.plan.max_steps) < next_epoch:
        names = ", ".join(str(path) for path in run.plan.data.large_files)
        run.observer.note(f"not all of {names} was compared with its digest: the steps were done before")
        return
    check.wait()
    check.raise_if_damaged()


@dataclass(frozen=True)
class Reading:
    """Settings for reading samples."""

    num_workers: int = 0
    """Number of processes that read ahead. 0: the training process reads."""
    pin_memory: bool = False
    """Whether host buffers are page-locked, so that copies to the device overlap with other work."""
    timeout_seconds: float = 0
    """Time limit for a worker's batch, in seconds. 0: no limit."""
    prefetch_factor: int = 4
    """Micro-batches that each worker reads ahead."""
    multiprocessing_context: Any = None
    """Start method of workers (fork, spawn, forkserver). None: the platform's default."""


def choose_reading(
    section: Data, data: TaskData, accelerator: Accelerator, method: str | None = None
) -> tuple[Reading, Choices]:
    """Return how a run reads, and its choices with their reasons. `method` starts workers; None: the platform's."""
    workers, kind = choose_num_workers(section.num_workers, data, accelerator.num_processes), accelerator.device.type
    choices: Choices = {}
    if workers.value and data.step_batches is None and (problem := why_no_workers(data, method)):
        workers = Choice(0, problem)
        choices["reading"] = Choice("in the training process", f"data.num_workers is 0, because {problem}")
    reason = "copies to a GPU can overlap" if kind == "cuda" else f"no copy to make on {kind}"
    pin = Choice(kind == "cuda", reason)
    if isinstance(section.pin_memory, bool):
        pin = Choice(section.pin_memory, "as set")
    return Reading(workers.value, pin.value), {**choices, "data.num_workers": workers, "data.pin_memory": pin}


def why_no_workers(data: TaskData, method: str | None = None) -> str:
    """Return why processes that read ahead cannot start here, or an empty string.

    Processes that are not forked get the data and the collate function pickled, and run the main script once more.
    """
    if multiprocessing.current_process().daemon:
        return "this process is daemonic and cannot start others"
    method = method or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "fork":
        return ""
    if _is_unguarded():
        return f'{method} runs the main script again, and it calls the training outside of `if __name__ == "__main__":`'
    for name, value in (("the data", data.draw or data.train), ("the data", data.eval), ("collate", data.collate)):
        try:
            with open(os.devnull, "wb") as sink:
                _Probe(sink).dump(value)
        # An object may fail in any way when it is pickled.
        except Exception as error:
            return f"{method} needs to pickle {name}, which fails: {str(error).partition(chr(10))[0]}"
    return ""


def _is_unguarded() -> bool:
    """Return whether the main script's statement that runs now would run in a started process too."""
    main = sys.modules["__main__"]
    frame, path = sys._getframe(), getattr(main, "__file__", None)
    while frame.f_back is not None and not (frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    if path is None or frame.f_globals is not vars(main):
        return False
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    around = [each for each in ast.walk(tree) if isinstance(each, ast.If)]
    around = [each for each in around if each.lineno <= frame.f_lineno <= (each.end_lineno or each.lineno)]
    return not any("__name__" in ast.unparse(each.test) for each in around)


class _Probe(ForkingPickler):
    """A pickler that fails where a started process could not read the object. It leaves out the content of arrays."""

    def persistent_id(self, value: Any) -> str | None:
        is_named = isinstance(value, type | FunctionType) and value.__module__ == "__main__"
        if is_named and not hasattr(sys.modules["__main__"], "__file__"):
            raise TypeError(f"{value.__qualname__} is defined in a notebook or an interactive session")
        return "" if isinstance(value, Tensor | np.ndarray) else None


def choose_num_workers(requested: int | str, data: TaskData, world_size: int) -> Choice[int]:
    """Return the number of reader processes per training process. Training processes on one machine share its cores."""
    if isinstance(requested, int):
        return Choice(requested, "as set")
    if data.reading_is_free:
        return Choice(0, "reading memory-mapped samples costs microseconds")
    cores, processes = usable_cores(), processes_on_machine(world_size)
    reason = (
        f"4 at most; {cores.value} cores {cores.reason} are shared by its {processes} training "
        f"process{'es' * (processes > 1)} and their readers"
    )
    return Choice(max(0, min(4, cores.value // processes - 1)), reason)


def read_batches(
    dataset: "Dataset[Any]",
    collate: Collate,
    index_lists: Iterator[list[int]],
    device: torch.device,
    reading: Reading,
    faults: dict[str, None] | None = None,
) -> Iterator[MicroBatch]:
    """Yield the samples of each list of indices as a micro-batch on the device. Add errors of broken ones to `faults`.

    Raises:
        RuntimeError: a worker died, or returned no batch within `reading.timeout_seconds`.
    """
    if reading.num_workers == 0:
        batches: Iterator[Collated] = (collate(fetch(dataset, indices)) for indices in index_lists)
    else:
        stays = threading.current_thread() is threading.main_thread()
        loader = DataLoader(
            _InWorker(dataset, collate),
            batch_sampler=index_lists,  # read once
            collate_fn=_unchanged,
            num_workers=reading.num_workers,
            pin_memory=reading.pin_memory,
            prefetch_factor=reading.prefetch_factor,
            multiprocessing_context=reading.multiprocessing_context,
            timeout=reading.timeout_seconds,
            worker_init_fn=partial(_ignore_stop_signals, stays=stays),
            # Creating the iterator draws from the generator, and the global generator belongs to the model.
            generator=torch.Generator(),
        )
        batches = _from_workers(loader)
    for batch in batches:
        num_targets = checked_count(batch.pop("num_targets", None))
        if faults is not None:
            faults.update(dict.fromkeys(batch.pop(FAULTS, ())))
        yield to_device(batch, device, pin=reading.pin_memory and reading.num_workers == 0), num_targets


def checked_count(num_targets: Any) -> int:
    """Return a batch's number of targets as an int.

    Raises:
        DataError: the value is not a whole number of at least 0. A negative count would reverse the step's gradients.
    """
    try:
        count = operator.index(num_targets)
    except TypeError:
        count = -1
    if count < 0:
        shown = "nothing" if num_targets is None else f"{type(num_targets).__name__} {num_targets!r}"
        raise DataError(
            f"num_targets of a batch is {shown}, but must be a whole number of at least 0. Let `collate` of the "
            "task's data count the targets of its batch"
        )
    return count


def to_device(batch: Collated, device: torch.device, *, pin: bool) -> Collated:
    """Return a batch with its tensors on the device; `pin` page-locks them first."""
    if device.type == "cpu":
        return batch
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    copies = {name: (v.pin_memory() if pin else v).to(device, non_blocking=True) for name, v in tensors.items()}
    return {**batch, **copies}


_NO_HANDLES = ("Too many open files", "items of ancdata")
"""Words in errors of torch and multiprocessing when a process cannot open another file or receive one."""


def _from_workers(loader: "DataLoader[Any]") -> Iterator[Collated]:
    iterator: Any = None
    try:
        iterator = iter(loader)
        for batch in iterator:
            if isinstance(batch, ExitedEarly | DataError):
                raise batch
            yield batch
    except (OSError, EOFError, RuntimeError) as error:
        if any(words in str(error) for words in _NO_HANDLES):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            problem = f"too many open files; this process may open {limit}"
            raise SettingError(
                problem,
                "Raise the limit with `ulimit -n 4096`, or lower data.num_workers",
                settings=("data.num_workers",),
            ) from error
        if isinstance(error, RuntimeError):
            # A worker that hangs is not waited for.
            end_workers(iterator, at_once=True)
            raise
        if str(error).startswith("Caught "):  # torch raises the error of a worker's read here again
            raise
        raise DataWorkerGone(f"DataLoader worker is gone, with a batch half sent ({error!r})") from error
    finally:
        end_workers(iterator)


def _ignore_stop_signals(worker: int, *, stays: bool) -> None:
    """Ignore signals in a worker that ask the job to stop.

    The signals come from Ctrl-C, a closed terminal, or a scheduler that signals all processes of the job. The training
    process needs its workers for its last step, and ends them afterwards. A worker that hangs in a read would outlive a
    killed training process and keep the memory and connections of both. So the worker dies with its parent. This is
    safe only if the thread that starts the worker `stays` alive until then.
    """
    if stays:
        # SIGKILL also ends a worker that is stopped.
        stop_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for SIGTERM from the parent, then exit. The training process handles SIGTERM from a scheduler."""
    parent = multiprocessing.parent_process()  # os.getppid() may be a server that only forks
    assert parent is not None
    while True:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent.pid:
            os._exit(0)


class _InWorker(Dataset[Any]):
    """Data set that reads and collates in a worker and turns `sys.exit()` into an error.

    Without it, `sys.exit()` would silently end only the worker.
    """

    def __init__(self, dataset: "Dataset[Any]", collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitems__(self, indices: list[int]) -> Collated | ExitedEarly | DataError:
        try:
            with exits_are_errors():
                return self.collate(fetch(self.dataset, indices))
        except (ExitedEarly, DataError) as error:
            return error  # raised, torch would make it a traceback in a text


def _unchanged(batch: Any) -> Any:
    return batch
