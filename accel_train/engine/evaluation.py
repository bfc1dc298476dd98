"""Evaluate each sample once over all processes, weighted by targets; sums stay on the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor, nn

from accel_train.core.errors import DataError
from accel_train.core.work import working
from accel_train.data.order import evaluation_batches
from accel_train.engine.loader import Reading, read_batches
from accel_train.engine.step import MicroBatch
from accel_train.model.kernels.global_loss import sums_dtype
from accel_train.model.tensors import Tensors
from accel_train.parallel.dims import parallel_dims
from accel_train.runtime.memory import is_out_of_memory
from accel_train.runtime.process_group import concluded, gather_number
from accel_train.task import Scores, Task, TaskData

ROWS = "rows_"
"""Prefix of the values that `Task.evaluate_batch` returns per sample. All other values are summed."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation, equal on all processes."""

    loss: float
    """Mean loss over all targets."""
    num_targets: int
    num_samples: int
    totals: dict[str, NDArray[Any]]
    """Sums of the task's counts, and `rows_*` arrays in the order of the samples. `rows_index` has their numbers."""
    chunk_size: int
    """Samples per forward on this process. Smaller than the batch size if memory ran out."""


class EvaluationLeft(Exception):
    """Raised on all processes when an evaluation ends early because the run was asked to stop."""


@dataclass(frozen=True)
class EvaluationReader:
    """Reader of this process's share of the evaluation data."""

    accelerator: Accelerator
    data: TaskData
    batch_size: int
    """Samples per batch on one process."""
    reading: Reading = field(default_factory=Reading)
    max_samples: int | None = None
    """Number of samples to read, evenly spaced. None reads all."""
    forwards_alike: bool = False
    """Whether all processes forward the same number of batches. FSDP2 gathers weights in each forward and needs
    this."""
    replays: bool = False
    """Whether forwards replay CUDA graphs (`Precision.has_cuda_graphs`)."""
    counted: Callable[[Iterator[MicroBatch], int], Iterator[MicroBatch]] | None = None
    """Wrapper of this process's batches, called with their number, such as a progress bar. None for no wrapper."""
    part: range | None = None
    """Samples of a part of the data. None for all data."""

    @property
    def num_samples(self) -> int:
        """Number of samples over all processes."""
        return len(self.samples)

    @cached_property
    def samples(self) -> Sequence[int]:
        """Numbers of the samples that all processes read."""
        part = range(len(self.data.eval)) if self.part is None else self.part  # type: ignore[arg-type]
        count = len(part) if self.max_samples is None else min(self.max_samples, len(part))
        return [part[number * len(part) // count] for number in range(count)]

    def batches(self, chunk_size: int | None = None) -> Iterator[MicroBatch]:
        """Yield the batches on the device, each in chunks of `chunk_size` samples (None: whole)."""
        count, chunk = self.num_samples, chunk_size or self.batch_size
        dims = parallel_dims(self.accelerator)
        batches = self._read(
            [self.samples[index] for index in batch[start : start + chunk]]
            for batch in evaluation_batches(count, self.batch_size, dims.rank, dims.size)
            for start in range(0, len(batch), chunk)
        )
        return self.counted(batches, -(-count // (chunk * dims.size))) if self.counted else batches

    def batches_for_all(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield each batch with True, then fillers with False, so that all processes get equally many."""
        missing = -(-self.num_samples // (self.batch_size * parallel_dims(self.accelerator).size))
        for batch in self.batches():
            missing -= 1
            yield batch, True
        for _ in range(missing):
            yield next(replace(self, reading=Reading())._read(iter([[0]]))), False

    def _read(self, index_lists: Iterator[list[int]]) -> Iterator[MicroBatch]:
        assert self.data.eval is not None
        return read_batches(self.data.eval, self.data.collate, index_lists, self.accelerator.device, self.reading)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients; restore the mode of each submodule on exit."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def evaluate(
    reader: EvaluationReader,
    module: nn.Module,
    *,
    chunk_size: int | None = None,
    is_over: Callable[[], bool] | None = None,
) -> Evaluation:
    """Return the loss and counts on the evaluation data.

    The result is equal up to rounding for any batch size and number of processes. The sums stay on the device and are
    read once, so their memory does not grow with the data. Rows are moved to the host and use host memory there.

    Args:
        module: the unwrapped training module. The wrapper would synchronize processes with different numbers of
            batches.
        chunk_size: samples per forward; None for whole batches. If memory runs out, this process starts over with
            chunks half as large, unless all processes must forward alike.
        is_over: called before each batch; True ends the evaluation.

    Raises:
        EvaluationLeft: on all processes, if `is_over` returned True on some process before its last batch.
        DataError: on all processes, if no sample has a target; on one process, if it cannot read a sample.
    """
    accelerator = reader.accelerator
    chunk = reader.batch_size if reader.forwards_alike else chunk_size or reader.batch_size
    counts: _Counts | None = None
    while counts is None:
        try:
            with evaluation_mode(module):
                counts = _count(reader, module, chunk, is_over)
        except DataError as error:
            why = " (it is held out, and data.max_broken is for training samples)" if reader.data.max_broken else ""
            raise DataError(f"{error}{why}") from error
        except (RuntimeError, MemoryError) as error:
            if chunk == 1 or reader.forwards_alike or not is_out_of_memory(error):
                raise
        if counts is None:  # outside the handler: inside it, the error keeps tensors alive
            chunk //= 2
            if accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
    if is_over is not None and any(gather_number(counts.left)):
        raise EvaluationLeft
    rows = {name: list(torch.cat(values).split(reader.batch_size)) for name, values in counts.rows.items()}
    totals = _sum_over_processes(accelerator, counts.sums)
    targets = int(totals.pop("num_targets"))
    if targets == 0:
        raise DataError(
            f"none of the {reader.num_samples} evaluation samples has a target, so the evaluation has no loss; check "
            "the labels (or masks) of the evaluation data, and which label is ignored"
        )
    totals |= rows_in_order(accelerator, rows)
    # This process may have no samples.
    if any(name.startswith(ROWS) for name in totals):
        totals["rows_index"] = np.array(reader.samples)
    # A loss that compares samples with each other needs all of them.
    loss_of_rows = getattr(getattr(module, "task", None), "loss_of_rows", None)
    with working("computing metrics"):
        loss_sum = float(totals["loss_sum"]) if loss_of_rows is None else loss_of_rows(totals)
    return Evaluation(loss_sum / targets, targets, reader.num_samples, totals, chunk)


def evaluate_sets(task: Task, reader: EvaluationReader, module: nn.Module, **options: Any) -> tuple[Evaluation, Scores]:
    """Evaluate all data, and return the result with the metrics: the loss, the task's metrics, and `num_targets`.

    Sets that `data.eval` names are evaluated one after another. Their metrics are `NAME/loss` and so on. The loss of
    all is the mean over all targets. `max_samples` spreads over the sets, with at least one sample of each. `options`
    are those of `evaluate`.
    """
    data, found, of_sets, end = reader.data, list[Evaluation](), dict[str, float](), 0
    for name, facts in data.facts.eval_sets.items():
        part = range(end, end := end + facts["num_eval"])
        most = max(1, reader.num_samples * len(part) // len(data.eval))  # type: ignore[arg-type]
        found.append(evaluate(replace(reader, part=part, max_samples=most), module, **options))
        own = replace(data, facts=data.facts.model_copy(update={**facts, "eval_sets": {}}))
        of_sets |= {f"{name}/{metric}": value for metric, value in _scores(task, found[-1], own).metrics.items()}
    if not found:
        whole = evaluate(reader, module, **options)
        return whole, _scores(task, whole, data)
    totals: dict[str, Any] = {
        name: (np.concatenate if name.startswith(ROWS) else sum)([each.totals[name] for each in found])
        for name in found[0].totals
    }
    targets = [each.num_targets for each in found]
    loss = float(np.average([each.loss for each in found], weights=targets))
    chunk_size = min(each.chunk_size for each in found)
    whole = Evaluation(loss, sum(targets), sum(each.num_samples for each in found), totals, chunk_size)
    scores = _scores(task, whole, data)
    return whole, Scores(scores.metrics | of_sets, scores.details)


def _scores(task: Task, found: Evaluation, data: TaskData) -> Scores:
    with working("computing metrics"):
        scores = task.score(found.loss, found.totals, data)
    return Scores({"loss": found.loss, **scores.metrics, "num_targets": found.num_targets}, scores.details)


class _Counts(NamedTuple):
    """Counts of one process's batches."""

    sums: Tensors  # on the device
    rows: dict[str, list[Tensor]]  # on the host, batch by batch
    left: bool


def _count(reader: EvaluationReader, module: nn.Module, chunk_size: int, is_over: Callable[[], bool] | None) -> _Counts:
    sums: Tensors = {}
    rows: dict[str, list[Tensor]] = {}
    targets, left, alike, vote = 0, False, reader.forwards_alike, _Vote(reader.accelerator)
    batches = reader.batches_for_all() if alike else ((batch, True) for batch in reader.batches(chunk_size))
    for (batch, num_targets), is_counted in batches:
        left = is_over is not None and is_over()
        ends = vote.cast(left) if alike and is_over is not None else left
        if ends:
            left = True
            break
        if reader.replays:
            torch.compiler.cudagraph_mark_step_begin()
        found = module(batch, "counts")
        if not is_counted:
            continue
        targets += num_targets
        for name, value in found.items():
            if name.startswith(ROWS):
                rows.setdefault(name, []).append(value.cpu())
            else:
                # Integer sums are exact. In fp64, the order of the summands does not show in printed digits.
                dtype = sums_dtype(value.device) if value.is_floating_point() else torch.int64
                # A copy, which the next replay does not overwrite.
                value = value.to(dtype, copy=True)
                sums[name] = sums[name] + value if name in sums else value
    sums["num_targets"] = torch.tensor(targets, device=reader.accelerator.device)
    return _Counts(sums, rows, left)


class _Vote:
    """A question that all processes answer before each batch. The host reads the result one batch later.

    So the host does not wait for the device, and all processes end the evaluation before the same batch.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._last: tuple[Tensor, torch.cuda.Event | None] | None = None

    def cast(self, here: bool) -> bool:
        """* Send `here`; return whether any process sent True in the previous call."""
        last, device = self._last, self._accelerator.device
        # `here` is passed as a kernel argument, so the host does not wait for a copy.
        votes = self._accelerator.reduce(torch.full((), float(here), device=device))
        event = torch.cuda.Event() if device.type == "cuda" else None
        self._last = votes.to("cpu", non_blocking=event is not None), event
        if event is not None:
            event.record()
        if last is not None and last[1] is not None:
            last[1].synchronize()
        return last is not None and bool(last[0])


def _sum_over_processes(accelerator: Accelerator, here: Tensors) -> dict[str, NDArray[Any]]:
    """Return sums over all processes that read different samples.

    A process without batches learns the names and shapes from the others.
    """
    described = {name: (value.shape, value.dtype) for name, value in here.items()}
    shapes = concluded(described, lambda everywhere: {name: each[name] for each in everywhere for name in each})
    if not parallel_dims(accelerator).is_first_in_group:  # the first process of the group counts for the group
        here = {}
    totals = {}
    for name, (shape, dtype) in sorted(shapes.items()):
        value = here[name] if name in here else torch.zeros(shape, dtype=dtype, device=accelerator.device)
        totals[name] = accelerator.reduce(value).cpu().numpy()
    return totals


def rows_in_order(accelerator: Accelerator, rows: Mapping[str, list[Tensor]]) -> dict[str, NDArray[Any]]:
    """Return one array per name with the rows of all processes, in the order of the samples, on every process.

    Processes take batches in turn (`data.order.evaluation_batches`), so their rows are joined in turn.
    """
    gathered = gather_object([dict(rows)])[:: parallel_dims(accelerator).num_sharing]
    result = {}
    for name in sorted({name for each in gathered for name in each}):
        turns = zip_longest(*(each.get(name, []) for each in gathered))
        result[name] = torch.cat([batch for turn in turns for batch in turn if batch is not None]).numpy()
    return result
