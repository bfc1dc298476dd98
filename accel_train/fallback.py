"""Running out of memory: all processes hear of it, and go on with smaller micro-batches and the same global batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.batching import BatchSizes
from accel_train.data_group import is_sharded
from accel_train.memory import is_out_of_memory
from accel_train.sampling import DataOrder
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
    accelerator: Accelerator,
    module: nn.Module,
    micro_batches: Sequence[MicroBatch],
    agreement: Agreement,
    step: int,
    sizes: NewSizes,
) -> Tensor | RanOutOfMemory:
    """As `forward_backward`; where memory ran out on any process, what all processes then raise.

    A process that fails within DDP's backward pass would leave the others waiting in a collective. So in a 0-based step of new
    `sizes` each process keeps its gradients to itself, then they agree, and only then gradients are reduced: at the price of
    one more collective, and of one micro-batch forwarded again (with no weight, and by DDP's own buckets, so that the sum is
    the same to the bit as without this care). Other steps cost nothing; running out in one of them ends its process.
    """
    is_alone, carefully = accelerator.num_processes == 1, sizes.is_new(step)
    if is_sharded(accelerator) or not (
        is_alone or carefully
    ):  # its forward is full of collectives: nobody can stay behind
        return forward_backward(accelerator, module, micro_batches, agreement)
    loss_sum, said = None, ""
    try:
        loss_sum = forward_backward(accelerator, module, micro_batches, agreement, reduce=is_alone)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]  # not the error itself: it would keep the tensors of its frames alive
    if is_alone:
        if loss_sum is None:
            agreement.share_of_a_target()  # the first forward may have failed before what came of the last step was received
        return RanOutOfMemory([0], said) if loss_sum is None else loss_sum
    agreement.share_of_a_target()
    failed = torch.zeros(accelerator.num_processes, device=accelerator.device)
    failed[accelerator.process_index] = loss_sum is None
    dist.all_reduce(failed)
    ranks = [rank for rank, has_failed in enumerate(failed.tolist()) if has_failed]
    if loss_sum is None or ranks:
        return RanOutOfMemory(ranks, said or "another process ran out of memory")
    if sizes.num_seen == 1:
        _settle_buckets(module, micro_batches[-1])
    _reduce_gradients(module, micro_batches[-1])
    return loss_sum


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
