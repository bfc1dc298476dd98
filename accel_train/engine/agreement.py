"""The one collective of a step: what all processes have to know before they update."""

import math
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from accel_train.core.state import StepResult
from accel_train.guard.guard import Limits
from accel_train.model.kernels.router_loss import RouterLoss
from accel_train.optim.update import Update, number_on_host
from accel_train.parallel.dims import parallel_dims


class StepSignals(NamedTuple):
    """A process's message to the others when a step begins."""

    num_targets: int
    """Targets in its share of the step."""
    stop: bool = False
    """It was asked to stop."""
    save_failed: bool = False
    """A checkpoint that it wrote in the background could not be written."""


class StepOutcome(NamedTuple):
    """The outcome of a step that the host has not read yet."""

    step: int
    learning_rate: float
    numbers: Tensor | list[float]
    """[loss sum here, gradient norm, 1 where skipped, loss scale, gradient sum of this process, router loss].

    All but the two sums are the same on all processes. On the device; on the host where one process trains on a CPU."""
    counts: Tensor | StepSignals
    """[targets, stop requests, ...] over all processes: on the device, or known to the host of a process that is alone."""
    has_loss_scale: bool
    max_grad_norm: float
    ended: float
    """When its update was queued, by `time.perf_counter`."""
    ran_out_of_memory: bool


class Agreement:
    """The one collective of a step: every process sends a packed vector, every process gets the sum.

    It carries the signals of each process, and the loss and the gradient norm of the step before. So it needs no second round
    trip, runs while the first forward does, and lets the host read a step's outcome while the next one computes. A process that
    is alone sends nothing.
    """

    def __init__(self, accelerator: Accelerator, router_loss: RouterLoss | None = None) -> None:
        self.world_size, self.tp_size = accelerator.num_processes, parallel_dims(accelerator).tp_size
        self.device, self.router_loss = accelerator.device, router_loss
        # fp64 holds every count and sum exactly enough to be the same for any world size; MPS has none.
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._here = StepSignals(0)
        self._share: tuple[int, Tensor] = (-1, torch.empty(0))  # of this many targets, on a process that is alone
        self._share_of_all: Tensor | None = None
        self._sums: Tensor | None = None
        self._work: Any = None
        self._last: StepOutcome | None = None
        self._unread: tuple[StepOutcome, Tensor | list[float], torch.cuda.Event | None] | None = None

    def begin(self, here: StepSignals, last: StepOutcome | None) -> None:
        """Send this process's signals, and its part of the last step's outcome (loss sum, gradient norm, skipped)."""
        self._here, self._last = here, last
        if self.world_size == 1:
            return
        ran_out = last is not None and last.ran_out_of_memory
        self._share_of_all = None
        packed = torch.tensor([*here, ran_out, 0.0, 0.0, 0.0], dtype=self.dtype)
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        self._sums = packed.to(self.device, non_blocking=True)
        if last is not None:
            assert isinstance(last.numbers, Tensor), "several processes send tensors"
            self._sums[-3:] = last.numbers[:3]
        self._work = dist.all_reduce(self._sums, async_op=True)

    def share_of_a_target(self) -> Tensor:
        """Return 1 / targets of the global batch, 0-dim fp32: the weight of each target's loss in the gradient.

        Times the world size, because DDP averages gradients over processes and we want their sum. (Of processes that compute
        the same of them each has counted it: averages are over as many fewer.) NaN where there is no target at all: such a
        step has nothing to teach, and its update (weight decay, old momentum) is not applied.
        """
        self._receive()
        if self._sums is None:
            if self._here.num_targets != self._share[0]:  # most steps have as many targets as the one before
                count = self._here.num_targets
                self._share = (count, torch.full((), 1 / (count or math.nan), device=self.device))
            return self._share[1]
        if self._share_of_all is None:
            self._share_of_all = (self.world_size / torch.where(self._sums[0] > 0, self._sums[0], math.nan)).float()
        return self._share_of_all

    def _receive(self) -> None:
        """Let further work on the device wait for the sums (the host does not), and send the last step's outcome to the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        last, self._last = self._last, None
        if last is None:
            return
        # Queued ahead of this step's backward, so that it has arrived when the host, a step's worth of launches later, reads it.
        numbers = last.numbers
        if not isinstance(numbers, Tensor):
            self._unread = (last, numbers, None)
            return
        if isinstance(last.counts, Tensor):
            assert self._sums is not None, "counts come from a collective"
            signals, own = len(self._here), numbers.to(self.dtype)
            numbers = torch.cat((self._sums[-3:], own[3:], last.counts[:signals], own[:1], self._sums[signals:-3]))
        if self.device.type != "cuda":
            self._unread = (last, numbers.cpu(), None)
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._unread = (last, host, event)

    def outcome(
        self,
        step: int,
        learning_rate: float,
        limits: Limits,
        loss_sum: Tensor,
        update: Update,
        gradient_sum: Tensor | None = None,
        *,
        ran_out_of_memory: bool = False,
    ) -> StepOutcome:
        """Return the outcome of the step that began with `begin`, for the next `begin`.

        Args:
            gradient_sum: of this process's own gradients, 0-dim on the device; None where they were not seen.
            ran_out_of_memory: this process has no gradients, and has contributed NaN.
        """
        grad_norm, skipped, loss_scale = update
        if gradient_sum is None:
            gradient_sum = grad_norm if self.world_size == 1 else torch.zeros_like(grad_norm)
        router_loss = None if self.router_loss is None else self.router_loss.loss
        router_loss = skipped if router_loss is None else router_loss.to(grad_norm.dtype)
        parts = (
            loss_sum, grad_norm, skipped, skipped if loss_scale is None else loss_scale, gradient_sum, router_loss
        )  # fmt: skip
        if self.world_size == 1 and self.device.type == "cpu":  # the host has them: no tensor to make and to read
            known = {part: number_on_host(part) for part in set(parts)}  # some are the same tensor
            numbers: Tensor | list[float] = [known[part] for part in parts]
        else:  # those of an optimizer that is offloaded come from the host
            numbers = torch.stack([part.to(self.device, non_blocking=True) for part in parts])
        counts, has_loss_scale = self._here if self._sums is None else self._sums, loss_scale is not None
        return StepOutcome(
            step, learning_rate, numbers, counts, has_loss_scale, limits.clip, perf_counter(), ran_out_of_memory
        )

    def read_last(self) -> StepResult | None:
        """Return the outcome of the step before the one that runs: its device work is over, so this rarely waits."""
        if self._unread is None:
            return None
        last, host, event = self._unread
        self._unread = None
        if event is not None:
            event.synchronize()
        loss_sum, norms, skips, scale, gradient_sum, router_loss, *agreed = (
            host.numpy().tolist() if isinstance(host, Tensor) else host
        )
        *agreed, loss_sum_here, ran_out = agreed or (loss_sum, 0.0)
        signals = StepSignals(*agreed) if agreed else last.counts
        assert isinstance(signals, StepSignals), "known to the host, or sent with the sums"
        return StepResult(
            step=last.step,
            learning_rate=last.learning_rate,
            loss=loss_sum / signals.num_targets if signals.num_targets else math.nan,
            grad_norm=norms / self.world_size,
            num_targets=int(signals.num_targets) // self.tp_size,
            skipped=skips != 0,
            loss_scale=scale if last.has_loss_scale else None,
            stop_requested=bool(signals.stop),
            save_failed=bool(signals.save_failed),
            max_grad_norm=last.max_grad_norm,
            ran_out_of_memory=bool(ran_out),
            agreed=skips in (0, self.world_size),
            loss_sum_here=loss_sum_here,
            gradient_sum_here=gradient_sum,
            router_loss=None if self.router_loss is None else router_loss,
            ended=last.ended,
        )

    def settle(self, here: StepSignals, last: StepOutcome) -> StepResult:
        """Return the outcome of the last step now, at the price of a wait: before a checkpoint, an evaluation, and the end."""
        self.begin(here, last)
        self._receive()
        result = self.read_last()
        assert result is not None, "a last step was given"
        now = here if self._sums is None else StepSignals(*self._sums[: len(here)].tolist())
        return result._replace(
            stop_requested=result.stop_requested or bool(now.stop),
            save_failed=result.save_failed or bool(now.save_failed),
        )
