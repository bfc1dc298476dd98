"""Base class of the strategies. A strategy spreads a model over processes.

DDP, FSDP2, and ZeRO are one file each. To add a strategy, write one more file and add a line to `strategies.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.checkpoint.contents import (
    check_tensors,
    model_tensors,
    optimizer_tensors,
    restore_optimizer,
    restore_weights,
    split_weights,
    tensor_writers,
)
from accel_train.checkpoint.sharded import ShardWriter, copy_to_host
from accel_train.checkpoint.store import Writer
from accel_train.core.state import Choice
from accel_train.guard.guard import Limits
from accel_train.model.batch_norm import SyncedBatchNorm
from accel_train.model.tensors import Tensors, trained
from accel_train.model.training_module import TrainingModule
from accel_train.optim.ema import Average, WeightAverage
from accel_train.optim.schedule_free import ScheduleFree, ScheduleFreeAverage
from accel_train.optim.update import Update, update_within
from accel_train.parallel.building import Builders, allocate
from accel_train.parallel.dims import ParallelDims, parallel_dims
from accel_train.recipe.parallel import Parallel
from accel_train.task import Batch

ALONE = "single process: nothing to shard"
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Snapshot(NamedTuple):
    """Copies in host memory of the data that this process writes into a checkpoint."""

    files: dict[str, Writer]
    """Whole files by name; empty if another process writes them."""
    shards: ShardWriter | None
    """This process's part of the files that all processes write together."""


class Strategy(ABC):
    """A way to spread a model over processes. All processes must call the methods marked * together.

    A strategy is created before the Accelerator (`strategies.open_strategy`). It is complete after `wrap`.
    """

    name: ClassVar[str]
    is_replicated = True
    """Whether every process holds all weights and moments. They can then be compared, and one process saves them."""
    has_whole_weights = True
    """Whether every process holds all weights, regardless of the optimizer's state."""
    syncs_buffers = True
    """Whether the wrapper keeps running statistics equal on all processes."""
    keeps_gradients = True
    """Whether the parameters hold the step's gradients after its backward passes."""
    builds_empty = False
    """Whether `build` returns a model without weights. It cannot run a forward before `wrap` fills it."""
    whole_because = ""
    """Reason why `build` had to return a model with weights although it `builds_empty`."""
    waits_for_all_parameters = False
    """Whether processes that lack gradients of different parameters must detect it.

    Otherwise the reduction would hang or mix gradients.
    """
    looks_for_unused = False
    """Whether each step looks for parameters that take no part in the loss."""
    notes_forward_order = False
    """Whether the strategy records the first forwards as training forwards. No other forward may run before them."""

    accelerator: Accelerator
    dims: ParallelDims
    module: nn.Module
    """The wrapped training module, whose forward training calls."""
    inner: TrainingModule
    """The training module inside the wrapper. Evaluation calls its forward, and it is saved."""
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    """The parameters with which the optimizer was created."""
    average: Average | None = None

    def __init__(self, section: Parallel, choice: Choice[int]) -> None:
        self.section, self.choice = section, choice
        """The recipe's section, and the number of processes that share one copy of the model, with the reason."""

    fault: Tensor | None = None
    """NaN if a loss of this process's step is not finite, otherwise 0 (0-dim); None if all losses are finite.

    The gradients carry it to the other processes. A NaN in the loss may not reach them, because it is lost where a
    gradient is zero.
    """

    # Before and while building

    @classmethod
    @abstractmethod
    def choose(cls, section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
        """Return the number of processes that share one copy of the model, with the reason; 1 if each holds all of it.

        Raises:
            ValueError: the number of processes does not fit the recipe.
        """

    def precision(self, precision: Choice[str]) -> Choice[str]:
        """Return the precision of a run, with this strategy's effect added to its reason."""
        return precision

    def accelerator_arguments(self, world_size: int, mixed_precision: str) -> dict[str, Any]:
        """Return the Accelerator arguments that this strategy needs."""
        return {}

    def attach(self, accelerator: Accelerator) -> None:
        """Attach the Accelerator that was created with these arguments."""
        self.accelerator, self.dims = accelerator, parallel_dims(accelerator)

    @property
    def shard_size(self) -> int:
        """Number of processes that share one copy of the model, each with whole rows; 1 if rows are not divided."""
        return 1

    @property
    def meets_in_forward(self) -> bool:
        """Return whether a forward waits for other processes. If so, all processes must run it together."""
        is_synced = any(isinstance(each, SyncedBatchNorm) for each in self.inner.modules())
        return not self.is_replicated or self.dims.num_sharing > 1 or (is_synced and self.accelerator.num_processes > 1)

    @property
    def num_copies(self) -> int:
        """Number of processes that hold the same data as this one and can be compared with it."""
        return self.accelerator.num_processes

    def copies_group(self) -> dist.ProcessGroup | None:
        """Return the process group that holds the same data as this process; None for all processes."""
        return None

    def independent_modules(self) -> list[nn.Module]:
        """Return the modules whose forward, once started, waits for no other process."""
        return [self.inner] if self.dims.num_sharing == 1 else []

    def build(self, builders: Builders) -> nn.Module:
        """* Return the model with its weights on this device, or empty for `wrap` to fill."""
        device = self.accelerator.device
        if (model := builders.restored()) is not None:
            return allocate(model, device)
        if (unread := builders.unread()) is not None:
            return allocate(unread.model, device, unread.sources)
        return builders.whole().to(device)

    @abstractmethod
    def wrap(self, inner: TrainingModule, make_optimizer: MakeOptimizer, *, find_unused: bool) -> Choice[str] | None:
        """* Wrap the training module and build its optimizer when the strategy needs it; return a description."""

    def take(self, inner: TrainingModule, make_optimizer: MakeOptimizer) -> None:
        """Store the training module to wrap, and build its optimizer."""
        self.inner, self.optimizer = inner, make_optimizer(inner.model)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    # One step

    def look_for_unused(self) -> None:
        """* Look for parameters that take no part in the loss, in each step from now on."""
        self.looks_for_unused = True

    def without_gradient(self) -> list[str]:
        """Return the trained parameters without a gradient of this process in the step."""
        return [name for name, each in trained(self.inner.model).items() if each.grad is None]

    def end_incomplete_reduction(self) -> list[str] | None:
        """* Complete a reduction that lacks gradients of this process; return the parameters without a gradient.

        Return None if no gradient is missing, or if each step looks for such parameters.
        """
        return None

    def begin_step(self) -> None:
        """Clear the records of the step before."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Skip the reduction of gradients inside the context, except for the last micro-batch."""
        return nullcontext() if is_last else self.accelerator.no_sync(self.module)

    def update_within(self, limits: Limits, share: Tensor) -> Update:
        """* Clip and update, or leave all bits unchanged; `share` is `Agreement.share_of_a_target`."""
        return update_within(limits, self.optimizer, self.parameters, self.accelerator.scaler, share, self.fault)

    def gradient_sum(self) -> Tensor | None:
        """Return the sum of this process's gradients of the step, 0-dim on the device; None if not recorded."""
        return None

    def drop_gradients(self) -> None:
        """Free the gradients of a step that will not be applied."""
        self.optimizer.zero_grad(set_to_none=True)

    # A step that failed

    def reduce_now(self, batch: Batch, *, is_first: bool) -> None:
        """* Reduce the gradients that each process has accumulated, by a backward pass that adds nothing to them.

        `batch` is the input of that pass. The default does nothing, for strategies that reduce in each backward pass.
        """

    def contribute_nan(self) -> bool:
        """* Complete a backward pass that failed on this process, by sending NaN to the other processes.

        Return False if this is impossible.
        """
        return False

    def undo_step(self) -> None:
        """* Restore the state before a step that no process applied."""

    def close(self) -> None:
        """Let go of the process group: no step follows."""

    # Weights

    def release_gathered(self) -> None:
        """Free gathered weights, before weights change other than by an update."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the averaged weights into the model inside the context, if the run keeps an average."""
        if self.average is None:
            yield
            return
        self.release_gathered()
        with self.average.in_place():
            try:
                yield
            finally:
                self.release_gathered()

    def local_tensors(self) -> Tensors:
        """Return the non-empty weights and moments that this process holds. All processes have the same names."""
        return {**split_weights(self.inner.model)[0], **optimizer_tensors(self.optimizer)}

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the whole weights by name. Nothing is gathered."""
        return {name: tensor.shape for name, tensor in split_weights(self.inner.model)[0].items()}

    def full_weights(self, without: Collection[str] = (), narrow: Collection[str] = ()) -> Tensors:
        """* Return all weights by name, without those in `without`, in the main process's host memory.

        Weights in `narrow` become bf16, one at a time. The result is empty on the other processes.
        """
        found = copy_to_host(model_tensors(self.inner.model, without)) if self.accelerator.is_main_process else {}
        return {name: each.bfloat16() if name in narrow else each for name, each in found.items()}

    def full_moments(self) -> Tensors:
        """* Return the optimizer's whole state by name, in the main process's host memory.

        The result is empty on the other processes.
        """
        return copy_to_host(optimizer_tensors(self.optimizer)) if self.accelerator.is_main_process else {}

    # Checkpoints

    def snapshot(self) -> Snapshot:
        """* Copy this process's part of a checkpoint. Training may continue when this returns."""
        weights, moments = self.full_weights(self.inner.base), self.full_moments()
        writers = tensor_writers(weights, moments, self.average) if self.accelerator.is_main_process else {}
        return Snapshot(writers, None)

    def check_stored(self, folder: Path) -> None:
        """Check that a checkpoint's tensors have the types and shapes of this run, before anything is changed.

        Raises:
            CheckpointError: one differs. The message names the first one.
        """
        check_tensors(folder, self.inner.model, self.optimizer)

    def restore_weights(self, folder: Path) -> None:
        """Load weights and their average from a checkpoint of any layout.

        Raises:
            ValueError: the checkpoint is from another model.
        """
        self.release_gathered()
        restore_weights(folder, self.inner.model, self.average)

    def restore_optimizer(self, folder: Path) -> None:
        """Load moments and step counters from a checkpoint of any layout.

        Raises:
            ValueError: they belong to other parameters.
        """
        restore_optimizer(folder, self.optimizer)

    def make_average(self, decay: float | None) -> None:
        """Start an average of the trained weights: with this decay, or from a schedule-free optimizer."""
        weights = list(trained(self.inner.model).items())
        if decay is not None:
            self.average = WeightAverage(weights, decay)
        elif isinstance(self.optimizer, ScheduleFree):
            self.average = ScheduleFreeAverage(weights, self.optimizer)
