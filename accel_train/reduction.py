"""How the gradients of several processes become one: as DDP sums them, with a note of what this process has put in."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Reduction:
    """What this process has handed in of a step, bucket by bucket.

    DDP reduces a bucket of gradients as soon as it is full, in a fixed order, and each is overwritten by the mean. So here is
    the only place where a gradient can be seen that is not finite on one process and, a moment later, on all.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._layout: list[tuple[int, torch.dtype]] = []
        self._sums: list[Tensor] = []
        self._group = module.process_group
        module.register_comm_hook(self, reduce_bucket)

    def begin(self) -> None:
        """A step begins, of which nothing has been handed in."""
        self._sums = []

    def sum_here(self) -> Tensor:
        """Of this process's own gradients, 0-dim on the device: finite where all of them were."""
        return torch.stack([each.float() for each in self._sums]).sum()

    def hand_in_rest(self, value: float, device: torch.device) -> bool:
        """Hand in `value` for all that the others wait for; False where there was no step yet that showed how much that is."""
        rest = self._layout[len(self._sums) :]
        for size, dtype in rest:
            bucket = torch.full((size,), value, dtype=dtype, device=device)
            dist.all_reduce(bucket, group=self._group)
            self._sums.append(bucket[0])
        return bool(rest)

    def reduce(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """The mean over all processes, under way; as torch's own `allreduce_hook`."""
        self.note(bucket)
        gradients = bucket.buffer().div_(self._group.size())
        return dist.all_reduce(gradients, group=self._group, async_op=True).get_future().then(_first)

    def note(self, bucket: dist.GradBucket) -> None:
        """Take note of a bucket that is handed in now."""
        gradients = bucket.buffer()
        if bucket.index() == 0:
            self._sums = []
        self._sums.append(gradients.sum())
        if bucket.index() == len(self._layout):
            self._layout.append((0, gradients.dtype))
        self._layout[bucket.index()] = (gradients.numel(), gradients.dtype)
        if bucket.is_last():
            del self._layout[bucket.index() + 1 :]


def reduce_bucket(reduction: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook (torch.distributed.algorithms.ddp_comm_hooks)."""
    return reduction.reduce(bucket)


def _first(done: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return done.value()[0]
