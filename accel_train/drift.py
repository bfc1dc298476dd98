"""Whether all processes still hold the same weights: a checksum on the device, and one collective, where there is a pause."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.rollback import RollBack
from accel_train.run import Run
from accel_train.saving import kept_checkpoints
from accel_train.state import TrainingStopped

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NONNEGATIVE = 2**62 - 1


def check_drift(run: Run) -> None:
    """Compare the weights of all processes; where they differ, say so and go back to a checkpoint.

    Raises:
        RollBack: to a healthy checkpoint, from before they were last compared.
        TrainingStopped: the guard allows no further rollback.
    """
    if run.accelerator.num_processes == 1:
        return
    weights = [(name, weight) for name, weight in run.inner.model.named_parameters()]
    sums = checksums([weight for _, weight in weights])
    # The largest and (of the negated sums) the smallest in one go.
    extremes = torch.cat((sums, -sums))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    differ = extremes[: len(sums)] != -extremes[len(sums) :]
    if not bool(differ.any()):
        return
    names = [name for (name, _), is_other in zip(weights, differ.tolist(), strict=True) if is_other]
    step = run.state.step
    said = (
        f"step {step}: the weights differ between processes{_odd_ranks(run, sums[differ])}: {names[0]}"
        f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
    )
    run.observer.on_event("drift", step, said, parameters=names)
    verdict = run.guard.judge_drift(said)
    if verdict.action == "stop":
        run.observer.on_event("stop", step, verdict.reason)
        raise TrainingStopped(f"{verdict.reason}. {kept_checkpoints(run)}")
    raise RollBack(verdict.reason, step)


def checksums(tensors: list[Tensor]) -> Tensor:
    """A number for each tensor that any one changed bit changes: the sum of its bits as integers, on the device."""
    return torch.stack([_bits(tensor).sum(dtype=torch.int64) & _NONNEGATIVE for tensor in tensors])


def _bits(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_BITS[values.element_size()])


def _odd_ranks(run: Run, here: Tensor) -> str:
    """Which processes are alone with what they hold, where most of them agree."""
    everywhere: list[Any] = [None] * run.accelerator.num_processes
    dist.all_gather_object(everywhere, here.tolist())
    counts = Counter(map(tuple, everywhere))
    usual, count = counts.most_common(1)[0]
    if 2 * count <= len(everywhere):
        return ""
    odd = [f"rank {rank}" for rank, sums in enumerate(everywhere) if tuple(sums) != usual]
    return f", and {' and '.join(odd)} {'is' if len(odd) == 1 else 'are'} not as the others"
