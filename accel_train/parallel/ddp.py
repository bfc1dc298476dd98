"""Data parallelism: every process holds the whole model (DDP). A single process uses this strategy too."""

import math
import os
import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accel_train.core.state import Choice
from accel_train.model.batch_norm import is_batch_norm
from accel_train.model.isolation import Buffers
from accel_train.model.training_module import TrainingModule
from accel_train.optim.muon import Muon
from accel_train.parallel.dims import processes_on_machine
from accel_train.parallel.strategy import MakeOptimizer, Strategy
from accel_train.recipe.parallel import Parallel
from accel_train.runtime.private import end_failed_backward
from accel_train.runtime.process_group import gather_number
from accel_train.task import Batch


class Reduction:
    """Records this process's gradients, bucket by bucket, before DDP averages them.

    DDP reduces each bucket of gradients as soon as it is full, in a fixed order, and overwrites it with the mean. Only
    this hook can see a gradient that is not finite on one process. A moment later it is not finite on all processes.
    """

    def __init__(self, module: DistributedDataParallel, strategy: Strategy) -> None:
        self._strategy = strategy
        self._layout: list[tuple[int, torch.dtype]] = []
        self.sums: list[Tensor] = []
        self._group = module.process_group
        self.is_complete = False
        """Whether the last bucket of the step is reduced: every parameter took part, or DDP knows which did not."""
        module.register_comm_hook(self, Reduction.reduce)

    def begin(self) -> None:
        """Start a step: clear the records of the step before."""
        self.sums, self.is_complete = [], False

    def fill_rest_with_nan(self) -> bool:
        """Send NaN to all reductions that the other processes wait for; return False if their sizes are not known yet.

        The first complete step records the sizes.
        """
        rest = self._layout[len(self.sums) :]
        for size, dtype in rest:
            bucket = torch.full((size,), math.nan, dtype=dtype, device=self._strategy.accelerator.device)
            dist.all_reduce(bucket, group=self._group)
            self.sums.append(bucket[0])
        return bool(rest)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return a future of the bucket's mean over all processes.

        DDP calls this method as its hook, like torch's `allreduce_hook`.
        """
        if bucket.is_last() and (fault := self._strategy.fault) is not None:
            bucket.buffer()[:1].add_(fault)
        self.note(bucket)
        gradients = bucket.buffer().div_(self._group.size())
        return dist.all_reduce(gradients, group=self._group, async_op=True).get_future().then(_first)

    def note(self, bucket: dist.GradBucket) -> None:
        """Record the sum and size of a bucket before it is reduced."""
        gradients, number = bucket.buffer(), bucket.index()
        if number == 0:
            self.sums = []
        self.sums.append(gradients.sum())
        # Replaces the size of the step before, or adds one.
        self._layout[number : number + 1] = [(gradients.numel(), gradients.dtype)]
        self.is_complete = bucket.is_last()
        if self.is_complete:
            del self._layout[number + 1 :]


def _first(done: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return done.value()[0]


class Ddp(Strategy):
    """Strategy in which every process holds the whole model and its optimizer. Gradients are averaged by buckets."""

    name = "ddp"
    reduction: Reduction | None = None
    """Recorder of this process's gradients before the average; None for a single process."""

    @classmethod
    def choose(cls, section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
        """Return 1."""
        return Choice(1, "parallel.strategy ddp: every process holds the whole model")

    def wrap(self, inner: TrainingModule, make_optimizer: MakeOptimizer, *, find_unused: bool) -> Choice[str] | None:
        """* Wrap the training module in DDP, and build an optimizer over its whole weights."""
        # DDP keeps batch-norm statistics equal on all processes. Without batch norm, few buffers change, and
        # `RunningStatistics` finds them.
        self.syncs_buffers = any(map(is_batch_norm, inner.modules()))
        self.accelerator.ddp_handler.broadcast_buffers = self.syncs_buffers
        self.accelerator.ddp_handler.find_unused_parameters = find_unused
        # Accelerate passes `broadcast_buffers` to DDP, and torch is about to rename it.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
        # One GPU per process is visible. Accelerate would give DDP the number of the process on its machine instead.
        if self.accelerator.device.index not in (None, self.accelerator.local_process_index):
            os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        self.take(inner, make_optimizer)
        self.module, prepared = self.accelerator.prepare(inner, self.optimizer)
        # The wrapper costs 70 us per step, and hides a skipped step from the kernel.
        self.optimizer = prepared.optimizer
        self.note_gradients()
        if isinstance(self.optimizer, Muon) and isinstance(self.module, DistributedDataParallel):
            self.optimizer.group = self._on_machine(self.module.process_group)
        return None

    def _on_machine(self, everybody: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """* Return the processes of this machine; None if it has one, or if machines have different numbers.

        These share Muon's matrices. Between machines, gathering them may cost more than it saves. All machines must
        divide them alike: matrices that are stacked with others are rounded differently.
        """
        size = processes_on_machine(everybody.size())
        sizes = set(gather_number(size))
        if sizes == {everybody.size()}:
            return everybody
        if len(sizes) > 1 or size == 1:
            return None
        return dist.new_subgroups(size)[0]

    def look_for_unused(self) -> None:
        """* Make DDP look for parameters that take no part, in each step from now on."""
        self.accelerator.ddp_handler.find_unused_parameters = True
        self.undo_step()

    def undo_step(self) -> None:
        """* Wrap the training module again. The new DDP wrapper has seen no step, and lays its buckets out again."""
        wrapped = self.module
        assert isinstance(wrapped, DistributedDataParallel), "a single process does not reduce"
        self.optimizer.zero_grad(set_to_none=True)
        # It holds references to the old buckets.
        self.reduction = None
        self.close()
        self.module = DistributedDataParallel(
            wrapped.module,
            device_ids=wrapped.device_ids,
            output_device=wrapped.output_device,
            **self.accelerator.ddp_handler.to_kwargs(),
        )
        self.note_gradients()

    def close(self) -> None:
        """Drop DDP's reducer, and with it its hooks on the parameters.

        The reducer must not be the last owner of the process group. It would free the group while it holds the
        interpreter's lock, and join gloo's threads, which may wait for that lock (torch 2.13: one exit in ten hung on a
        busy machine).
        """
        if isinstance(module := getattr(self, "module", None), DistributedDataParallel):
            module.reducer = module.logger = None  # type: ignore[assignment]

    def note_gradients(self) -> None:
        """Start recording this process's gradients before the average."""
        if isinstance(self.module, DistributedDataParallel):
            self.reduction, self.waits_for_all_parameters = Reduction(self.module, self), True
            self.looks_for_unused = self.module.find_unused_parameters

    def gradient_sum(self) -> Tensor | None:
        """Return the sum of this process's gradients before the average; None for a single process."""
        return None if self.reduction is None else torch.stack([each.float() for each in self.reduction.sums]).sum()

    def end_incomplete_reduction(self) -> list[str] | None:
        """* Complete a reduction that lacks gradients of this process, with NaN; return the parameters without one.

        Return None if the reduction is complete.
        """
        if self.reduction is None or self.reduction.is_complete:
            return None
        names = self.without_gradient()
        self.reduction.fill_rest_with_nan()
        return names

    def begin_step(self) -> None:
        """Clear the records of the step before."""
        if self.reduction is not None:
            self.reduction.begin()

    def reduce_now(self, batch: Batch, *, is_first: bool) -> None:
        """* Make DDP average the existing gradients, by a backward pass that adds nothing to them."""
        # If DDP looks for unused parameters, its bucket layout stays as it is.
        if is_first and not self.looks_for_unused:
            self._settle_buckets(batch)
        self.begin_step()
        self._reduce(batch)

    def _reduce(self, batch: Batch) -> None:
        kept = Buffers(self.inner)
        loss_sum = self.module(batch)
        loss_sum.backward(torch.zeros_like(loss_sum))
        kept.put_back()

    def _settle_buckets(self, batch: Batch) -> None:
        """Make DDP lay out its buckets again, as it does after its first backward pass, before a gradient is reduced.

        The position of a gradient in its bucket affects the rounding of sums over three or more processes. Without this
        call, the first step after each start would have another layout. A run that was killed and resumed would then
        differ in the last bit.
        """
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        self._reduce(batch)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def contribute_nan(self) -> bool:
        """* Fill the buckets that this process has not reduced yet with NaN, so that no process applies the step.

        Return False if this is impossible. Before the first complete step, the buckets are unknown. With unused
        parameters, DDP runs one more collective to find them.
        """
        module = self.module
        assert isinstance(module, DistributedDataParallel), "a single process does not reduce"
        assert self.reduction is not None, "DDP records its reductions"
        if self.looks_for_unused or not self.reduction.fill_rest_with_nan():
            return False
        end_failed_backward(module)
        smallest = min((each for each in module.parameters() if each.requires_grad), key=torch.numel)
        smallest.grad = torch.full_like(smallest, torch.nan)
        return True
