"""Evaluation: every sample once over all processes, weighted by targets, in memory that does not grow with the data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from accel_train.loading import read_batches
from accel_train.sampling import evaluation_batches
from accel_train.task import TaskData


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over all targets, and how many there were."""

    loss: float
    num_targets: int


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
) -> Evaluation:
    """The loss on the evaluation data: the same for any batch size and any number of processes, up to rounding.

    `module` is the training module as Accelerate left it inside its wrapper: the wrapper would synchronise processes, and
    they need not have the same number of batches. With `max_samples`, that many samples, evenly spaced.
    """
    assert data.eval is not None
    total = len(data.eval)  # type: ignore[arg-type]
    count = total if max_samples is None else min(max_samples, total)
    index_lists = (
        [int(index) * total // count for index in batch]
        for batch in evaluation_batches(
            count, per_device_batch_size, accelerator.process_index, accelerator.num_processes
        )
    )
    dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
    totals = torch.zeros(2, dtype=dtype, device=accelerator.device)
    num_targets = 0
    with evaluation_mode(module):
        for batch, batch_targets in read_batches(
            data.eval, data.collate, index_lists, accelerator.device, num_workers, pin_memory
        ):
            totals[0] += module(batch)
            num_targets += batch_targets
    totals[1] = num_targets
    if accelerator.num_processes > 1:
        dist.all_reduce(totals)
    loss_sum, targets = totals.tolist()
    return Evaluation(loss_sum / max(targets, 1), int(targets))
