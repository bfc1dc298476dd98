"""Evaluation: every sample once over all processes, weighted by targets; what adds up is summed on the device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor, nn

from accel_train.core.errors import DataError
from accel_train.data.order import evaluation_batches
from accel_train.engine.loader import Reading, read_batches
from accel_train.engine.step import MicroBatch
from accel_train.parallel.dims import parallel_dims
from accel_train.runtime.memory import is_out_of_memory
from accel_train.task import TaskData

ROWS = "rows_"
"""Begins the names of what `Task.evaluate_batch` returns for each sample; everything else is summed."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, the same on all processes."""

    loss: float
    """Mean over all targets."""
    num_targets: int
    num_samples: int
    totals: dict[str, NDArray[Any]]
    """Sums of what the task counts, and `rows_*` in the order of the samples."""
    chunk_size: int
    """Samples that this process forwarded at once: fewer than the batch size where memory did not hold them."""


class EvaluationLeft(Exception):
    """Raised when an evaluation ends early, on all processes, because the run was asked to stop."""


@dataclass(frozen=True)
class EvaluationReader:
    """Reads this process's share of the evaluation data."""

    accelerator: Accelerator
    data: TaskData
    batch_size: int
    """Samples of a batch of one process."""
    reading: Reading = field(default_factory=Reading)
    max_samples: int | None = None
    """Read that many samples, evenly spaced; None: all."""
    forwards_alike: bool = False
    """All processes forward as many batches as any of them: a forward waits for the others (FSDP2 gathers weights in each)."""
    counted: Callable[[Iterator[MicroBatch], int], Iterator[MicroBatch]] | None = None
    """Gets this process's batches and their number, and yields them: a bar. None: they are read in silence."""

    @property
    def num_samples(self) -> int:
        """Samples over all processes."""
        total = len(self.data.eval)  # type: ignore[arg-type]
        return total if self.max_samples is None else min(self.max_samples, total)

    def batches(self, chunk_size: int | None = None) -> Iterator[MicroBatch]:
        """Yield the batches on the device, each in chunks of `chunk_size` samples (None: whole)."""
        total, count, chunk = len(self.data.eval), self.num_samples, chunk_size or self.batch_size  # type: ignore[arg-type]
        dims = parallel_dims(self.accelerator)
        batches = self._read(
            [int(index) * total // count for index in batch[start : start + chunk]]
            for batch in evaluation_batches(count, self.batch_size, dims.rank, dims.size)
            for start in range(0, len(batch), chunk)
        )
        return self.counted(batches, -(-count // (chunk * dims.size))) if self.counted else batches

    def batches_for_all(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield the batches, and then as many that do not count (False) as the process with the most batches has more."""
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
    """Run without dropout and gradients inside; each submodule gets back the mode it had."""
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
    """Return the loss and the counts on the evaluation data: the same for any batch size and number of processes, up to rounding.

    `module` is the training module inside its wrapper: the wrapper would synchronise processes, and they need not have the same
    number of batches. Sums are kept on the device and read once, so memory does not grow with the data; rows cost the host what
    they hold. A batch is forwarded in chunks of `chunk_size` (None: whole); where memory runs out, this process begins again with
    chunks half as large, unless the processes forward alike. `is_over` is called before each batch.

    Raises:
        EvaluationLeft: `is_over` returned True on some process before its last batch; raised on all.
        DataError: no sample has a target; raised on all.
    """
    accelerator = reader.accelerator
    chunk = reader.batch_size if reader.forwards_alike else chunk_size or reader.batch_size
    counts: _Counts | None = None
    while counts is None:
        try:
            with evaluation_mode(module):
                counts = _count(reader, module, chunk, is_over)
        except (RuntimeError, MemoryError) as error:
            if chunk == 1 or reader.forwards_alike or not is_out_of_memory(error):
                raise
        if counts is None:  # outside the handler, where the error keeps nothing alive
            chunk //= 2
            if accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
    if is_over is not None and _on_any(reader, counts.left):
        raise EvaluationLeft
    rows = {name: list(torch.cat(values).split(reader.batch_size)) for name, values in counts.rows.items()}
    totals = _sum_over_processes(accelerator, counts.sums)
    targets = int(totals.pop("num_targets"))
    if targets == 0:
        raise DataError(
            f"none of the {reader.num_samples} evaluation samples has a target, so there is no loss to report; check the labels (or "
            "masks) of the evaluation data, and which label is ignored"
        )
    loss = float(totals["loss_sum"]) / targets
    return Evaluation(loss, targets, reader.num_samples, totals | rows_in_order(accelerator, rows), chunk)


class _Counts(NamedTuple):
    """One process's counts of its batches."""

    sums: dict[str, Tensor]  # on the device
    rows: dict[str, list[Tensor]]  # on the host, batch by batch
    left: bool


def _count(reader: EvaluationReader, module: nn.Module, chunk_size: int, is_over: Callable[[], bool] | None) -> _Counts:
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    targets, left, alike = 0, False, reader.forwards_alike
    batches = reader.batches_for_all() if alike else ((batch, True) for batch in reader.batches(chunk_size))
    for (batch, num_targets), is_counted in batches:
        left = is_over is not None and is_over()
        if alike and is_over is not None:
            left = _on_any(reader, left)
        if left:
            break
        found = module(batch, "counts")
        if not is_counted:
            continue
        targets += num_targets
        for name, value in found.items():
            if name.startswith(ROWS):
                rows.setdefault(name, []).append(value.cpu())
            else:
                value = value.to(_sum_dtype(value))
                sums[name] = sums[name] + value if name in sums else value
    sums["num_targets"] = torch.tensor(targets, device=reader.accelerator.device)
    return _Counts(sums, rows, left)


def _on_any(reader: EvaluationReader, here: bool) -> bool:
    """Return whether something is true on some process; all processes call it."""
    return bool(reader.accelerator.reduce(torch.tensor(int(here), device=reader.accelerator.device)))


def _sum_dtype(value: Tensor) -> torch.dtype:
    """Return int64 for integers, which stay exact; else fp64, so that the order of a sum is not seen in what is printed. MPS has none."""
    if not value.dtype.is_floating_point:
        return torch.int64
    return torch.float32 if value.device.type == "mps" else torch.float64


def _sum_over_processes(accelerator: Accelerator, here: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return sums over all processes that read different samples; one that had no batch learns the names from the others."""
    described = gather_object([{name: (value.shape, value.dtype) for name, value in here.items()}])
    shapes = {name: shape for each in described for name, shape in each.items()}
    if not parallel_dims(accelerator).is_first_in_group:  # others of its group have counted the same
        here = {}
    totals = {}
    for name, (shape, dtype) in sorted(shapes.items()):
        value = here[name] if name in here else torch.zeros(shape, dtype=dtype, device=accelerator.device)
        totals[name] = accelerator.reduce(value).cpu().numpy()
    return totals


def rows_in_order(accelerator: Accelerator, rows: Mapping[str, list[Tensor]]) -> dict[str, NDArray[Any]]:
    """Return the rows that each process kept, batch by batch, as one array a name in the order of the samples, on every process.

    Processes took batches in turn (`data.order.evaluation_batches`), so rows are joined in turn.
    """
    gathered = gather_object([dict(rows)])[:: parallel_dims(accelerator).num_sharing]
    result = {}
    for name in sorted({name for each in gathered for name in each}):
        turns = zip_longest(*(each.get(name, []) for each in gathered))
        result[name] = torch.cat([batch for turn in turns for batch in turn if batch is not None]).numpy()
    return result
