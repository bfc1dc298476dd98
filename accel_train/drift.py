"""Whether all processes still hold the same weights: a checksum on the device, and one collective, where there is a pause."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_train.rollback import RollBack
from accel_train.run import Run
from accel_train.saving import kept_checkpoints
from accel_train.state import TrainingStopped

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NONNEGATIVE = 2**62 - 1


def check_drift(run: Run) -> None:
    """Compare the weights of all processes; where they differ, say so and go back to a checkpoint.

    With several copies of a model that is spread over processes (HSDP), each part is compared with its copies.

    Raises:
        RollBack: to a healthy checkpoint, from before they were last compared.
        TrainingStopped: the guard allows no further rollback.
    """
    if run.accelerator.num_processes == 1:
        return
    run.let_go_of_gathered_weights()
    weights = [(name, weight) for name, weight in run.inner.model.named_parameters()]
    sums = checksums([_held_here(weight) for _, weight in weights]).to(run.accelerator.device)
    alike = run.accelerator.torch_device_mesh["dp_replicate"].get_group() if run.num_copies > 1 else None
    # The largest and (of the negated sums) the smallest in one go.
    extremes = torch.cat((sums, -sums))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=alike)
    differ = extremes[: len(sums)] != -extremes[len(sums) :]
    if alike is not None:  # each part has copies of its own, and all processes take the same way from here
        of_all = differ.to(torch.uint8)
        dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
        differ = of_all != 0
    if not bool(differ.any()):
        return
    names = [name for (name, _), is_other in zip(weights, differ.tolist(), strict=True) if is_other]
    step = run.state.step
    said = (
        f"step {step}: the weights differ between processes{_odd_ranks(run, sums[differ], alike)}: {names[0]}"
        f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
    )
    run.observer.on_event("drift", step, said, parameters=names)
    verdict = run.guard.judge_drift(said)
    if verdict.action == "stop":
        run.observer.on_event("stop", step, verdict.reason)
        raise TrainingStopped(f"{verdict.reason}. {kept_checkpoints(run)}")
    raise RollBack(verdict.reason, step)


def _held_here(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def checksums(tensors: list[Tensor]) -> Tensor:
    """A number for each tensor that any one changed bit changes: the sum of its bits as integers, on the device."""
    return torch.stack([_bits(tensor).sum(dtype=torch.int64) & _NONNEGATIVE for tensor in tensors])


def _bits(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_BITS[values.element_size()])


def _odd_ranks(run: Run, here: Tensor, alike: dist.ProcessGroup | None) -> str:
    """Which processes are alone with what they hold, where most of those that should hold the same agree."""
    everywhere: list[Any] = [None] * run.accelerator.num_processes
    dist.all_gather_object(everywhere, here.tolist())
    groups: list[Any] = [None] * run.accelerator.num_processes
    dist.all_gather_object(groups, list(range(len(groups))) if alike is None else dist.get_process_group_ranks(alike))
    odd = []
    for rank, sums in enumerate(everywhere):
        usual, count = Counter(tuple(everywhere[other]) for other in groups[rank]).most_common(1)[0]
        if tuple(sums) != usual and 2 * count > len(groups[rank]):
            odd.append(f"rank {rank}")
    return f", and {' and '.join(odd)} {'is' if len(odd) == 1 else 'are'} not as the others" if odd else ""
