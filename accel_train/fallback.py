"""Running out of memory: all processes hear of it, and go on with smaller micro-batches and the same global batch."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from accel_train import sharding
from accel_train.batching import BatchSizes
from accel_train.data_group import data_group
from accel_train.evidence import SamplesOf
from accel_train.memory import is_out_of_memory
from accel_train.owed_collectives import Collective, can_begin_again, collectives_of, hand_in_nan, num_held
from accel_train.reduction import Reduction, gradients_seen, look_for_unused, note_gradients, without_gradient
from accel_train.rerun import each_row_for_itself, eager, undisturbed
from accel_train.run import Run
from accel_train.sampling import DataOrder
from accel_train.state import OutOfMemory, RecipeError, StepResult
from accel_train.step import Agreement, MicroBatch, forward_backward
from accel_train.zero import Zero

CAREFUL_STEPS = 2
"""The first step allocates gradients and activations, its update the moments: from the second one on memory stays as it is."""


class StepAgain(Exception):
    """The step was not done, and is to be done again; raised for the loop, on all processes at the same step."""


class LeftOut(StepAgain):
    """Parameters took no part in the first step, and DDP has yet to look for them."""


class RanOutOfMemory(StepAgain):
    """Some process could not hold its micro-batches."""

    def __init__(self, ranks: list[int], said: str) -> None:
        super().__init__(said)
        self.ranks, self.said = ranks, said
        """Which they were, and the words of this process's allocator; none where it had room."""


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
) -> Tensor | StepAgain:
    """As `forward_backward`; where memory ran out on any process, or a parameter was left out, what all processes then raise.

    A process that fails within DDP's backward pass would leave the others waiting in a collective. So in a 0-based step of new
    `sizes` each process keeps its gradients to itself, then they agree, and only then gradients are reduced: at the price of
    one more collective, and of one micro-batch forwarded again (with no weight, and by DDP's own buckets, so that the sum is
    the same to the bit as without this care). Other steps, which need what others needed before them, cost nothing: what
    runs out there all the same (another program took the memory, or it is in pieces) hands in NaN. So does, in any step, a
    process whose forward the others wait in.

    Raises:
        OutOfMemory: this process cannot keep up with the others any more.
        RecipeError: a parameter took no part, and nobody looks for such ones.
    """
    accelerator, module = run.accelerator, run.module
    is_new = sizes.is_new(step)
    is_alone, carefully = accelerator.num_processes == 1, not run.is_sharded and is_new
    if run.meets_in_forward and not carefully:
        if sizes.num_seen > 1:
            return _or_keep_up(run, micro_batches, agreement)
        with gradients_seen(run.inner.model) as seen:
            first_loss_sum = _or_keep_up(run, micro_batches, agreement)
        if not run.no_room:
            _note_left_out(run, seen if run.zero is not None else None)
        return first_loss_sum
    if not is_alone and not carefully:
        return _or_hand_in_nan(run, micro_batches, agreement)
    held_before = num_held() if run.meets_in_forward else None
    loss_sum, said = None, ""
    try:
        loss_sum = forward_backward(accelerator, module, micro_batches, agreement, reduce=is_alone)
    except (RuntimeError, MemoryError) as error:
        said = _said_of_memory(error)  # not the error itself: it would keep the tensors of its frames alive
    if said and held_before is not None:
        _keep_up(run, micro_batches, agreement, held_before, reduce=False)
    if is_alone and loss_sum is not None:
        if sizes.num_seen == 1:
            _note_left_out(run)
        return loss_sum
    agreement.share_of_a_target()  # the first forward may have failed before what came of the last step was received
    if is_alone:
        return RanOutOfMemory([0], said)
    ranks = _who(accelerator, loss_sum is None)
    if loss_sum is None or ranks:
        return RanOutOfMemory(ranks, said)
    if sizes.num_seen == 1 and _note_left_out(run):
        return LeftOut()
    if sizes.num_seen == 1 and not _reducing(run).find_unused_parameters:  # with it, DDP's layout stays as it is
        _settle_buckets(module, micro_batches[-1])
    assert isinstance(run.reduction, Reduction), "of several processes that each hold the whole model"
    run.reduction.begin()
    _reduce_gradients(module, micro_batches[-1])
    _check_all_took_part(run)
    return loss_sum


def _note_left_out(run: Run, seen: Collection[str] | None = None) -> bool:
    """Name the parameters that took no part in the first step; whether DDP is there, and has yet to look for them.

    `seen` are those that did, under DeepSpeed, which keeps gradients to itself.

    Raises:
        RecipeError: the recipe says that there are none, or DeepSpeed would decay them.
    """
    names = without_gradient(run.inner.model, run.accelerator, seen)
    is_ddp = isinstance(run.module, DistributedDataParallel)
    if not names or (
        is_ddp and run.recipe.parallel.find_unused_parameters == "auto" and not _reducing(run).find_unused_parameters
    ):
        return bool(names)
    said = f"{_in_words(names)} no part in the loss of the first step"
    remedy = f"model.freeze: [{', '.join(repr(name) for name in names[:3])}{', ...' if len(names) > 3 else ''}]"
    if run.recipe.parallel.find_unused_parameters is False:
        raise RecipeError(
            f"{said}, and parallel.find_unused_parameters is false; freeze what never takes part ({remedy}), or set it to auto"
        )
    if run.zero is not None:
        raise RecipeError(
            f"{said}, and DeepSpeed would apply weight decay to what has no gradient, unlike one process: freeze it ({remedy}), or "
            "use parallel.strategy ddp or fsdp2"
        )
    cost = "DDP looks for such parameters in each step, which costs a walk through the graph and one more collective"
    if not is_ddp:
        cost = f"they get no update and no weight decay, on one process as on several (where {cost})"
    run.observer.on_event(
        "unused_parameters", run.state.step, f"{said}: {cost}. Frozen, they cost nothing: {remedy}", parameters=names
    )
    return False


def _in_words(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} take{'s' * (len(names) == 1)}"


def let_ddp_look(run: Run) -> None:
    """From now on DDP looks for parameters that take no part, in the first step again and in all others."""
    free_memory(run.optimizer, run.accelerator.device)
    run.reduction = None  # it holds on to the buckets of before
    run.module = look_for_unused(run.accelerator, _reducing(run))
    run.reduction = note_gradients(run.module, run.inner, num_sharing=data_group(run.accelerator).num_sharing)


def _check_all_took_part(run: Run) -> None:
    """After a reduction by DDP, which ends when each parameter has taken part; what the others wait for is handed in as NaN.

    Raises:
        RecipeError: some did not.
    """
    reduction = run.reduction
    assert isinstance(reduction, Reduction), "of several processes that each hold the whole model"
    if reduction.is_complete:
        return
    names = [name for name, each in run.inner.model.named_parameters() if each.requires_grad and each.grad is None]
    reduction.hand_in_rest(math.nan, run.accelerator.device)
    raise RecipeError(
        f"step {run.state.step + 1}: {_in_words(names or ['a parameter (in the last micro-batch)'])} no part in the loss, as in other steps; set "
        "parallel.find_unused_parameters to true, and DDP looks in each step for those that do not (a walk through the graph)"
    )


def _said_of_memory(error: Exception) -> str:
    if not is_out_of_memory(error):
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
    assert isinstance(reduction, Reduction), "of several processes that each hold the whole model"
    reduction.begin()
    try:
        loss_sum = forward_backward(accelerator, module, micro_batches, agreement)
        _check_all_took_part(run)
        return loss_sum
    except (RuntimeError, MemoryError) as error:
        run.no_room = _said_of_memory(error)
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
    """As `forward_backward`, where each forward and backward is full of collectives, and nobody can stay behind.

    A process that runs out of memory takes part in what collectives are left of its step (`_keep_up`), and has NaN for
    gradients: so the step ends for all, nobody applies it, and all hear of the reason with its outcome.
    """
    may_break_off = can_begin_again()
    if may_break_off and run.zero is not None:
        _learn_order(run, run.zero, micro_batches[0], agreement)
        may_break_off = run.zero.can_begin_again
    if not may_break_off:
        return forward_backward(run.accelerator, run.module, micro_batches, agreement)
    held_before = num_held()
    if run.reduction is not None:
        run.reduction.begin()
    try:
        return forward_backward(run.accelerator, run.module, micro_batches, agreement)
    except (RuntimeError, MemoryError) as error:
        run.no_room = _said_of_memory(error)
    _keep_up(run, micro_batches, agreement, held_before, reduce=True)
    for parameter in run.parameters:
        if parameter.grad is not None:
            parameter.grad.fill_(math.nan)
    if run.zero is not None:
        run.zero.spoil_gradients()
    return torch.full((), math.nan, device=run.accelerator.device)


def _learn_order(run: Run, zero: Zero, micro_batch: MicroBatch, agreement: Agreement) -> None:
    """Show ZeRO's stage 3 its layers in order, on one sample, before it matters whether a step breaks off.

    Until it has seen them it compares that order between processes as they go: nobody could stay behind and catch up. So it
    is tried first without the others; where some process cannot compute one sample alone, the order is learnt from the steps.
    """
    if not zero.passes_to_learn_from:
        return
    agreement.share_of_a_target()
    one_sample = SamplesOf(micro_batch, None).part(range(1))
    has_failed = False
    with undisturbed(run.inner, run.accelerator.device), each_row_for_itself(run.inner):
        try:
            with zero.alone():
                _collectives_of(run, one_sample, agreement, reduce=True)
        except Exception:  # of a task whose samples cannot be told apart; or there is no room, which the step will say
            has_failed = True
        zero.forget_order()
        num_passes, zero.passes_to_learn_from = zero.passes_to_learn_from, 0
        for _ in range(0 if _who(run.accelerator, has_failed) else num_passes):
            forward_backward(run.accelerator, run.module, [one_sample], agreement)
            forget_broken_pass(run)
    free_memory(run.optimizer, run.accelerator.device)


def _keep_up(
    run: Run, micro_batches: Sequence[MicroBatch], agreement: Agreement, held_before: Counter[str], *, reduce: bool
) -> None:
    """After a step that broke off: find by dry runs what it consists of, and hand in NaN to all that was not held of it.

    Raises:
        OutOfMemory: there is no room for a dry run, either; the others then lose this process.
    """
    held = num_held() - held_before
    agreement.share_of_a_target()
    last, again = len(micro_batches) - 1, ""
    owed: list[Collective] = []
    with undisturbed(run.inner, run.accelerator.device), each_row_for_itself(run.inner):
        try:
            for index, micro_batch in enumerate(micro_batches):
                owed += _collectives_of(run, micro_batch, agreement, reduce=reduce and index == last)
        except (RuntimeError, MemoryError) as error:
            again = _said_of_memory(error)
    if again:
        rank, rows = run.accelerator.process_index, run.sizes.per_device_batch_size
        raise OutOfMemory(
            f"process {rank} ran out of memory in micro-batches of {rows}, and again in smaller ones ({again})"
        )
    hand_in_nan(owed, held)


def _collectives_of(run: Run, micro_batch: MicroBatch, agreement: Agreement, *, reduce: bool) -> list[Collective]:
    samples = SamplesOf(micro_batch, None)

    def compute(num_rows: int) -> None:
        forget_broken_pass(run)
        free_memory(run.optimizer, run.accelerator.device)
        part = samples.part(range(num_rows))
        with eager(run.recipe.precision.compile is not False):
            forward_backward(run.accelerator, run.module, [part], agreement, reduce=reduce)

    try:
        return collectives_of(compute, samples.num_rows)
    finally:
        forget_broken_pass(run)


def forget_broken_pass(run: Run) -> None:
    """Let DDP, FSDP2 or DeepSpeed begin a forward, whatever became of the one before."""
    module = run.module
    if run.zero is not None:
        run.zero.forget_broken_pass()
    if isinstance(module, DistributedDataParallel):
        reducer: Any = module.reducer
        reducer._reset_state()
    if isinstance(module, FSDPModule):
        sharding.forget_broken_pass(module)


def _reducing(run: Run) -> DistributedDataParallel:
    assert isinstance(run.module, DistributedDataParallel), "several processes that each hold the whole model"
    return run.module


def nothing_done(run: Run, result: StepResult) -> RanOutOfMemory:
    """After a step that some process had no memory for, and none applied: what all of them raise, to do it again."""
    said, run.no_room = run.no_room, ""
    run.step_back(result.step - 1)
    if result.loss_scale is not None:
        run.accelerator.scaler.update(result.loss_scale)  # NaN was handed in: no overflow that should lower it
    if isinstance(run.module, DistributedDataParallel):
        module = run.module
        module._update_process_group(module.process_group)  # lays its buckets out anew, on all processes
    if run.zero is not None:
        run.zero.drop_gradients()  # of the step that was begun since
    return RanOutOfMemory(_who(run.accelerator, bool(said)), said)


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
