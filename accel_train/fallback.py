"""Running out of memory: all processes hear of it, and go on with smaller micro-batches and the same global batch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_train.batching import BatchSizes
from accel_train.evidence import SamplesOf
from accel_train.memory import is_out_of_memory
from accel_train.rerun import each_row_for_itself, eager, undisturbed
from accel_train.run import Run
from accel_train.sampling import DataOrder
from accel_train.state import OutOfMemory, StepResult
from accel_train.step import Agreement, MicroBatch, forward_backward

CAREFUL_STEPS = 2
"""The first step allocates gradients and activations, its update the moments: from the second one on memory stays as it is."""


class RanOutOfMemory(Exception):
    """Some process could not hold its micro-batches; raised for the loop, on all processes at the same step."""

    def __init__(self, ranks: list[int], said: str) -> None:
        super().__init__(said)
        self.ranks, self.said = ranks, said


@dataclass
class NewSizes:
    """Tells steps that may need more memory than those before: the first ones, and any with a longer sample than ever."""

    order: DataOrder
    num_seen: int = 0
    longest: int = 0

    def is_new(self, step: int) -> bool:
        """Whether this 0-based step is one; the same answer on every process, from the order alone."""
        longest = 0
        if self.order.lengths is not None:
            longest = int(self.order.lengths[self.order.step_samples(step)].max())
        is_new = self.num_seen < CAREFUL_STEPS or longest > self.longest
        self.num_seen += 1
        self.longest = max(self.longest, longest)
        return is_new


def forward_backward_or_run_out(
    run: Run, micro_batches: Sequence[MicroBatch], agreement: Agreement, step: int, sizes: NewSizes
) -> Tensor | RanOutOfMemory:
    """As `forward_backward`; where memory ran out on any process, what all processes then raise.

    A process that fails within DDP's backward pass would leave the others waiting in a collective. So in a 0-based step of new
    `sizes` each process keeps its gradients to itself, then they agree, and only then gradients are reduced: at the price of
    one more collective, and of one micro-batch forwarded again (with no weight, and by DDP's own buckets, so that the sum is
    the same to the bit as without this care). Other steps, which need what others needed before them, cost nothing: what
    runs out there all the same (another program took the memory, or it is in pieces) hands in NaN.
    """
    accelerator, module = run.accelerator, run.module
    if run.is_sharded:
        return _or_keep_up(run, micro_batches, agreement)
    is_alone, carefully = accelerator.num_processes == 1, sizes.is_new(step)
    if not is_alone and not carefully:
        return _or_hand_in_nan(run, micro_batches, agreement)
    loss_sum, said = None, ""
    try:
        loss_sum = forward_backward(accelerator, module, micro_batches, agreement, reduce=is_alone)
    except (RuntimeError, MemoryError) as error:
        said = _said_of_memory(run, error)  # not the error itself: it would keep the tensors of its frames alive
    if is_alone and loss_sum is not None:
        return loss_sum
    agreement.share_of_a_target()  # the first forward may have failed before what came of the last step was received
    if is_alone:
        return RanOutOfMemory([0], said)
    ranks = _who(accelerator, loss_sum is None)
    if loss_sum is None or ranks:
        return RanOutOfMemory(ranks, said or "another process ran out of memory")
    if sizes.num_seen == 1:
        _settle_buckets(module, micro_batches[-1])
    _reduce_gradients(module, micro_batches[-1])
    return loss_sum


def _said_of_memory(run: Run, error: Exception) -> str:
    is_waited_for = run.recipe.parallel.sp_size > 1  # in the exchange of slices, by those who have the others
    if is_waited_for or not is_out_of_memory(error):
        raise error
    return str(error).partition("\n")[0]


def _who(accelerator: Accelerator, has_failed: bool) -> list[int]:
    """The processes that have; asked of all of them."""
    failed = torch.zeros(accelerator.num_processes, device=accelerator.device)
    failed[accelerator.process_index] = has_failed
    dist.all_reduce(failed)
    return [rank for rank, of_rank in enumerate(failed.tolist()) if of_rank]


def _or_hand_in_nan(run: Run, micro_batches: Sequence[MicroBatch], agreement: Agreement) -> Tensor:
    """As `forward_backward`, where DDP reduces each bucket of gradients as soon as it is full.

    A process that runs out of memory owes the others the buckets that it has not come to. It hands in NaN for them: so their
    step ends, none of them applies an update, and all hear of the reason with its outcome (`nothing_done`).
    """
    accelerator, module, reduction = run.accelerator, _reducing(run), run.reduction
    assert reduction is not None, "of several processes"
    reduction.begin()
    try:
        return forward_backward(accelerator, module, micro_batches, agreement)
    except (RuntimeError, MemoryError) as error:
        run.no_room = _said_of_memory(run, error)
    agreement.share_of_a_target()
    free_memory(run.optimizer, accelerator.device)
    # With unused parameters DDP says in one more collective which they are.
    if module.find_unused_parameters or not reduction.hand_in_rest(math.nan, accelerator.device):
        raise OutOfMemory(f"process {accelerator.process_index} ran out of memory ({run.no_room})")
    reducer: Any = module.reducer
    reducer._reset_state()  # of the backward pass that did not end
    smallest = min((each for each in module.parameters() if each.requires_grad), key=torch.numel)
    smallest.grad = torch.full_like(smallest, math.nan)
    return torch.full((), math.nan, device=accelerator.device)


def _or_keep_up(run: Run, micro_batches: Sequence[MicroBatch], agreement: Agreement) -> Tensor:
    """As `forward_backward`, where each forward and backward is full of collectives, and nobody can stay behind (FSDP2).

    A process that runs out of memory does its step again with one sample in each micro-batch, takes part in what collectives
    are left of it, and hands in NaN: so the step ends for all, nobody applies it, and all hear of the reason with its outcome.
    """
    module, collectives = run.module, run.collectives
    if collectives is None:  # tensor parallelism and DeepSpeed hold others, too
        return forward_backward(run.accelerator, module, micro_batches, agreement)
    collectives.begin()
    try:
        return forward_backward(run.accelerator, module, micro_batches, agreement)
    except (RuntimeError, MemoryError) as error:
        run.no_room = _said_of_memory(run, error)
    agreement.share_of_a_target()
    compiled = run.recipe.precision.compile is not False
    reduced = [parameter for parameter in run.parameters if parameter.grad is not None]
    with collectives.resumed(), undisturbed(run.inner, run.accelerator.device), each_row_for_itself(run.inner):
        free_memory(run.optimizer, run.accelerator.device)
        for micro_batch in micro_batches:
            batch, _ = SamplesOf(micro_batch, None).part([0])
            with eager(compiled):
                loss_sum = module(batch)
                loss_sum.backward(torch.full_like(loss_sum, math.nan))
    for parameter in reduced:
        if parameter.grad is None:  # of several copies of the model: its sum over them was held, and is left out
            parameter.grad = torch.full_like(parameter, math.nan)
    return torch.full((), math.nan, device=run.accelerator.device)


def _reducing(run: Run) -> DistributedDataParallel:
    assert isinstance(run.module, DistributedDataParallel), "several processes that each hold the whole model"
    return run.module


def nothing_done(run: Run, result: StepResult) -> RanOutOfMemory:
    """After a step that some process had no memory for, and none applied: what all of them raise, to do it again."""
    said, run.no_room = run.no_room, ""
    run.step_back(result.step - 1)
    if result.loss_scale is not None:
        run.accelerator.scaler.update(result.loss_scale)  # NaN was handed in: no overflow that should lower it
    if run.reduction is not None:
        module = _reducing(run)
        module._update_process_group(module.process_group)  # lays its buckets out anew, on all processes
    return RanOutOfMemory(_who(run.accelerator, bool(said)), said or "another process ran out of memory")


def _reduce_gradients(module: nn.Module, micro_batch: MicroBatch) -> None:
    """Let DDP sum the gradients that are there, by a backward pass that adds nothing to them."""
    with _buffers_kept(module):
        loss_sum = module(micro_batch[0])
        loss_sum.backward(torch.zeros_like(loss_sum))


def _settle_buckets(module: nn.Module, micro_batch: MicroBatch) -> None:
    """Let DDP lay out its buckets anew, as it does after its first backward pass, before there is a gradient to reduce.

    Sums of three and more processes are rounded by where a gradient lies in its bucket. So a run that was killed and goes on
    would differ in the last bit from one that was not, if the first step of each sitting had another layout than the rest.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    _reduce_gradients(module, micro_batch)
    for parameter, gradient in gradients:
        parameter.grad = gradient


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Inside, forwards leave no trace: running statistics are put back."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def free_memory(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let go of gradients, and hand what the allocator keeps back to the device."""
    optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def smaller_micro_batches(sizes: BatchSizes) -> BatchSizes | None:
    """The next smaller micro-batches of the same global batch, half as large at most; None where they hold one sample."""
    share = sizes.global_batch_size // sizes.world_size
    smaller = [size for size in range(1, sizes.per_device_batch_size // 2 + 1) if share % size == 0]
    if not smaller:
        return None
    size = smaller[-1]
    return replace(
        sizes,
        per_device_batch_size=size,
        gradient_accumulation_steps=share // size,
        reason=f"{sizes.global_batch_size} = {size} per device x {share // size} accumulation x {sizes.world_size}, "
        "because memory ran out with more",
    )
