"""One step: losses and gradients of its micro-batches, the clip, and an update that a NaN or Inf cannot reach.

Nothing here waits for the device. What the processes must agree on travels in one packed vector a step (`Agreement`);
the host reads the outcome of a step while the next one runs.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.data_group import data_group, is_sharded
from accel_train.guard import Limits
from accel_train.precision import FlooredGradScaler
from accel_train.state import RecipeError, StepResult
from accel_train.task import Task

MicroBatch = tuple[Mapping[str, Tensor], int]
"""Tensors by name on the device, and how many targets they hold on this process."""


class TrainingModule(nn.Module):
    """What Accelerate wraps: the model together with its loss.

    Only a scalar leaves the wrapped forward, so Accelerate's conversion of 16-bit outputs to fp32 never copies the logits
    (2.5 GB for GPT-2 at 12 x 1024 tokens), and DDP sees the one output that is differentiated.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, batch: Mapping[str, Tensor], wanted: Literal["loss", "counts", "predictions"] = "loss") -> Any:
        """The loss summed over the targets of the micro-batch, 0-dim; or what evaluation counts, or predicts, by name.

        All three through one forward, because that is what Accelerate casts to the mixed precision.
        """
        if wanted == "loss":
            return checked_loss(self.task.loss_sum(self.model, batch))
        return (
            self.task.evaluate_batch(self.model, batch)
            if wanted == "counts"
            else self.task.predict_batch(self.model, batch)
        )


def checked_loss(loss: Any) -> Tensor:
    """The loss of a micro-batch as it is, where it can be trained on; nothing is read of the device.

    Raises:
        RecipeError: it is no 0-dim tensor, or no gradient leads back from it.
    """
    if not isinstance(loss, Tensor):
        found = "None" if loss is None else f"a {type(loss).__name__} and no tensor"
    elif loss.dim() > 0:
        found = f"a tensor of shape {list(loss.shape)}"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        found = "a tensor without a gradient (detached, made anew, or of weights that are all frozen)"
    else:
        return loss
    raise RecipeError(
        f"loss_sum of the task returned {found}; return the loss summed over the targets of the micro-batch as a 0-dim tensor that "
        "was computed from the model's output"
    )


class StepOutcome(NamedTuple):
    """What a step left behind, not yet read by the host."""

    step: int
    learning_rate: float
    numbers: Tensor | list[float]
    """[loss sum of this process, gradient norm, 1 where skipped, loss scale, gradient sum of this process]; all but the first and
    the last are shared. On the device, or, of a process that is alone on a CPU, where they can be seen."""
    counts: "Tensor | Wishes"
    """[targets, stop requests, ...] over all processes: on the device, or known to the host where it is alone."""
    has_loss_scale: bool
    max_grad_norm: float
    ended: float
    """When its update was queued, by `time.perf_counter`."""
    ran_out_of_memory: bool = False
    """This process has no gradients of it, and has handed in NaN."""


class Wishes(NamedTuple):
    """What a process has to tell the others when a step begins."""

    num_targets: int
    """Of its share of the step."""
    stop: bool = False
    """It was asked to stop."""
    save_failed: bool = False
    """A checkpoint that it wrote in the background could not be written."""


class Agreement:
    """The one collective of a step: every process sends a packed vector, every process gets the sum.

    It carries the wishes of each process, and of the step before its loss and what it made of the gradients. So it needs no
    second round trip, runs while the first forward does, and lets the host read a step's outcome while the next one
    computes. A process that is alone agrees with itself, and sends nothing.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.world_size, self.num_alike = accelerator.num_processes, data_group(accelerator).num_alike
        self.device = accelerator.device
        # fp64 holds every count and sum exactly enough to be the same for any world size; MPS has none.
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._here = Wishes(0)
        self._sums: Tensor | None = None
        self._work: Any = None
        self._last: StepOutcome | None = None
        self._unread: tuple[StepOutcome, Tensor | list[float], Any] | None = None

    def begin(self, here: Wishes, last: StepOutcome | None) -> None:
        """Send this process's share: its wishes, and what the last step came to here (loss sum, gradient norm, skipped)."""
        self._here, self._last = here, last
        if self.world_size == 1:
            return
        ran_out = last is not None and last.ran_out_of_memory
        packed = torch.tensor([*here, ran_out, 0.0, 0.0, 0.0], dtype=self.dtype)
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        self._sums = packed.to(self.device, non_blocking=True)
        if last is not None:
            assert isinstance(last.numbers, Tensor), "several processes send tensors"
            self._sums[-3:] = last.numbers[:3]
        self._work = dist.all_reduce(self._sums, async_op=True)

    def share_of_a_target(self) -> Tensor:
        """1 / targets of the global batch, 0-dim fp32: what each target's loss weighs in the gradient.

        Times the world size, because DDP averages gradients over processes and we want their sum. (Of processes that compute
        the same of them each has counted it: averages are over as many fewer.) NaN where there is no target at all: such a
        step has nothing to teach, and its update (weight decay, old momentum) is not applied.
        """
        self._receive()
        if self._sums is None:
            return torch.full((), 1 / (self._here.num_targets or math.nan), device=self.device)
        return (self.world_size / torch.where(self._sums[0] > 0, self._sums[0], math.nan)).float()

    def _receive(self) -> None:
        """Let further work on the device wait for the sums (the host does not), and send the last step's outcome on its way."""
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
            wishes = len(self._here)
            own = numbers.to(self.dtype)
            numbers = torch.cat((self._sums[-3:], own[3:], last.counts[:wishes], own[:1], self._sums[wishes:-3]))
        if self.device.type != "cuda":
            self._unread = (last, numbers.cpu().tolist(), None)
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
        loss_sum: Tensor,
        grad_norm: Tensor,
        skipped: Tensor,
        loss_scale: Tensor | None,
        max_grad_norm: float,
        *,
        gradient_sum: Tensor | None = None,
        ran_out_of_memory: bool = False,
    ) -> StepOutcome:
        """What the step that began with `begin` left behind, to be given to the next `begin`."""
        numbers: Tensor | list[float]
        if self.world_size == 1 and self.device.type == "cpu":
            loss, norm, skip = (float(part.float().numpy()) for part in (loss_sum, grad_norm, skipped))
            numbers = [loss, norm, skip, skip if loss_scale is None else float(loss_scale.numpy()), norm]
        else:
            if gradient_sum is None:
                gradient_sum = grad_norm if self.world_size == 1 else torch.zeros_like(grad_norm)
            parts = (loss_sum, grad_norm, skipped, skipped if loss_scale is None else loss_scale, gradient_sum)
            # Those of an optimizer that is offloaded come from the host.
            numbers = torch.stack([part.to(self.device, non_blocking=True) for part in parts])
        counts = self._here if self._sums is None else self._sums
        has_scale, now = loss_scale is not None, perf_counter()
        return StepOutcome(
            step, learning_rate, numbers, counts, has_scale, max_grad_norm, now, ran_out_of_memory=ran_out_of_memory
        )

    def read_last(self) -> StepResult | None:
        """The outcome of the step before the one that runs: its device work is over, so this is no wait in the steady state."""
        if self._unread is None:
            return None
        last, host, event = self._unread
        self._unread = None
        if event is not None:
            event.synchronize()
        loss_sum, norms, skips, scale, gradients, *agreed = host.numpy().tolist() if isinstance(host, Tensor) else host
        *agreed, loss_sum_here, ran_out = agreed or (loss_sum, 0.0)
        wishes = Wishes(*agreed) if agreed else last.counts
        assert isinstance(wishes, Wishes), "known to the host, or sent with the sums"
        grad_norm = norms / self.world_size
        return StepResult(
            step=last.step,
            learning_rate=last.learning_rate,
            loss=loss_sum / max(wishes.num_targets, 1),
            grad_norm=grad_norm,
            num_targets=int(wishes.num_targets) // self.num_alike,
            skipped=skips != 0,
            loss_scale=scale if last.has_loss_scale else None,
            stop_requested=bool(wishes.stop),
            save_failed=bool(wishes.save_failed),
            max_grad_norm=last.max_grad_norm,
            ran_out_of_memory=bool(ran_out),
            agreed=skips in (0, self.world_size),
            loss_sum_here=loss_sum_here,
            gradient_sum_here=gradients,
            ended=last.ended,
        )

    def settle(self, here: Wishes, last: StepOutcome) -> StepResult:
        """The outcome of the last step now, at the price of a wait: before a checkpoint, an evaluation, and the end."""
        self.begin(here, last)
        self._receive()
        result = self.read_last()
        assert result is not None, "a last step was given"
        now = here if self._sums is None else Wishes(*self._sums[: len(here)].tolist())
        return result._replace(
            stop_requested=result.stop_requested or bool(now.stop),
            save_failed=result.save_failed or bool(now.save_failed),
        )


def forward_backward(
    accelerator: Accelerator,
    module: nn.Module,
    micro_batches: Sequence[MicroBatch],
    agreement: Agreement,
    *,
    reduce: bool = True,
) -> Tensor:
    """Accumulate the gradient of (loss sum / targets of the global batch); returns this process's loss sum, detached.

    The division is done once, by the count over all processes and micro-batches, so the gradient does not depend on how
    the global batch was cut. A loss that is not finite sends NaN backward: the gradient norm, which all processes share,
    then tells all of them. Not to `reduce` leaves the gradient of this process as it is (`fallback.py` does that later).
    """
    loss_sums = []
    last = len(micro_batches) - 1
    for index, (batch, num_targets) in enumerate(micro_batches):
        # Gradients of a model that is spread over processes are reduced each time: whole ones would not fit.
        is_reduced = (reduce and index == last) or is_sharded(accelerator)
        with nullcontext() if is_reduced else accelerator.no_sync(module):
            loss_sum = module(batch)
            detached = loss_sum.detach()
            if index == 0:
                share = agreement.share_of_a_target()
                if accelerator.scaler is not None:
                    share = accelerator.scaler.scale(share)
            if num_targets == 0:  # there to keep the processes together, or without a label: it weighs nothing
                loss_sum.backward(0 * share)
                loss_sums.append(torch.zeros_like(detached))
                continue
            loss_sum.backward(share + (detached - detached))  # x - x is 0, or NaN where x is not finite
            loss_sums.append(detached)
    return loss_sums[0] if last == 0 else torch.stack(loss_sums).sum()


def update_within(
    limits: Limits,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    scaler: FlooredGradScaler | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Clip the gradients and step; or, where their norm is not finite or above the limit, leave weights, moments and step
    counters untouched to the bit.

    Returns the gradient norm before clipping, 1.0 where the step was skipped, and the loss scale of its gradients, 0-dim on
    the device. The fused kernels of torch take `found_inf` (1.0: do nothing) and `grad_scale` (divide gradients by it, which is the clip
    without another pass over them); both are how `torch.amp.GradScaler` talks to an optimizer.
    """
    scale = None
    if scaler is not None:
        scale = scaler.scale_tensor.clone()
        scaler.unscale_(optimizer)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    grad_norm = total_norm(grads)
    skipped, found_inf, grad_scale = _handshake(grad_norm, limits)
    if optimizer.defaults.get("fused", False):
        optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():  # one host sync a step: this device has no fused kernel that could decide by itself
        if limits.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, limits.clip, grad_norm, foreach=True)
        optimizer.step()
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, skipped, scale


def _handshake(grad_norm: Tensor, limits: Limits) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """1.0 where the step is skipped, and what a fused kernel is told of it: `found_inf` and `grad_scale`, 0-dim."""
    return _on_host(grad_norm, limits) if grad_norm.device.type == "cpu" else _on_device(grad_norm, limits)


def _on_host(grad_norm: Tensor, limits: Limits) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Where the norm is there to be seen: tensors of one number cost 10 us a sum, and None saves the kernel a pass."""
    norm = float(grad_norm.numpy())
    is_skipped = not norm <= limits.skip  # NaN is less than nothing, Inf than no limit
    skipped = torch.full((), float(is_skipped))
    factor = max((norm + 1e-6) / limits.clip, 1.0) if limits.clip else 1.0
    return skipped, skipped if is_skipped else None, torch.full((), factor) if factor > 1.0 else None


def _on_device(grad_norm: Tensor, limits: Limits) -> tuple[Tensor, Tensor, Tensor | None]:
    skipped = grad_norm.le(limits.skip).logical_not().to(grad_norm.dtype)
    return skipped, skipped, ((grad_norm + 1e-6) / limits.clip).clamp(min=1.0) if limits.clip else None


def total_norm(grads: list[Tensor]) -> Tensor:
    """The norm over all gradients, 0-dim, the same on every process; one collective more where they are spread over them."""
    # torch.nn.utils.get_total_norm, less its grouping by device and dtype: 40 us a step on a small model.
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Make the random numbers of a step (dropout) a function of seed, step and process.

    So a checkpoint needs no generator states, a resume repeats the same dropout, and an evaluation or a text sample in
    between changes nothing. The mixing is splitmix64's (Steele, Lea & Flood 2014). The default generators are seeded
    directly, because `torch.manual_seed` asks every backend there is.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(mixed)
