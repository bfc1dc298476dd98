"""Running statistics of batch norms and other modules. A skipped step leaves them unchanged."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.model.tensors import PACKED, is_writable, load_extra_state, packed, same_bits, split_state
from accel_train.runtime.private import copy_all

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class RunningStatistics:
    """Snapshot of the buffers and extra state that a training forward changes, restored when the step is skipped.

    It covers batch norms, and every other buffer and extra state that the first step changes (a codebook, a moving
    average). One NaN in a batch would otherwise make a running mean NaN permanently, and evaluation uses that mean.

    Statistics that were finite and are now infinite or NaN are restored even if the step was applied. A feature of 1e30
    has an infinite variance but is normalized to 0, so neither the loss nor the gradients show it.

    All work runs on the device, in about a dozen kernels per step. A model without such buffers costs one comparison in
    the first step. For a model whose extra state changes, the host copies it in each step, and waits for the update.
    """

    def __init__(self, module: nn.Module, *, shared: bool = False) -> None:
        """Find the buffers of `module`; with `shared`, every step starts from the buffers of process 0.

        DDP does the same. Set `shared` only if nothing else keeps the processes' buffers equal.
        """
        self._shared = shared
        self._groups: dict[torch.dtype, list[_Buffer]] = defaultdict(list)
        self._others: list[_Buffer] = []
        """Buffers that join the snapshot if the first step changes them."""
        self._copies: list[Tensor] = []
        self._before: dict[torch.dtype, Tensor] = {}
        self._module, self._extra = module, dict[str, Tensor]()
        self._has_extra = bool(split_state(module)[1])
        """Whether modules have extra state. From the second step on: whether the first step has changed it."""
        self._is_first = True
        self.on_change: Callable[[Sequence[str], Sequence[str]], None] | None = None
        """Function that gets the names of all state, batch norms aside, that the first step changed on any process,
        and of the part that is not in checkpoints.
        """
        for path, part in module.named_modules():
            found = [_Buffer(part, name, f"{path}.{name}".lstrip(".")) for name, _ in part.named_buffers(recurse=False)]
            if keeps_statistics(part):
                for each in found:
                    self._groups[each.now.dtype].append(each)
            else:
                self._others += [each for each in found if is_writable(each.now)]

    def keep(self) -> None:
        """Copy the buffers before the forward."""
        if self._shared:
            self.share()
        self._copies = [each.now.clone() for each in self._others]
        if self._has_extra:
            self._extra = {name: each.clone() for name, each in packed(split_state(self._module)[1]).items()}
        self._before = {dtype: _flat(buffers) for dtype, buffers in self._groups.items()}

    def share(self) -> None:
        """Broadcast the buffers of process 0 to all processes. Checkpoints save the buffers of process 0."""
        for buffers in self._groups.values():
            values = _flat(buffers)
            dist.broadcast(values.view(torch.uint8), 0)
            _write(values, buffers)

    def put_back(self, skipped: Tensor) -> None:
        """Restore the buffers after the update if `skipped` (0-dim, on the device) is 1 or one became Inf or NaN."""
        if self._is_first and (self._others or self._has_extra):
            self._find_changing()
        self._is_first = False
        if self._has_extra and bool(skipped):
            load_extra_state(self._module, self._extra)
        if not self._groups:
            return
        now = {dtype: _flat(buffers) for dtype, buffers in self._groups.items()}
        is_bad = skipped.to(next(iter(now.values())).device, non_blocking=True) != 0
        for dtype, values in now.items():
            if values.is_floating_point():
                is_bad = is_bad | (torch.isfinite(self._before[dtype]) & ~torch.isfinite(values)).any()
        for dtype, buffers in self._groups.items():
            _write(torch.where(is_bad, self._before[dtype], now[dtype]), buffers)

    def undo(self) -> None:
        """Restore the buffers and the extra state from before a forward whose step is repeated."""
        for dtype, buffers in self._groups.items():
            _write(self._before[dtype], buffers)
        for each, copy in zip(self._others, self._copies):
            if each.differs_from(copy):
                each.now.copy_(copy)
        load_extra_state(self._module, self._extra)

    def _find_changing(self) -> None:
        """Add the other buffers that the first step has changed on any process, and report all changed state."""
        is_other = [each.differs_from(copy) for each, copy in zip(self._others, self._copies, strict=True)]
        now = packed(split_state(self._module)[1])
        is_other += [not _is_equal(self._extra.get(name), each) for name, each in now.items()]
        if dist.is_initialized():
            device = next(chain(self._module.buffers(), self._module.parameters())).device
            flags = torch.tensor(is_other, dtype=torch.uint8, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            is_other = flags.bool().tolist()
        changing = [(each, copy) for each, copy, other in zip(self._others, self._copies, is_other) if other]
        self._has_extra = any(is_other[len(self._others) :])
        self._others, self._copies, self._extra = [], [], self._extra if self._has_extra else {}
        for each, copy in changing:
            assert copy.numel() == each.now.numel(), "a buffer that changes has the same shape on all processes"
            self._groups[copy.dtype].append(each)
            before = [self._before[copy.dtype]] if copy.dtype in self._before else []
            self._before[copy.dtype] = torch.cat((*before, copy.reshape(-1)))
        names = [each.path for each, _ in changing]
        extra = [name.removesuffix(PACKED) for name in now]
        names += [name for name, other in zip(reversed(extra), reversed(is_other)) if other]
        if names and self.on_change is not None:
            kept = {*split_state(self._module)[0], *extra}
            self.on_change(names, [name for name in names if name not in kept])


@dataclass(frozen=True)
class _Buffer:
    """A buffer identified by its module and name, because a forward may replace the tensor."""

    part: nn.Module
    name: str
    path: str
    """Name in the whole module."""

    @property
    def now(self) -> Tensor:
        # get_buffer takes twice as long, and this runs several times per step for each buffer.
        return getattr(self.part, self.name)

    def differs_from(self, copy: Tensor) -> bool:
        """Return whether any bit differs from `copy`; False if the type or shape has changed, as in a growing cache."""
        now = self.now
        return now.shape == copy.shape and now.dtype == copy.dtype and not same_bits(now, copy)


def _is_equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a torch batch norm or derived from one."""
    return keeps_statistics(module) and not isinstance(module, INSTANCE_NORMS)


def trained_batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the batch norms that normalize by the statistics of each micro-batch."""
    return [each for each in module.modules() if is_batch_norm(each) and each.training]


class _SumOfAll(torch.autograd.Function):
    """Differentiable sum of a tensor over all processes. Its gradient is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class SyncedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm that computes its statistics over the micro-batches of all processes, on any device.

    torch's SyncBatchNorm refuses CPU tensors. In evaluation mode, or with a single process, this class acts as the
    original batch norm.
    """

    @classmethod
    def of(cls, norm: Any) -> "SyncedBatchNorm":
        """Return a synced batch norm with the parameters, buffers and hooks of `norm`."""
        synced = cls.__new__(cls)
        synced.__dict__ = norm.__dict__
        return synced

    def _check_input_dim(self, input: Tensor) -> None:  # torch's name
        """Accept any input with channels."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Normalize (N, C, ...) by the mean and variance over all dimensions except C, across all processes."""
        if not (self.training and dist.is_initialized()):
            return super().forward(input)
        others = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        here = values.new_full((1,), input.numel() / input.shape[1])
        sums = _SumOfAll.apply(torch.cat((values.sum(others), here)))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        variance = _SumOfAll.apply(centred.square().sum(others)) / count
        self._keep(mean.detach(), variance.detach() * count / (count - 1))
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics as torch's batch norms do."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else (1 / self.num_batches_tracked).to(mean.dtype)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


def sync_batch_norms(module: nn.Module) -> int:
    """Replace the trained torch batch norms in a module by synced ones; return their number.

    Raises:
        ValueError: the module trains no batch norm, or one is of a class derived from torch's.
    """
    norms = trained_batch_norms(module)
    if not norms:
        raise ValueError("parallel.sync_batch_norm: this model trains no batch norm; leave it out")
    known = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    other = next((type(each).__name__ for each in norms if type(each) not in known), None)
    if other is not None:
        raise ValueError(
            f"parallel.sync_batch_norm: {other} is not a batch norm of torch.nn, so it cannot be replaced; leave it out"
        )
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if any(child is each for each in norms):
                setattr(parent, name, SyncedBatchNorm.of(child))
    return len(norms)


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a module has batch or instance norms, whose kernels refuse 16-bit weights with fp32 statistics."""
    return any(map(keeps_statistics, module.modules()))


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is a batch or instance norm, which may have running statistics."""
    # They all have this attribute.
    return hasattr(module, "track_running_stats")


def _write(values: Tensor, buffers: list[_Buffer]) -> None:
    targets = [each.now for each in buffers]
    pieces = values.split([target.numel() for target in targets])
    copy_all(targets, [piece.view_as(target) for piece, target in zip(pieces, targets, strict=True)])


def _flat(buffers: list[_Buffer]) -> Tensor:
    return torch.cat([each.now.reshape(-1) for each in buffers])
