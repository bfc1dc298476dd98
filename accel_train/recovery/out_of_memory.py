"""Recover from out of memory in a step: continue with smaller micro-batches and the same global batch.

If each process computes independently (one process, DDP), all processes repeat the step at once. If a forward waits for
other processes (FSDP2, ZeRO, tensor and sequence parallelism), the run ends with exit code 75. The next start then uses
the smaller micro-batches. Nothing here recovers inside an `except` block, where the error's traceback keeps the
activations alive.
"""

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from accel_train.checkpoint.store import steps_of
from accel_train.core.errors import OUT_OF_MEMORY_REMEDY, OutOfMemory, RestartNeeded, StepAgain, first_line
from accel_train.core.files import make_folders
from accel_train.core.format import format_bytes, format_count
from accel_train.core.ownership import write_file
from accel_train.core.state import StepResult
from accel_train.data.batch_sizes import BatchSizes
from accel_train.data.order import DataOrder
from accel_train.engine.run import RunContext
from accel_train.engine.save import LAST_WAIT_SECONDS
from accel_train.engine.step import Agreement, MicroBatch
from accel_train.observe.run_folder import PROFILE_FOLDER
from accel_train.recovery.unused_parameters import UnusedParameters, check_first_step, check_later_step
from accel_train.runtime.memory import is_out_of_memory
from accel_train.runtime.process_group import gather_number

NUM_SIZES = 20
"""Number of block sizes in the table of a memory snapshot."""
CAREFUL_STEPS = 2
"""Number of first steps that may need more memory than earlier steps.

The first step allocates gradients and activations, and its update allocates the moments. From the second step on,
memory stays the same.
"""


class RanOutOfMemory(StepAgain):
    """Raised if any process ran out of memory and all can repeat the step with smaller micro-batches.

    `message` is the error of this process's allocator, or empty if this process had enough memory.
    """

    def __init__(self, ranks: list[int], message: str) -> None:
        super().__init__(message)
        self.ranks, self.message = ranks, message


@dataclass
class NewSizes:
    """Finder of steps that may need more memory: the first steps, and steps with a longer sample than all before."""

    order: DataOrder
    num_seen: int = 0
    longest: int = 0

    def is_new(self, step: int) -> bool:
        """Return whether this 0-based step may need more memory. The order decides, so all processes agree."""
        lengths = self.order.lengths
        longest = 0 if lengths is None else int(lengths[self.order.step_samples(step)].max())
        is_new = self.num_seen < CAREFUL_STEPS or longest > self.longest
        self.num_seen += 1
        self.longest = max(self.longest, longest)
        return is_new


class MemoryCare:
    """Protection from a process that runs out of memory: it does not block the others, and its step is repeated.

    Under DDP, a process that fails within the backward pass would leave the others waiting in a collective. So in a
    step of new sizes, each process first computes its gradients without a reduction. Then all processes exchange who
    ran out of memory, and only then are the gradients reduced. This costs one more collective and one more forward of a
    micro-batch. That forward has weight 0 and uses DDP's own buckets, so the sum is bit-identical to a normal step.

    Other steps need no more memory than earlier steps, and have no extra cost. A process that still runs out of memory
    contributes NaN, so that no process applies the step.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._sizes = run, NewSizes(run.plan.order)
        self._is_alone = run.accelerator.num_processes == 1
        self._reduces_later = False

    def reduces_at_once(self, step: int) -> bool:
        """Return whether the last backward of this 0-based step reduces gradients.

        Call it before the step's first forward.
        """
        strategy, is_new = self._run.strategy, self._sizes.is_new(step)
        self._reduces_later = is_new and not self._is_alone and strategy.is_replicated
        if not self._reduces_later:
            strategy.begin_step()
        return not self._reduces_later

    @property
    def _is_first(self) -> bool:
        return self._sizes.num_seen == 1

    def after_backward(
        self, micro_batches: Sequence[MicroBatch], agreement: Agreement, loss_sum: Tensor | None, shortage: str
    ) -> tuple[Tensor | None, StepAgain | None]:
        """Return the loss sum, or the reason to repeat the step on all processes.

        Args:
            loss_sum: this process's loss sum; None after a `shortage` on this process.

        Raises:
            RestartNeeded: the others cannot continue without this process. A smaller micro-batch is saved for the
                next start.
            OutOfMemory: the others cannot continue without this process, and the micro-batch cannot be smaller.
            RecipeError: a parameter took no part in the loss, and the steps do not look for such parameters.
        """
        run, strategy = self._run, self._run.strategy
        if loss_sum is None:
            if strategy.meets_in_forward:
                end_for_smaller_micro_batches(run, shortage)
            agreement.share_of_a_target()  # receive the last step's outcome, if the first forward failed before
        if self._reduces_later:
            ranks = _failed_ranks(loss_sum is None)
            if loss_sum is None or ranks:
                return None, RanOutOfMemory(ranks, shortage)
            if self._is_first and check_first_step(run):
                return None, UnusedParameters()
            strategy.reduce_now(micro_batches[-1][0], is_first=self._is_first)
        elif loss_sum is None:
            return (None, RanOutOfMemory([0], shortage)) if self._is_alone else (_contribute_nan(run, shortage), None)
        if self._is_first and not self._reduces_later:
            check_first_step(run)
        if strategy.waits_for_all_parameters:
            check_later_step(run)
        return loss_sum, None


def shortage_in(run: RunContext, error: Exception) -> str:
    """Return the first line of an out-of-memory error, or its type name if it has no text; raise any other error again.

    On a GPU, a snapshot of the memory is written to the run folder.
    """
    if not is_out_of_memory(error):
        raise error
    write_memory_snapshot(run)
    return first_line(error)


def write_memory_snapshot(run: RunContext) -> None:
    """Write `profile/rank-R-memory-step-N.json.gz` and a table of the same name in `.txt`; on a CPU do nothing.

    Call it while the error is alive: the error keeps the step's activations, and these did not fit. The JSON is the
    result of `torch.cuda.memory_snapshot()`. Nothing is recorded before memory runs out, so a normal run has no cost.
    """
    if run.accelerator.device.type != "cuda":
        return
    home, rank = run.plan.output_dir, run.accelerator.process_index
    name = f"{PROFILE_FOLDER}/rank-{rank}-memory-step-{run.state.step + 1}"
    segments = torch.cuda.memory_snapshot()
    text = f"{block_table(segments)}\n\n{torch.cuda.memory_summary(run.accelerator.device)}\n"
    try:
        make_folders(home / PROFILE_FOLDER)
        write_file(home / f"{name}.json.gz", gzip.compress(json.dumps(segments).encode()), home)
        write_file(home / f"{name}.txt", text.encode(), home)
    except OSError as error:
        run.observer.note(f"the memory snapshot could not be written ({error})")
        return
    run.observer.note(f"memory contents of process {rank} when it ran out of memory: {name}.txt")


def block_table(segments: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the allocated blocks by size, the sizes that take the most memory first.

    Args:
        segments: result of `torch.cuda.memory_snapshot()`; sizes are in bytes.
    """
    sizes: Counter[int] = Counter()
    for segment in segments:
        sizes.update(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
    allocated = sum(size * count for size, count in sizes.items())
    reserved = sum(segment["total_size"] for segment in segments)
    largest = sorted(sizes.items(), key=lambda item: item[0] * item[1], reverse=True)[:NUM_SIZES]
    lines = [f"{format_bytes(allocated)} allocated of {format_bytes(reserved)} reserved, largest first:", ""]
    lines.append(f"{'block':>12} {'blocks':>8} {'together':>12} {'share':>7}")
    for size, count in largest:
        together = size * count
        lines.append(f"{format_bytes(size):>12} {count:>8} {format_bytes(together):>12} {together / allocated:>7.1%}")
    return "\n".join(lines)


def _failed_ranks(has_failed: bool) -> list[int]:
    """Return the processes that have failed. All processes must call it."""
    return [rank for rank, failed in enumerate(gather_number(has_failed)) if failed]


def _contribute_nan(run: RunContext, shortage: str) -> Tensor:
    """End the step so that no process applies the update. All learn the reason with its outcome (`undo_step`)."""
    run.out_of_memory = shortage
    free_memory(run)
    if not run.strategy.contribute_nan():
        end_for_smaller_micro_batches(run, shortage)
    return torch.full((), torch.nan, device=run.accelerator.device)


def undo_step(run: RunContext, result: StepResult) -> RanOutOfMemory:
    """Set the run back to before a step that ran out of memory and was not applied; return the error to raise."""
    message, run.out_of_memory = run.out_of_memory, ""
    run.state.step = result.step - 1
    if result.loss_scale is not None:
        run.accelerator.scaler.update(result.loss_scale)  # the NaN was not an overflow and must not lower the scale
    run.strategy.undo_step()
    return RanOutOfMemory(_failed_ranks(bool(message)), message)


def free_memory(run: RunContext) -> None:
    """Drop the gradients, and release the allocator's cached memory to the device."""
    run.strategy.optimizer.zero_grad(set_to_none=True)
    if run.accelerator.device.type == "cuda":
        torch.cuda.empty_cache()


def use_smaller_micro_batches(run: RunContext, error: RanOutOfMemory) -> None:
    """Choose smaller micro-batches for the step that ran out of memory. Its samples and its loss stay the same.

    Raises:
        OutOfMemory: micro-batches hold one sample already, or the data set makes its own batches.
    """
    run.undo_forward()
    free_memory(run)
    step, (reason, smaller) = run.state.step + 1, _shrink(run, error.ranks, error.message)
    run.sizes = smaller
    if run.batch_cache is not None:
        run.batch_cache.write(smaller.per_device_batch_size, f"because {reason}")
    run.accelerator.gradient_accumulation_steps = smaller.gradient_accumulation_steps
    run.observer.on_event("out_of_memory", step, f"{reason}; continuing with {smaller.reason}", ranks=error.ranks)


def end_for_smaller_micro_batches(run: RunContext, message: str) -> NoReturn:
    """Save a smaller micro-batch for the next start, and end the run. The others cannot continue without this process.

    Args:
        message: error of this process's allocator.

    Raises:
        RestartNeeded: the smaller size is saved.
        OutOfMemory: micro-batches hold one sample already, or the smaller size cannot be saved.
    """
    rank, step = run.accelerator.process_index, run.state.step + 1
    reason, smaller = _shrink(run, [rank], message)
    size = smaller.per_device_batch_size
    assert run.batch_cache is not None, "a smaller micro-batch exists, so processes have several samples"
    written = run.batch_cache.write(size, f"because {reason}")
    if (run.batch_cache.read() or (0, ""))[0] != size:  # the next start would run out of memory again
        raise OutOfMemory(f"{reason}; smaller micro-batches are {written}; {OUT_OF_MEMORY_REMEDY}")
    run.saver.wait(LAST_WAIT_SECONDS)
    saved = max(steps_of(run.saver.root), default=0)
    steps = f"Step {step} is" if step == saved + 1 else f"Steps {saved + 1} to {step} are"
    origin = f"checkpoint {saved}" if saved else "the beginning"
    text = (
        f"out of memory at step {step} with micro-batches of "
        f"{format_count(run.sizes.per_device_batch_size, 'sample')}. The next start on this machine uses "
        f"{format_count(size, 'sample')}. {steps} recomputed from {origin}: {run.plan.how_to_resume}"
    )
    run.observer.on_event("out_of_memory", step, text, ranks=[rank])
    raise RestartNeeded(text)


def _shrink(run: RunContext, ranks: Sequence[int], message: str) -> tuple[str, BatchSizes]:
    """Return who ran out of memory, and the next smaller micro-batches.

    Raises:
        OutOfMemory: micro-batches cannot be smaller.
    """
    who = " and ".join(f"process {rank}" for rank in ranks)
    size = format_count(run.sizes.per_device_batch_size, "sample")
    reason = f"{who} ran out of memory in step {run.state.step + 1} with {size} per micro-batch"
    precision = run.plan.recipe.precision
    is_fixed = run.plan.data.step_batches is not None or precision.has_cuda_graphs
    smaller = None if is_fixed else smaller_micro_batches(run.sizes)
    if smaller is None:
        graphs = f"; precision.compile_mode={precision.compile_mode} cannot accumulate smaller micro-batches"
        reason += f" ({message})" if message else ""
        raise OutOfMemory(f"{reason}{graphs if precision.has_cuda_graphs else ''}; {OUT_OF_MEMORY_REMEDY}")
    return reason, smaller


def smaller_micro_batches(sizes: BatchSizes) -> BatchSizes | None:
    """Return batch sizes with the next smaller micro-batch, at most half as large; None for one sample."""
    share, half = sizes.global_batch_size // sizes.world_size, sizes.per_device_batch_size // 2
    size = next((size for size in range(half, 0, -1) if share % size == 0), None)
    if size is None:
        return None
    return replace(
        sizes,
        per_device_batch_size=size,
        gradient_accumulation_steps=share // size,
        reason=f"{sizes.global_batch_size} = {size} per device x {share // size} accumulation x {sizes.world_size}, "
        "because larger micro-batches ran out of memory",
    )
