"""Evaluation: every sample once over all processes, weighted by targets; what adds up is summed on the device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from accel_train.data_group import data_group
from accel_train.loading import read_batches
from accel_train.memory import is_out_of_memory
from accel_train.sampling import evaluation_batches
from accel_train.state import DataError
from accel_train.step import MicroBatch
from accel_train.task import TaskData

ROWS = "rows_"
"""What `Task.evaluate_batch` calls so is kept for each sample; everything else is summed."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation counted, the same on all processes."""

    loss: float
    """Mean over all targets."""
    num_targets: int
    num_samples: int
    totals: dict[str, NDArray[Any]]
    """Sums of what the task counts, and `rows_*` in the order of the samples."""
    piece_size: int
    """Samples that this process forwarded at once: fewer than asked where memory did not hold them."""


class EvaluationLeft(Exception):
    """An evaluation was left before its end, on all processes, because the run was asked to stop."""


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; each submodule gets back the mode it had."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def evaluate(
    accelerator: Accelerator,
    module: nn.Module,
    data: TaskData,
    per_device_batch_size: int,
    *,
    max_samples: int | None,
    num_workers: int,
    pin_memory: bool,
    piece_size: int | None = None,
    is_over: Callable[[], bool] | None = None,
    timeout_seconds: float = 0,
    in_lockstep: bool = False,
) -> Evaluation:
    """The loss and the counts on the evaluation data: the same for any batch size and any number of processes, up to rounding.

    `module` is the training module as Accelerate left it inside its wrapper: the wrapper would synchronise processes, and
    they need not have the same number of batches. With `max_samples`, that many samples, evenly spaced. Sums are kept on the
    device and read once, so memory does not grow with the data; rows cost the host what they hold. A batch is forwarded in
    pieces of `piece_size` (none: whole); where memory runs out, this process begins again with pieces half as large.
    `is_over` is asked before each batch. `in_lockstep` all processes forward as many batches as any of them (FSDP gathers
    weights in each), and memory that runs out is an error.

    Raises:
        EvaluationLeft: some process was told that it is over before its last batch; raised on all.
        DataError: no sample has a target; raised on all.
    """
    left = False

    def until_over(batches: Iterator[tuple[MicroBatch, bool]]) -> Iterator[tuple[MicroBatch, bool]]:
        nonlocal left
        for batch in batches:
            left = is_over is not None and is_over()
            if in_lockstep and is_over is not None:
                left = _on_any(accelerator, left)
            if left:
                return
            yield batch

    piece = per_device_batch_size if in_lockstep else piece_size or per_device_batch_size
    count = _num_samples(data, max_samples)
    counted = None
    while counted is None:
        batches = evaluation_reader(
            accelerator, data, per_device_batch_size, max_samples, num_workers, pin_memory, piece, timeout_seconds
        )
        reader: Iterator[tuple[MicroBatch, bool]] = ((batch, True) for batch in batches)
        try:
            with evaluation_mode(module):
                reader = _filled_up(reader, accelerator, data, count, per_device_batch_size) if in_lockstep else reader
                counted = _count(module, until_over(reader))
        except (RuntimeError, MemoryError) as error:
            if piece == 1 or in_lockstep or not is_out_of_memory(error):
                raise
        if counted is None:
            piece //= 2
            if accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
    if is_over is not None and _on_any(accelerator, left):
        raise EvaluationLeft
    sums, pieces, num_targets = counted
    rows = {name: list(torch.cat(values).split(per_device_batch_size)) for name, values in pieces.items()}
    totals = _sum_over_processes(accelerator, sums, num_targets)
    targets = int(totals.pop("num_targets"))
    if targets == 0:
        raise DataError(
            f"none of the {count} evaluation samples has a target, so there is no loss to report; check the labels (or masks) of "
            "the evaluation data, and which label is ignored"
        )
    loss = float(totals["loss_sum"]) / targets
    return Evaluation(loss, targets, count, totals | rows_in_order(accelerator, rows), piece)


def _filled_up(
    batches: Iterator[tuple[MicroBatch, bool]],
    accelerator: Accelerator,
    data: TaskData,
    num_samples: int,
    per_device_batch_size: int,
) -> Iterator[tuple[MicroBatch, bool]]:
    """These batches, and then as many that do not count (False) as the process with the most has more."""
    missing = -(-num_samples // (per_device_batch_size * data_group(accelerator).size))
    for batch in batches:
        missing -= 1
        yield batch
    assert data.eval is not None
    for _ in range(missing):
        (filler,) = read_batches(data.eval, data.collate, iter([[0]]), accelerator.device, 0, False)
        yield filler, False


def _on_any(accelerator: Accelerator, here: bool) -> bool:
    """Whether something is so on some process; asked on all of them."""
    if accelerator.num_processes == 1:
        return here
    anywhere = torch.tensor(int(here), device=accelerator.device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    return bool(anywhere)


def _count(
    module: nn.Module, batches: Iterator[tuple[MicroBatch, bool]]
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]], int]:
    """Sums on the device, rows on the host batch by batch, and the number of targets; of the batches that count."""
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    num_targets = 0
    for (batch, batch_targets), does_count in batches:
        counts = module(batch, "counts")
        if not does_count:
            continue
        num_targets += batch_targets
        for name, value in counts.items():
            if name.startswith(ROWS):
                rows.setdefault(name, []).append(value.cpu())
            else:
                value = value.to(_sum_dtype(value))
                sums[name] = sums[name] + value if name in sums else value
    return sums, rows, num_targets


def evaluation_reader(
    accelerator: Accelerator,
    data: TaskData,
    per_device_batch_size: int,
    max_samples: int | None,
    num_workers: int,
    pin_memory: bool,
    piece_size: int | None = None,
    timeout_seconds: float = 0,
) -> Iterator[MicroBatch]:
    """This process's batches of the evaluation data, on the device, each in pieces of `piece_size` (none: whole)."""
    assert data.eval is not None
    total, count = len(data.eval), _num_samples(data, max_samples)  # type: ignore[arg-type]
    group = data_group(accelerator)
    index_lists = (
        [int(index) * total // count for index in batch[start : start + (piece_size or per_device_batch_size)]]
        for batch in evaluation_batches(count, per_device_batch_size, group.rank, group.size)
        for start in range(0, len(batch), piece_size or per_device_batch_size)
    )
    device = accelerator.device
    return read_batches(data.eval, data.collate, index_lists, device, num_workers, pin_memory, timeout_seconds)


def _num_samples(data: TaskData, max_samples: int | None) -> int:
    total = len(data.eval)  # type: ignore[arg-type]
    return total if max_samples is None else min(max_samples, total)


def _sum_dtype(value: Tensor) -> torch.dtype:
    """Integers stay exact; other sums are fp64, so that their order is not seen in what is printed. MPS has neither fp64."""
    if not value.dtype.is_floating_point:
        return torch.int64
    return torch.float32 if value.device.type == "mps" else torch.float64


def _sum_over_processes(
    accelerator: Accelerator, sums: Mapping[str, Tensor], num_targets: int
) -> dict[str, NDArray[Any]]:
    """Sums over all processes that read different samples. One that had no batch does not know what is counted, and learns it
    from the others."""
    if accelerator.num_processes == 1:
        return {**{name: value.cpu().numpy() for name, value in sums.items()}, "num_targets": np.array(num_targets)}
    described: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(described, {name: (value.shape, value.dtype) for name, value in sums.items()})
    shapes = {name: shape for one in described for name, shape in one.items()}
    counts = data_group(accelerator).does_count  # others of its group have counted the same
    counted = torch.tensor(num_targets if counts else 0, device=accelerator.device)
    dist.all_reduce(counted)
    totals = {"num_targets": counted.cpu().numpy()}
    for name, (shape, dtype) in sorted(shapes.items()):
        value = sums.get(name) if counts else None
        value = torch.zeros(shape, dtype=dtype, device=accelerator.device) if value is None else value.clone()
        dist.all_reduce(value)
        totals[name] = value.cpu().numpy()
    return totals


def rows_in_order(accelerator: Accelerator, rows: Mapping[str, list[Tensor]]) -> dict[str, NDArray[Any]]:
    """Rows kept by each process, batch by batch, as one array a name in the order of the samples, on every process.

    Batches were dealt out in turn (`sampling.evaluation_batches`), so they are taken in turn.
    """
    gathered: list[Any] = [rows]
    if accelerator.num_processes > 1:
        gathered = [None] * accelerator.num_processes
        dist.all_gather_object(gathered, dict(rows))
        gathered = gathered[:: data_group(accelerator).num_sharing]
    names = sorted({name for one in gathered for name in one})
    result = {}
    for name in names:
        batches = [one.get(name, []) for one in gathered]
        turns = range(max(map(len, batches)))
        in_turn = [of_rank[turn] for turn in turns for of_rank in batches if turn < len(of_rank)]
        result[name] = torch.cat(in_turn).numpy()
    return result
