"""How the gradients of several processes become one: as DDP and FSDP2 sum them, with a note of what this process has put in."""

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from accel_train.data_group import is_sharded
from accel_train.owed_collectives import can_begin_again


class Reduction:
    """What this process has handed in of a step, bucket by bucket.

    DDP reduces a bucket of gradients as soon as it is full, in a fixed order, and each is overwritten by the mean. So here is
    the only place where a gradient can be seen that is not finite on one process and, a moment later, on all.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._layout: list[tuple[int, torch.dtype]] = []
        self._sums: list[Tensor] = []
        self._group = module.process_group
        self.is_complete = False
        """The last bucket of the step has been handed in: every parameter took part, or DDP knows which did not."""
        module.register_comm_hook(self, reduce_bucket)

    def begin(self) -> None:
        """A step begins, of which nothing has been handed in."""
        self._sums, self.is_complete = [], False

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
        self.is_complete = bucket.is_last()
        if bucket.is_last():
            del self._layout[bucket.index() + 1 :]


def reduce_bucket(reduction: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook (torch.distributed.algorithms.ddp_comm_hooks)."""
    return reduction.reduce(bucket)


@contextmanager
def gradients_seen(model: nn.Module) -> Iterator[set[str]]:
    """Inside, names of parameters are collected as they get a gradient, whatever becomes of it then."""
    seen: set[str] = set()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(lambda _, name=name: seen.add(name)) for name, each in trained]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def without_gradient(model: nn.Module, accelerator: Accelerator, seen: Collection[str] | None = None) -> list[str]:
    """Names of trained parameters that have no gradient after the backward passes of a step, on some process of DDP.

    One small collective there; where a model is spread over processes they all compute the same of it. `seen` are the names
    of those that had one, where nothing keeps it.
    """
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    if seen is not None:
        return [name for name in trained if name not in seen]
    has_none = torch.tensor([gradient is None for gradient in trained.values()], dtype=torch.uint8)
    if accelerator.num_processes > 1 and not is_sharded(accelerator):
        has_none = has_none.to(accelerator.device)
        dist.all_reduce(has_none, op=dist.ReduceOp.MAX)
    return [name for name, is_left_out in zip(trained, has_none.tolist(), strict=True) if is_left_out]


def look_for_unused(accelerator: Accelerator, wrapped: DistributedDataParallel) -> DistributedDataParallel:
    """Wrap the same module anew, so that DDP looks in each step for parameters that took no part; on all processes alike."""
    accelerator.ddp_handler.find_unused_parameters = True
    wrapped.reducer = wrapped.logger = None  # type: ignore[assignment]  # its hooks on the parameters go with it
    with warnings.catch_warnings():
        # Accelerate calls it by this name, which torch is about to rename.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
        return DistributedDataParallel(
            wrapped.module,
            device_ids=wrapped.device_ids,
            output_device=wrapped.output_device,
            **accelerator.ddp_handler.to_kwargs(),
        )


def _first(done: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return done.value()[0]


class ShardedReduction:
    """What this process has handed in of a step to FSDP2, which reduces the gradients of a block as soon as it has them."""

    def __init__(self, root: nn.Module) -> None:
        self.sums: list[Tensor] = []
        """Of each reduction, 0-dim on the device."""
        for block in root.modules():
            if isinstance(block, FSDPModule):
                groups: Any = block._get_fsdp_state()._fsdp_param_groups
                for group in groups:
                    group._reduce_scatter_comm = _Noted(group._reduce_scatter_comm, self)

    def begin(self) -> None:
        """A step begins, of which nothing has been handed in."""
        self.sums = []

    def sum_here(self) -> Tensor | None:
        """Of this process's own gradients in this step: finite where all of them were, before they were summed over processes."""
        return torch.stack([each.float() for each in self.sums]).sum() if self.sums else None


class _Noted:
    """As torch's own, which FSDPModule lets one replace (`set_custom_reduce_scatter`)."""

    def __init__(self, inner: Any, reduction: ShardedReduction) -> None:
        self._inner, self._reduction = inner, reduction

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what goes in or comes out."""
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Any:
        """Take part."""
        self._reduction.sums.append(input_tensor.sum())
        return self._inner(output_tensor=output_tensor, input_tensor=input_tensor, **how)


def note_gradients(wrapped: nn.Module, inner: nn.Module, *, num_sharing: int) -> Reduction | ShardedReduction | None:
    """What this process hands in to DDP (`wrapped`) or FSDP2 (`inner`).

    None where it is alone, where not all gradients pass there (`num_sharing` processes split each layer), or torch is before 2.13.
    """
    if isinstance(wrapped, DistributedDataParallel):
        return Reduction(wrapped)
    is_noted = num_sharing == 1 and isinstance(inner, FSDPModule) and can_begin_again()
    return ShardedReduction(inner) if is_noted else None
