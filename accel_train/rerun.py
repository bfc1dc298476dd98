"""Forward and backward of a step once more, each process for itself, with no trace left of it."""

import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accel_train.lockstep import Lockstep
from accel_train.module_watch import ModuleWatch
from accel_train.step import MicroBatch, TrainingModule


@dataclass(frozen=True)
class Outcome:
    """One forward and backward."""

    loss: float
    norms: dict[str, float]
    """Of the gradients, unscaled, by parameter."""
    total: float

    @property
    def is_finite(self) -> bool:
        """As the step itself judges: by the loss, and by the norm of all gradients."""
        return math.isfinite(self.loss) and math.isfinite(self.total)

    @property
    def not_finite(self) -> list[str]:
        """Parameters whose gradient is not finite, or too large to have a norm."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]


class Rerun:
    """Forward and backward of the training module, as in the step, but for this process alone and with no trace left.

    `lockstep` is needed where the processes meet in each forward: each pass is then a turn that all take part in.
    """

    def __init__(
        self,
        inner: TrainingModule,
        *,
        num_targets: int,
        world_size: int,
        loss_scale: float | None,
        device: torch.device,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.inner, self.device, self.scale, self.lockstep = inner, device, loss_scale or 1.0, lockstep
        self.buffers = Buffers(inner)
        self.parameters = {name: p for name, p in inner.model.named_parameters() if p.requires_grad}
        self.share = torch.tensor(world_size / max(num_targets, 1), dtype=torch.float32, device=device) * self.scale

    def compute(self, micro_batch: MicroBatch, watch: ModuleWatch | None = None) -> Outcome:
        """What `step.forward_backward` computes for this micro-batch; no gradient is kept, and no hook of DDP fires."""
        if self.lockstep is None:
            return self._compute(micro_batch, watch)
        return self.lockstep.take_turn(partial(self._compute, micro_batch, watch))

    def _compute(self, micro_batch: MicroBatch, watch: ModuleWatch | None = None) -> Outcome:
        batch, num_targets = micro_batch
        with torch.enable_grad():
            loss = self.inner(batch)
            if watch is not None:
                watch.forward_is_over()
            detached = loss.detach()
            weight = torch.zeros_like(self.share) if num_targets == 0 else self.share + (detached - detached)
            found = self._gradient_norms(loss, weight)
        norms = torch.stack(list(found.values())) / self.scale
        # Without a target it weighs nothing, and the step does not look at its loss.
        value = 0.0 if num_targets == 0 else float(detached)
        total = float(torch.linalg.vector_norm(norms))
        return Outcome(value, dict(zip(found, norms.tolist(), strict=True)), total)

    def _gradient_norms(self, loss: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """By parameter, 0-dim fp32 on the device; of those that took part."""
        if self.lockstep is not None:
            seen = self.lockstep.gradient_norms(loss, weight)
            return {name: seen[f"model.{name}"] for name in self.parameters if f"model.{name}" in seen}
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), weight, allow_unused=True)
        found = {
            name: gradient for name, gradient in zip(self.parameters, gradients, strict=True) if gradient is not None
        }
        norms = [norm.float() for norm in torch._foreach_norm(list(found.values()))]
        return dict(zip(found, norms, strict=True))

    def stand_in(self, micro_batch: MicroBatch) -> None:
        """Compute something for the sake of the others, in their turn."""
        with each_row_for_itself(self.inner):
            self._compute(micro_batch)

    def compute_again(self, part: MicroBatch, state: "RandomState", watch: ModuleWatch | None = None) -> Outcome:
        """The same with the random numbers and buffers that it began with."""
        state.put_back()
        self.buffers.put_back()
        return self.compute(part, watch)

    def compute_apart(self, part: MicroBatch, state: "RandomState", watch: ModuleWatch | None = None) -> Outcome:
        """The same for some rows, none of which depends on the others."""
        state.put_back()
        self.buffers.put_back()
        with each_row_for_itself(self.inner):
            return self.compute(part, watch)


class RandomState:
    """Where torch's random numbers stand: on the host and on this process's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """Go on from there."""
        torch.set_rng_state(self.host)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class Buffers:
    """The buffers of a module, to be put back: batch norm's change with every forward."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [
            (part, name, buffer, buffer.clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and not _is_expanded(buffer)
        ]

    def put_back(self) -> None:
        """As they were."""
        with torch.no_grad():
            for part, name, buffer, content in self._kept:
                buffer.copy_(content)
                part._buffers[name] = buffer


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a module may compute as it likes: buffers and random numbers are put back as they were."""
    buffers, states = Buffers(module), (RandomState(device), random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        buffers.put_back()
        states[0].put_back()
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def each_row_for_itself(module: nn.Module) -> Iterator[None]:
    """Inside, batch norm normalises by its running statistics, so that no row depends on the others.

    Those that are not finite count as 0 and 1; whoever calls this puts the buffers back.
    """
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training]
    for norm in norms:
        norm.training = False
        if norm.running_mean is not None and norm.running_var is not None:
            norm.running_mean.nan_to_num_(0, 0, 0)
            norm.running_var.nan_to_num_(1, 1, 1)
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, as in an index that was expanded: such a buffer cannot be written to."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def eager(compiled: bool) -> AbstractContextManager[Any]:
    """Inside, compiled modules run as they are written, so that hooks see every one of them."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
