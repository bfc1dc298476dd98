"""The running statistics of batch norm: a step that is skipped leaves no trace in them either."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.runtime.private import copy_all

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class RunningStatistics:
    """Buffers that a forward in training mode changes, put back where its step turns out to be skipped.

    One NaN in a batch makes a running mean NaN for ever, and evaluation with it, however well the weights are guarded. And a
    feature of 1e30 has an infinite variance but is normalised to 0, so that neither loss nor gradients show it: statistics
    that are not finite are put back whatever became of the step. All is done on the device, in a dozen kernels a step; a model
    without batch norm costs nothing.
    """

    def __init__(self, module: nn.Module, *, shared: bool = False) -> None:
        """`shared`: all processes go on with those of process 0 in each step, as DDP has it, where nobody else sees to it."""
        self._shared = shared
        self._groups = _buffers_by_dtype(module)
        self._before: list[Tensor] = []

    def keep(self) -> None:
        """Copy them before the forward."""
        if self._shared:
            self.share()
        self._before = [_flat(buffers) for buffers in self._groups]

    def share(self) -> None:
        """Give all processes those of process 0, which are saved, to evaluate with."""
        for buffers in self._groups:
            values = _flat(buffers)
            dist.broadcast(values, 0)
            _write(values, buffers)

    def put_back(self, skipped: Tensor) -> None:
        """After the update: as they were, where `skipped` (0-dim, on the device) is 1 or they are not finite."""
        if not self._groups:
            return
        now = [_flat(buffers) for buffers in self._groups]
        is_bad = skipped.to(now[0].device, non_blocking=True) != 0
        for values in now:
            if values.is_floating_point():
                is_bad = is_bad | ~torch.isfinite(values).all()
        for buffers, before, after in zip(self._groups, self._before, now, strict=True):
            _write(torch.where(is_bad, before, after), buffers)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm of torch's own or one derived from it."""
    return _can_keep_statistics(module) and not isinstance(module, INSTANCE_NORMS)


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether it keeps running statistics, or could: its kernels take no 16-bit weights with statistics in fp32."""
    return any(map(_can_keep_statistics, module.modules()))


def _can_keep_statistics(module: nn.Module) -> bool:
    return hasattr(module, "track_running_stats")  # all batch and instance norms have it


def _buffers_by_dtype(module: nn.Module) -> list[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for part in module.modules():
        if _can_keep_statistics(part):
            for buffer in part.buffers(recurse=False):
                by_dtype[buffer.dtype].append(buffer)
    return list(by_dtype.values())


def _write(values: Tensor, buffers: list[Tensor]) -> None:
    pieces = values.split([buffer.numel() for buffer in buffers])
    copy_all(buffers, [piece.view_as(buffer) for piece, buffer in zip(pieces, buffers, strict=True)])


def _flat(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])
