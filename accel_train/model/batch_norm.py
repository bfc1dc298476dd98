"""Running statistics, of batch norms and other modules: a step that is skipped leaves no trace in them either."""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.model.tensors import is_writable
from accel_train.runtime.private import copy_all

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class RunningStatistics:
    """Buffers that a forward in training mode changes, put back where its step turns out to be skipped.

    Those of batch norms, and whichever others the first step changes (a codebook, a moving average). One NaN in a batch makes a
    running mean NaN for ever, and evaluation with it, however well the weights are guarded. And a feature of 1e30 has an infinite
    variance but is normalised to 0, so that neither loss nor gradients show it: statistics that were finite and are not any more are put
    back whatever became of the step. All is done on the device, in a dozen kernels a step; a model without such buffers costs a
    comparison in the first step.
    """

    def __init__(self, module: nn.Module, *, shared: bool = False) -> None:
        """`shared`: all processes go on with those of process 0 in each step, as DDP has it, where nobody else sees to it."""
        self._shared = shared
        self._groups: dict[torch.dtype, list[_Buffer]] = defaultdict(list)
        self._others: list[_Buffer] = []
        """Buffers of which the first step will show whether they change."""
        self._copies: list[Tensor] = []
        self._before: dict[torch.dtype, Tensor] = {}
        for part in module.modules():
            found = [_Buffer(part, name) for name, _ in part.named_buffers(recurse=False)]
            if _can_keep_statistics(part):
                self._add(found)
            else:
                self._others += [each for each in found if is_writable(each.now)]

    def _add(self, buffers: list["_Buffer"]) -> None:
        for each in buffers:
            self._groups[each.now.dtype].append(each)

    def keep(self) -> None:
        """Copy them before the forward."""
        if self._shared:
            self.share()
        self._copies = [each.now.clone() for each in self._others]
        self._before = {dtype: _flat(buffers) for dtype, buffers in self._groups.items()}

    def share(self) -> None:
        """Give all processes those of process 0, which are saved, to evaluate with."""
        for buffers in self._groups.values():
            values = _flat(buffers)
            dist.broadcast(values.view(torch.uint8), 0)
            _write(values, buffers)

    def put_back(self, skipped: Tensor) -> None:
        """After the update: as they were, where `skipped` (0-dim, on the device) is 1 or they are not finite any more."""
        if self._others:
            self._find_changing()
        if not self._groups:
            return
        now = {dtype: _flat(buffers) for dtype, buffers in self._groups.items()}
        is_bad = skipped.to(next(iter(now.values())).device, non_blocking=True) != 0
        for dtype, values in now.items():
            if values.is_floating_point():
                is_bad = is_bad | (torch.isfinite(self._before[dtype]) & ~torch.isfinite(values)).any()
        for dtype, buffers in self._groups.items():
            _write(torch.where(is_bad, self._before[dtype], now[dtype]), buffers)

    def _find_changing(self) -> None:
        """Take in the other buffers that the first step has changed, on any process."""
        is_other = [each.differs_from(copy) for each, copy in zip(self._others, self._copies, strict=True)]
        if dist.is_initialized():
            flags = torch.tensor(is_other, dtype=torch.uint8, device=self._others[0].now.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            is_other = flags.bool().tolist()
        changing = [
            (each, copy) for each, copy, other in zip(self._others, self._copies, is_other, strict=True) if other
        ]
        self._others, self._copies = [], []
        self._add([each for each, _ in changing])
        for dtype, buffers in self._groups.items():
            copies = [copy.reshape(-1) for each, copy in changing if each.now.dtype == dtype]
            if copies:
                before = [self._before[dtype]] if dtype in self._before else []
                self._before[dtype] = torch.cat((*before, *copies))
            assert self._before[dtype].numel() == sum(each.now.numel() for each in buffers), "in the order of the group"


@dataclass(frozen=True)
class _Buffer:
    """A buffer by its place: a forward may put another tensor there."""

    part: nn.Module
    name: str

    @property
    def now(self) -> Tensor:
        buffer: Tensor = getattr(self.part, self.name)  # get_buffer takes twice as long, for each several times a step
        return buffer

    def differs_from(self, copy: Tensor) -> bool:
        """Return whether a bit has changed; False where it is of another type or shape now, as a cache is that grows."""
        now = self.now
        if now.shape != copy.shape or now.dtype != copy.dtype:
            return False
        return not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (now, copy)))


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm of torch's own or one derived from it."""
    return _can_keep_statistics(module) and not isinstance(module, INSTANCE_NORMS)


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether it keeps running statistics, or could: its kernels take no 16-bit weights with statistics in fp32."""
    return any(map(_can_keep_statistics, module.modules()))


def _can_keep_statistics(module: nn.Module) -> bool:
    return hasattr(module, "track_running_stats")  # all batch and instance norms have it


def _write(values: Tensor, buffers: list[_Buffer]) -> None:
    targets = [each.now for each in buffers]
    pieces = values.split([target.numel() for target in targets])
    copy_all(targets, [piece.view_as(target) for piece, target in zip(pieces, targets, strict=True)])


def _flat(buffers: list[_Buffer]) -> Tensor:
    return torch.cat([each.now.reshape(-1) for each in buffers])
