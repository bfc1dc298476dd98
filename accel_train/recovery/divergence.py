"""Check that all processes still hold the same weights, by a checksum on the device and one collective.

The check runs only between steps.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.core.errors import TrainingStopped
from accel_train.engine.run import RunContext
from accel_train.engine.save import kept_checkpoints
from accel_train.model.tensors import local_part
from accel_train.recovery.rollback import RollbackRequested
from accel_train.runtime.process_group import concluded

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NONNEGATIVE = 2**62 - 1


def check_divergence(run: RunContext) -> None:
    """Compare the weights of all processes. If they differ, report replica drift and roll back to a checkpoint.

    With several copies of a sharded model (HSDP), each shard is compared with its copies.

    Raises:
        RollbackRequested: to a known-good checkpoint from before the last comparison.
        TrainingStopped: the guard allows no further rollback.
    """
    run.strategy.release_gathered()
    weights = dict(run.strategy.inner.model.named_parameters())
    sums = checksums([local_part(each) for each in weights.values()]).to(run.accelerator.device)
    copies = run.strategy.copies_group()
    # One collective returns the largest and the (negated) smallest sums.
    extremes = torch.cat((sums, -sums))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=copies)
    differ = extremes[: len(sums)] != -extremes[len(sums) :]
    if copies is not None:  # shards are compared separately, but all processes must decide alike
        anywhere = differ.to(torch.uint8)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        differ = anywhere != 0
    if not bool(differ.any()):
        return
    names = [name for name, is_other in zip(weights, differ.tolist(), strict=True) if is_other]
    step, more = run.state.step, f" and {len(names) - 1} more" if len(names) > 1 else ""
    group = range(run.accelerator.num_processes) if copies is None else dist.get_process_group_ranks(copies)
    odd = concluded((tuple(sums[differ].tolist()), list(group)), _odd_ranks)
    message = f"step {step}: weights differ between processes{odd}: {names[0]}{more}"
    run.observer.on_event("drift", step, message, names_step=True, parameters=names)
    decision = run.guard.roll_back_or_stop(message)
    if decision.action == "stop":
        run.observer.on_event("stop", step, decision.reason, names_step=True)
        raise TrainingStopped(f"{decision.reason}. {kept_checkpoints(run)}")
    raise RollbackRequested(decision.reason, step)


def checksums(tensors: list[Tensor]) -> Tensor:
    """Return one number per tensor, on the device: the sum of its bits as integers. Any changed bit changes it."""
    return torch.stack([_bits(tensor).sum(dtype=torch.int64) & _NONNEGATIVE for tensor in tensors])


def _bits(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_BITS[values.element_size()])


def _odd_ranks(everywhere: list[tuple[tuple[int, ...], list[int]]]) -> str:
    """Return which ranks differ from the majority of the ranks that should hold the same weights.

    `everywhere` has the checksums of each rank, and the ranks that should have the same.
    """
    odd = []
    for rank, (sums, others) in enumerate(everywhere):
        usual, count = Counter(everywhere[other][0] for other in others).most_common(1)[0]
        if sums != usual and 2 * count > len(others):
            odd.append(f"rank {rank}")
    return f" ({' and '.join(odd)} {'differs' if len(odd) == 1 else 'differ'} from the majority)" if odd else ""
