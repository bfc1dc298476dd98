"""A training step: its one collective, its forward and backward, and its random numbers."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from accel_train.core.state import StepResult
from accel_train.guard.guard import Limits
from accel_train.model.kernels.global_loss import GlobalLoss
from accel_train.optim.update import Update, number_on_host
from accel_train.parallel.dims import parallel_dims
from accel_train.parallel.strategy import Strategy

MicroBatch = tuple[Mapping[str, Tensor], int]
"""Tensors by name on the device, and their number of targets on this process."""


class Wire(NamedTuple):
    """Step statistics of one process, or their sums over all processes.

    `stop` says that a process was asked to stop. `save_failed` says that it could not write a checkpoint.
    """

    num_targets: float
    """Number of targets (labels) in this step."""
    stop: float = False
    save_failed: float = False
    ran_out_of_memory: float = False
    """Whether this process ran out of memory in the previous step and contributed NaN instead of gradients.

    This field and the fields below describe the previous step.
    """
    loss_sum: float = 0.0
    grad_norm: float = 0.0
    skipped: float = 0.0
    loss_scale: float = 0.0
    """Loss scale. Not sent, like the two fields below: the scale and the router loss are equal on all processes."""
    router_loss: float = 0.0
    gradient_sum: float = 0.0
    """Sum of this process's gradients before they are reduced. The gradient norm for a single process; 0 if not
    measured."""

    def pack(self, device: torch.device, dtype: torch.dtype, last: "StepOutcome | None", num_counts: int) -> Tensor:
        """Return the statistics to send, on the device, including the numbers and counts of the `last` step.

        The host does not know the last step's numbers yet, so they are copied on the device.
        """
        sent = (
            self._replace(ran_out_of_memory=last is not None and last.ran_out_of_memory)[:_SENT] + (0.0,) * num_counts
        )
        packed = torch.tensor(sent, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        if last is not None:
            assert isinstance(last.numbers, Tensor), "several processes send tensors"
            packed[_SIGNALS:_SENT] = last.numbers[: _SENT - _SIGNALS]
            packed[_SENT:] = last.numbers[_OWN:]
        return packed


_SIGNALS, _SENT = Wire._fields.index("loss_sum"), Wire._fields.index("loss_scale")
"""Number of fields that the host knows when a step begins, and number of fields that are sent."""
_OWN = len(Wire._fields) - _SIGNALS
"""Number of fields of an outcome. Its counts follow them."""


class Counted:
    """Numbers that a task counts in a step in addition to its loss. They travel with the step's statistics."""

    def __init__(self, size: int) -> None:
        self.size, self._parts = size, list[Tensor]()

    def add(self, numbers: Tensor) -> None:
        """Add the numbers of a micro-batch: detached, 1-dim of `size`, on the device."""
        self._parts.append(numbers)

    def take(self, like: Tensor) -> Tensor:
        """Return the sums since the last call, in the type and on the device of `like`."""
        parts, self._parts = self._parts, []
        return torch.stack(parts).sum(0).to(like) if parts else like.new_zeros(self.size)

    def clear(self) -> None:
        """Forget the numbers of a step that is repeated."""
        self._parts.clear()


class StepOutcome(NamedTuple):
    """Outcome of a step that the host has not read yet."""

    step: int
    learning_rate: float
    numbers: Tensor | list[float]
    """Values of `Wire` from `loss_sum` on, and the counts: a list if one process trains on a CPU, otherwise a tensor on
    the device."""
    began_with: Tensor | Wire
    """Sums of the step's collective: packed on the device, or a `Wire` on the host for a single process."""
    has_loss_scale: bool
    max_grad_norm: float
    ended: float
    """Time at which the step's update was queued, by `time.perf_counter`, in seconds."""
    ran_out_of_memory: bool

    def unpack(self, num_counts: int) -> tuple[Wire, Wire, Wire, list[float]]:
        """Return this process's numbers, their sums over all processes, the sums that the step began with, and the sums
        of the counts."""
        values = self.numbers.tolist() if isinstance(self.numbers, Tensor) else self.numbers
        here, counts, sums = Wire(0, False, False, False, *values[:_OWN]), values[_OWN:], values[_OWN + num_counts :]
        if isinstance(self.began_with, Wire):
            return here, here, self.began_with, counts
        then = sums[_SENT + num_counts :]
        return here, Wire(*sums[:_SENT]), Wire(*then[:_SENT]), sums[_SENT : _SENT + num_counts]


class Agreement:
    """The one collective of a step: every process sends a packed `Wire` and receives the sum.

    The collective carries each process's signals and the loss and gradient norm of the previous step. So a step needs
    only one round trip. The collective runs during the first forward. The host reads a step's outcome while the next
    step computes. A single process sends nothing.
    """

    def __init__(
        self, accelerator: Accelerator, global_loss: GlobalLoss[Any] | None = None, counted: Counted | None = None
    ) -> None:
        self.counted, self._num_counts = counted, 0 if counted is None else counted.size
        self.world_size, self.tp_size = accelerator.num_processes, parallel_dims(accelerator).tp_size
        self.device, self.global_loss = accelerator.device, global_loss
        # fp64 makes counts and sums equal for any world size. MPS does not support fp64.
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._here = Wire(0)
        # Number of targets and the share of one target. Used by a single process only.
        self._share: tuple[float, Tensor] = (-1, torch.empty(0))
        self._share_of_all: Tensor | None = None
        self._sums: Tensor | None = None
        self._work: Any = None
        self._last: StepOutcome | None = None
        self._unread: tuple[StepOutcome, torch.cuda.Event | None] | None = None

    def begin(self, here: Wire, last: StepOutcome | None) -> None:
        """Send this process's signals `here` and its part of the `last` step's outcome."""
        self._here, self._last = here, last
        if self.counted is not None:
            self.counted.clear()
        if self.world_size == 1:
            return
        self._share_of_all = None
        self._sums = here.pack(self.device, self.dtype, last, self._num_counts)
        self._work = dist.all_reduce(self._sums, async_op=True)

    def share_of_a_target(self) -> Tensor:
        """Return the weight of each target's loss in the gradient, 0-dim fp32.

        The weight is the world size divided by the number of targets of the global batch. The world size cancels DDP's
        average over processes, because the gradient is a sum. Processes that compute the same targets each count them,
        and the average divides by the same factor. The weight is NaN if the batch has no targets. Then the update is
        not applied, not even its weight decay or momentum.
        """
        self._receive()
        if self._sums is None:
            if self._here.num_targets != self._share[0]:  # most steps have as many targets as the previous step
                count = self._here.num_targets
                self._share = (count, torch.full((), 1 / (count or math.nan), device=self.device))
            return self._share[1]
        if self._share_of_all is None:
            self._share_of_all = (self.world_size / torch.where(self._sums[0] > 0, self._sums[0], math.nan)).float()
        return self._share_of_all

    def _receive(self) -> None:
        """Let the device, not the host, wait for the sums, and copy the last step's outcome to the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        last, self._last = self._last, None
        if last is None:
            return
        # The copy is queued before this step's backward, so it has arrived when the host reads it one step later.
        numbers, event = last.numbers, None
        if isinstance(numbers, Tensor) and isinstance(last.began_with, Tensor):
            assert self._sums is not None, "sums come from a collective"
            numbers = torch.cat((numbers.to(self.dtype), self._sums, last.began_with))
        if isinstance(numbers, Tensor) and self.device.type == "cuda":
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._unread = (last._replace(numbers=numbers), event)

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
        """Return the outcome of the step that began with `begin`. Pass it to the next `begin`.

        Args:
            gradient_sum: sum of this process's gradients before they are reduced, 0-dim on the device; None if not
                measured.
            ran_out_of_memory: whether this process has no gradients and contributed NaN.
        """
        grad_norm, skipped, loss_scale = update
        if gradient_sum is None:
            gradient_sum = grad_norm if self.world_size == 1 else torch.zeros_like(grad_norm)
        router_loss = None if self.global_loss is None else self.global_loss.loss
        router_loss = skipped if router_loss is None else router_loss.to(grad_norm.dtype)
        parts = (
            loss_sum, grad_norm, skipped, skipped if loss_scale is None else loss_scale, router_loss, gradient_sum
        )  # fmt: skip
        # The host has the numbers on a CPU, so a stacked tensor would only cost time.
        if self.world_size == 1 and self.device.type == "cpu":
            known = {part: number_on_host(part) for part in set(parts)}  # some parts are the same tensor
            numbers: Tensor | list[float] = [known[part] for part in parts]
            if self.counted is not None:
                numbers = [*numbers, *self.counted.take(loss_sum).tolist()]
        else:  # an offloaded optimizer's numbers come from the host
            numbers = torch.stack([part.to(self.device, non_blocking=True) for part in parts])
            if self.counted is not None:
                numbers = torch.cat((numbers, self.counted.take(numbers)))
        began_with, has_scale = self._here if self._sums is None else self._sums, loss_scale is not None
        ended = perf_counter()
        return StepOutcome(step, learning_rate, numbers, began_with, has_scale, limits.clip, ended, ran_out_of_memory)

    def read_last(self) -> StepResult | None:
        """Return the outcome of the previous step, or None if it was read already.

        The previous step's device work is finished, so this call rarely waits.
        """
        if self._unread is None:
            return None
        (last, event), self._unread = self._unread, None
        if event is not None:
            event.synchronize()
        here, sums, began_with, counts = last.unpack(self._num_counts)
        return StepResult(
            step=last.step,
            learning_rate=last.learning_rate,
            loss=sums.loss_sum / began_with.num_targets if began_with.num_targets else math.nan,
            grad_norm=sums.grad_norm / self.world_size,
            num_targets=int(began_with.num_targets) // self.tp_size,
            skipped=sums.skipped != 0,
            loss_scale=here.loss_scale if last.has_loss_scale else None,
            stop_requested=bool(began_with.stop),
            save_failed=bool(began_with.save_failed),
            max_grad_norm=last.max_grad_norm,
            ran_out_of_memory=bool(sums.ran_out_of_memory),
            agreed=sums.skipped in (0, self.world_size),
            loss_sum_here=here.loss_sum,
            gradient_sum_here=here.gradient_sum,
            router_loss=None if self.global_loss is None or self.global_loss.loss is None else here.router_loss,
            counts=tuple(count / self.tp_size for count in counts),
            ended=last.ended,
        )

    def settle(self, here: Wire, last: StepOutcome) -> StepResult:
        """Return the outcome of the `last` step now, and wait for it.

        Call it before a checkpoint, before an evaluation, and at the end.
        """
        self.begin(here, last)
        self._receive()
        result = self.read_last()
        assert result is not None, "a last step was given"
        now = here if self._sums is None else Wire(*self._sums[:_SENT].tolist())
        return result._replace(
            stop_requested=result.stop_requested or bool(now.stop),
            save_failed=result.save_failed or bool(now.save_failed),
        )


def forward_backward(
    strategy: Strategy, micro_batches: Sequence[MicroBatch], agreement: Agreement, *, reduce: bool = True
) -> Tensor:
    """Accumulate the gradient of (loss sum / targets of the global batch); return this process's loss sum, detached.

    The loss is divided once, by the count over all processes and micro-batches. So the gradient does not depend on how
    the global batch is split. A loss that is not finite sends NaN through the backward. All processes share the
    gradient norm, so all of them see the NaN. Without `reduce`, each process keeps its gradients for a later reduction.
    """
    if agreement.global_loss is not None:
        with _over_the_global_batch(agreement.global_loss, strategy, micro_batches):
            return _accumulate(strategy, micro_batches, agreement, reduce)
    return _accumulate(strategy, micro_batches, agreement, reduce)


def _over_the_global_batch(
    global_loss: GlobalLoss[Any], strategy: Strategy, micro_batches: Sequence[MicroBatch]
) -> AbstractContextManager[None]:
    return global_loss.over(
        lambda batch: strategy.inner(batch, "part"),
        micro_batches,
        strategy.accelerator.device,
        is_alone=strategy.accelerator.num_processes == 1,
        one_each=strategy.accelerator.gradient_accumulation_steps == 1,
        can_fail_alone=not strategy.meets_in_forward,
    )


def _accumulate(strategy: Strategy, micro_batches: Sequence[MicroBatch], agreement: Agreement, reduce: bool) -> Tensor:
    loss_sums = []
    last = len(micro_batches) - 1
    strategy.fault = None
    for index, (batch, num_targets) in enumerate(micro_batches):
        strategy.accelerator.sync_gradients = index == last  # read by user code
        with strategy.accumulating(reduce and index == last):
            loss_sum = strategy.module(batch)
            detached = loss_sum.detach()
            if index == 0:
                share = agreement.share_of_a_target()
                if strategy.accelerator.scaler is not None:
                    share = strategy.accelerator.scaler.scale(share)
            # A filler that keeps processes together, or a batch without labels, has no weight.
            if num_targets == 0:
                loss_sum.backward(0 * share)
                detached = torch.zeros_like(detached)
            else:
                weight = _weight(share, detached)
                if weight is not share:
                    fault = weight - weight
                    strategy.fault = fault if strategy.fault is None else strategy.fault + fault
                loss_sum.backward(weight)
            loss_sums.append(detached)
    return loss_sums[0] if last == 0 else torch.stack(loss_sums).sum()


def _weight(share: Tensor, loss: Tensor) -> Tensor:
    """Return the weight of a loss in the gradient: its share, or NaN if the loss is not finite."""
    # If the host has the number, launch no operators.
    if type(loss) is Tensor and loss.device.type == "cpu" and math.isfinite(number_on_host(loss)):
        return share
    return share + (loss - loss)  # x - x is 0, or NaN if x is not finite


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random numbers of a step (dropout) from `seed`, `step`, and `rank`.

    So a checkpoint needs no generator states, and a resume repeats the same dropout. An evaluation or a text sample in
    between changes nothing. The mixing function is splitmix64 (Steele, Lea & Flood 2014).
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    # `torch.manual_seed` would visit every backend, so the default generators are seeded directly.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(mixed)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed(mixed)
