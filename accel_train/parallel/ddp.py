"""Data parallelism: every process holds the whole model (DDP); a process that is alone is DDP of one."""

import math
import warnings
from collections.abc import Mapping

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


class Reduction:
    """Notes of this process's own gradients, bucket by bucket, before they are averaged.

    DDP reduces a bucket of gradients as soon as it is full, in a fixed order, and each is overwritten by the mean. So here is
    the only place where a gradient can be seen that is not finite on one process and, a moment later, on all.
    """

    def __init__(self, module: DistributedDataParallel, strategy: Strategy) -> None:
        self._strategy = strategy
        self._layout: list[tuple[int, torch.dtype]] = []
        self.sums: list[Tensor] = []
        self._group = module.process_group
        self.is_complete = False
        """The last bucket of the step is reduced: every parameter took part, or DDP knows which did not."""
        module.register_comm_hook(self, Reduction.reduce)

    def begin(self) -> None:
        """Begin a step: forget the buckets of the step before."""
        self.sums, self.is_complete = [], False

    def fill_rest_with_nan(self, device: torch.device) -> bool:
        """Contribute NaN to all that the others wait for; return False where no step has shown yet how much that is."""
        rest = self._layout[len(self.sums) :]
        for size, dtype in rest:
            bucket = torch.full((size,), math.nan, dtype=dtype, device=device)
            dist.all_reduce(bucket, group=self._group)
            self.sums.append(bucket[0])
        return bool(rest)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the mean over all processes, on its way; DDP's hook, as torch's own `allreduce_hook`."""
        if bucket.is_last() and (fault := self._strategy.fault) is not None:
            bucket.buffer()[:1].add_(fault)
        self.note(bucket)
        gradients = bucket.buffer().div_(self._group.size())
        return dist.all_reduce(gradients, group=self._group, async_op=True).get_future().then(_first)

    def note(self, bucket: dist.GradBucket) -> None:
        """Note the sum and size of a bucket before it is reduced."""
        gradients = bucket.buffer()
        if bucket.index() == 0:
            self.sums = []
        self.sums.append(gradients.sum())
        if bucket.index() == len(self._layout):
            self._layout.append((0, gradients.dtype))
        self._layout[bucket.index()] = (gradients.numel(), gradients.dtype)
        self.is_complete = bucket.is_last()
        if bucket.is_last():
            del self._layout[bucket.index() + 1 :]


def _first(done: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return done.value()[0]


class Ddp(Strategy):
    """Every process holds the whole model and its optimizer; gradients are averaged bucket by bucket."""

    name = "ddp"
    reduction: Reduction | None = None
    """Notes what this process puts into the average; None for a process that is alone."""

    @classmethod
    def choose(cls, section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
        """Return 1."""
        return Choice(1, "parallel.strategy ddp: every process holds the whole model")

    def wrap(self, inner: TrainingModule, make_optimizer: MakeOptimizer, *, find_unused: bool) -> Choice[str] | None:
        """* Wrap the training module in DDP, with an optimizer over its whole weights."""
        # DDP keeps batch-norm statistics the same on all processes; else few buffers change, and `RunningStatistics` finds those.
        self.syncs_buffers = any(map(is_batch_norm, inner.modules()))
        self.accelerator.ddp_handler.broadcast_buffers = self.syncs_buffers
        self.accelerator.ddp_handler.find_unused_parameters = find_unused
        # Accelerate hands it to DDP by this name, which torch is about to rename.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
        self.take(inner, make_optimizer)
        self.module, prepared = self.accelerator.prepare(inner, self.optimizer)
        self.optimizer = prepared.optimizer  # the wrapper costs 70 us a step, and hides a skipped step from the kernel
        self.note_gradients()
        # Between machines the gather, 4 bytes a weight, may cost more than it saves.
        on_one_machine = processes_on_machine(self.accelerator.num_processes) == self.accelerator.num_processes
        if isinstance(self.optimizer, Muon) and isinstance(self.module, DistributedDataParallel) and on_one_machine:
            self.optimizer.group = self.module.process_group
        return None

    def look_for_unused(self) -> None:
        """* Let DDP look for parameters that take no part, from now on in each step."""
        self.accelerator.ddp_handler.find_unused_parameters = True
        self.undo_step()

    def undo_step(self) -> None:
        """* Wrap the training module anew: DDP has then seen no step, reduced nothing, and lays its buckets out again."""
        wrapped = self.module
        assert isinstance(wrapped, DistributedDataParallel), (
            "a process that is alone has nobody who waits for a gradient"
        )
        self.optimizer.zero_grad(set_to_none=True)
        self.reduction = None  # it holds on to the buckets of before
        wrapped.reducer = wrapped.logger = None  # type: ignore[assignment]  # its hooks on the parameters go with it
        self.module = DistributedDataParallel(
            wrapped.module,
            device_ids=wrapped.device_ids,
            output_device=wrapped.output_device,
            **self.accelerator.ddp_handler.to_kwargs(),
        )
        self.note_gradients()

    def note_gradients(self) -> None:
        """Note from now on what this process puts into the average of gradients."""
        if isinstance(self.module, DistributedDataParallel):
            self.reduction, self.waits_for_all_parameters = Reduction(self.module, self), True
            self.looks_for_unused = self.module.find_unused_parameters

    def gradient_sum(self) -> Tensor | None:
        """Return the sum of this process's own gradients, before they were averaged; None for a process that is alone."""
        return None if self.reduction is None else torch.stack([each.float() for each in self.reduction.sums]).sum()

    def end_incomplete_reduction(self) -> list[str] | None:
        """* End a reduction that lacks gradients of this process, with NaN; return the parameters without one, None if none lacks."""
        if self.reduction is None or self.reduction.is_complete:
            return None
        trained = [(name, each) for name, each in self.inner.model.named_parameters() if each.requires_grad]
        names = [name for name, each in trained if each.grad is None]
        self.reduction.fill_rest_with_nan(self.accelerator.device)
        return names

    def begin_step(self) -> None:
        """Forget what was noted of the step before."""
        if self.reduction is not None:
            self.reduction.begin()

    def reduce_now(self, batch: Mapping[str, Tensor], *, is_first: bool) -> None:
        """* Let DDP average the gradients that are there, by a backward pass that adds nothing to them."""
        if is_first and not self.looks_for_unused:  # with it, DDP's layout stays as it is
            self._settle_buckets(batch)
        self.begin_step()
        self._reduce(batch)

    def _reduce(self, batch: Mapping[str, Tensor]) -> None:
        kept = Buffers(self.module)
        loss_sum = self.module(batch)
        loss_sum.backward(torch.zeros_like(loss_sum))
        kept.put_back()

    def _settle_buckets(self, batch: Mapping[str, Tensor]) -> None:
        """Let DDP lay out its buckets anew, as it does after its first backward pass, before there is a gradient to reduce.

        Sums of three and more processes are rounded by where a gradient lies in its bucket. So a run that was killed and resumed
        would differ in the last bit from one that was not, if the first step after each start had another layout than the rest.
        """
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        self._reduce(batch)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def contribute_nan(self) -> bool:
        """* Fill the buckets that this process has not reduced yet with NaN: no process applies the step.

        Impossible before a step has shown the buckets, and with unused parameters: DDP then has one more collective, on which they are.
        """
        module = self.module
        assert isinstance(module, DistributedDataParallel), "a process that is alone has no others"
        assert self.reduction is not None, "so it notes what it reduces"
        if self.looks_for_unused or not self.reduction.fill_rest_with_nan(self.accelerator.device):
            return False
        end_failed_backward(module)
        smallest = min((each for each in module.parameters() if each.requires_grad), key=torch.numel)
        smallest.grad = torch.full_like(smallest, torch.nan)
        return True
