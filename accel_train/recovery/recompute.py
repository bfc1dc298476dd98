"""Recompute forward and backward of a step on this process alone, and leave no trace of it."""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_train.engine.step import MicroBatch
from accel_train.model.isolation import Buffers, RandomState, without_batch_statistics
from accel_train.model.training_module import TrainingModule
from accel_train.recovery.module_watch import ModuleWatch
from accel_train.runtime.private import norms_of


@dataclass(frozen=True)
class DiagnosisRequest:
    """A process's facts about a bad step, and the time limit of its diagnosis."""

    step: int  # from 1
    seed: int
    rank: int
    random_rank: int  # `ParallelDims.random_rank`
    world_size: int  # processes that read different samples
    num_targets: int  # of the global batch
    loss_scale: float | None
    is_spike: bool
    """Loss and gradients were finite, but far too large."""
    samples: list[list[int]] | None = None
    """Indices of each micro-batch in the data set; None where the data set has its own order."""
    compiled: bool = False
    seconds: float = math.inf  # limit of the diagnosis


@dataclass(frozen=True)
class Outcome:
    """Loss and gradient norms of one forward and backward."""

    loss: float
    norms: dict[str, float]  # of each parameter's gradient, unscaled
    total: float  # norm of all gradients

    @property
    def is_finite(self) -> bool:
        """Return whether loss and norm are finite, as the step itself would judge."""
        return math.isfinite(self.loss) and math.isfinite(self.total)

    @property
    def not_finite(self) -> list[str]:
        """Return the parameters whose gradient is not finite, or too large to have a norm."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]


class Recomputation:
    """Forward and backward of the training module as in the step, on this process alone; no gradient is kept."""

    def __init__(self, inner: TrainingModule, request: DiagnosisRequest, device: torch.device) -> None:
        self.inner, self.request, self.device = inner, request, device
        self._deadline = time.monotonic() + request.seconds
        self.scale = request.loss_scale or 1.0
        self.buffers = Buffers(inner)
        self.parameters = {name: p for name, p in inner.model.named_parameters() if p.requires_grad}
        share = request.world_size / max(request.num_targets, 1)
        self.share = torch.tensor(share, dtype=torch.float32, device=device) * self.scale

    def compute(self, micro_batch: MicroBatch, watch: ModuleWatch | None = None) -> Outcome:
        """Compute what `step.forward_backward` computes for this micro-batch; no hook of DDP is called."""
        batch, num_targets = micro_batch
        with torch.enable_grad():
            loss = self.inner(batch)
            if watch is not None:
                watch.forward_is_over()
            detached = loss.detach()
            weight = torch.zeros_like(self.share) if num_targets == 0 else self.share + (detached - detached)
            gradients = torch.autograd.grad(loss, list(self.parameters.values()), weight, allow_unused=True)
        by_name = {name: each for name, each in zip(self.parameters, gradients, strict=True) if each is not None}
        norms = torch.stack([norm.float() for norm in norms_of(list(by_name.values()))]) / self.scale
        # The step ignores the loss of a micro-batch without targets, too.
        value = 0.0 if num_targets == 0 else float(detached)
        total = float(torch.linalg.vector_norm(norms))
        return Outcome(value, dict(zip(by_name, norms.tolist(), strict=True)), total)

    def recompute(
        self, part: MicroBatch, state: RandomState, watch: ModuleWatch | None = None, *, by_row: bool = False
    ) -> Outcome:
        """Compute with the random numbers and buffers of before the micro-batch; `by_row`: so that no row depends on another."""
        state.put_back()
        self.buffers.put_back()
        with without_batch_statistics(self.inner) if by_row else nullcontext():
            return self.compute(part, watch)

    @property
    def is_late(self) -> bool:
        """Return whether the time for the diagnosis is over."""
        return time.monotonic() > self._deadline


class SamplesOf:
    """A micro-batch, its samples by index, and parts of it."""

    def __init__(self, micro_batch: MicroBatch, indices: list[int] | None) -> None:
        self.micro_batch = micro_batch
        self.batch, self.num_targets = micro_batch
        shapes = [value.shape for value in self.batch.values() if isinstance(value, Tensor) and value.dim()]
        sizes = [shape[0] for shape in shapes]
        self.num_rows = len(indices) if indices else max(set(sizes), key=sizes.count, default=0)
        # Samples that are packed into one row, padded time first, or nodes of one graph cannot be separated.
        self.can_be_cut = self.num_targets > 0 and self.num_rows > 0 and set(sizes) == {self.num_rows}
        if (
            self.num_rows,
            0,
        ) in shapes:  # a layout of the program's own (`ModuleTask`): time first with as many steps as samples?
            self.can_be_cut &= not any(self.num_rows in shape[1:] for shape in shapes)
        self.indices = indices or list(range(self.num_rows))

    def part(self, rows: Sequence[int]) -> MicroBatch:
        """Return these rows alone; a tensor of one number stays whole."""
        index = torch.as_tensor(rows)
        batch = {
            name: value.index_select(0, index.to(value.device)) if isinstance(value, Tensor) and value.dim() else value
            for name, value in self.batch.items()
        }
        return batch, self.num_targets
