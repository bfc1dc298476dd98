"""The base of all strategies: how a model is spread over processes. Every question about it is a method here.

DDP, FSDP2 and ZeRO are a file each; a new strategy is one more (and a line in `strategies.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.checkpoint.contents import (
    check_tensors,
    copy_to_host,
    model_tensors,
    optimizer_tensors,
    restore_optimizer,
    restore_weights,
    tensor_writers,
)
from accel_train.checkpoint.sharded import ShardWriter
from accel_train.checkpoint.store import Writer
from accel_train.core.state import Choice
from accel_train.guard.guard import Limits
from accel_train.model.batch_norm import SyncedBatchNorm
from accel_train.model.training_module import TrainingModule
from accel_train.optim.ema import Average, WeightAverage
from accel_train.optim.schedule_free import ScheduleFree, ScheduleFreeAverage
from accel_train.optim.update import Update, update_within
from accel_train.parallel.dims import ParallelDims, parallel_dims
from accel_train.recipe.parallel import Parallel

ALONE = "one process: there is nobody to share the model with"
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Snapshot(NamedTuple):
    """Copies in host memory of what this process writes into a checkpoint."""

    files: dict[str, Writer]
    """Whole files, by name; empty where another process writes them."""
    shards: ShardWriter | None
    """This process's part of files that all processes write together."""


class Strategy(ABC):
    """A way to spread a model over processes. All processes call the methods marked * at once.

    It is made before there is an Accelerator (`strategies.open_strategy`), and complete after `wrap`.
    """

    name: ClassVar[str]
    is_replicated = True
    """Every process holds all weights and all moments: they can be compared, and one process saves."""
    has_whole_weights = True
    """Every process holds all weights, whatever it holds of the optimizer."""
    syncs_buffers = True
    """The wrapper keeps running statistics alike by itself."""
    keeps_gradients = True
    """Gradients of the step are on the parameters after its backward passes."""
    builds_empty = False
    """`build` returns a model without weights, for `wrap` to fill: it cannot forward before that."""
    waits_for_all_parameters = False
    """Processes that lack gradients of different parameters have to know of it: the reduction would not end, or would mix them."""
    looks_for_unused = False
    """Each step looks for parameters that take no part in the loss."""
    notes_forward_order = False
    """The first forwards are taken for those of training: none may come before."""

    accelerator: Accelerator
    dims: ParallelDims
    module: nn.Module
    """The training module as it is wrapped: what training forwards."""
    inner: TrainingModule
    """The training module inside the wrapper: what evaluation forwards, and what is saved."""
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    """Those that the optimizer was made with."""
    average: Average | None = None

    def __init__(self, section: Parallel, choice: Choice[int]) -> None:
        self.section, self.choice = section, choice
        """The recipe's section, and how many processes share one copy of the model, with the reason."""

    fault: Tensor | None = None
    """0-dim: NaN where a loss of this process's step is not finite, else 0; None: all are known to be finite.

    Gradients take it to the other processes: NaN that is sent backward need not arrive where a gradient is zero."""

    # Before and while building

    @classmethod
    @abstractmethod
    def choose(cls, section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
        """Return how many processes share one copy of the model, with the reason; 1: each holds all of it.

        Raises:
            ValueError: the number of processes does not fit the recipe.
        """

    def precision(self, precision: Choice[str]) -> Choice[str]:
        """Return the precision of a run, its reason with what this strategy makes of it."""
        return precision

    def accelerator_arguments(self, world_size: int, mixed_precision: str) -> dict[str, Any]:
        """Return the arguments that the Accelerator needs for it."""
        return {}

    def attach(self, accelerator: Accelerator) -> None:
        """Take the Accelerator that was made with these arguments."""
        self.accelerator, self.dims = accelerator, parallel_dims(accelerator)

    @property
    def shard_size(self) -> int:
        """Processes that share one copy of the model, each with whole rows of every weight; 1 where rows are not divided."""
        return 1

    @property
    def meets_in_forward(self) -> bool:
        """A forward waits for other processes: nobody can compute alone, or stay behind."""
        is_synced = any(isinstance(each, SyncedBatchNorm) for each in self.inner.modules())
        return not self.is_replicated or self.dims.num_sharing > 1 or (is_synced and self.accelerator.num_processes > 1)

    @property
    def num_copies(self) -> int:
        """Processes that hold the same as this one, and can be compared with it."""
        return self.accelerator.num_processes

    def copies_group(self) -> dist.ProcessGroup | None:
        """Return the group of those processes; None for all of them."""
        return None

    def independent_modules(self) -> list[nn.Module]:
        """Return the modules whose forward, once begun, waits for no other process."""
        return [self.inner] if self.dims.num_sharing == 1 else []

    def build(self, make: Callable[[], nn.Module], make_empty: Callable[[], nn.Module]) -> nn.Module:
        """* Return the model: with its weights on this device, or empty, for `wrap` to fill."""
        return make().to(self.accelerator.device)

    @abstractmethod
    def wrap(self, inner: TrainingModule, make_optimizer: MakeOptimizer, *, find_unused: bool) -> Choice[str] | None:
        """* Spread and wrap the training module, and make its optimizer when this strategy needs it; returns what was wrapped."""

    def take(self, inner: TrainingModule, make_optimizer: MakeOptimizer) -> None:
        """Keep the training module that is wrapped, and make its optimizer."""
        self.inner, self.optimizer = inner, make_optimizer(inner.model)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    # One step

    def look_for_unused(self) -> None:
        """* Look for parameters that take no part in the loss, in each step from now on."""
        self.looks_for_unused = True

    def without_gradient(self) -> list[str]:
        """Return the trained parameters that have got no gradient of this process in the step."""
        return [name for name, each in self.inner.model.named_parameters() if each.requires_grad and each.grad is None]

    def end_incomplete_reduction(self) -> list[str] | None:
        """* End a reduction that lacks gradients of this process; return the parameters without one where no step looks for them, else None."""
        return None

    def begin_step(self) -> None:
        """Forget what was noted of the step before."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Inside, a backward does not reduce gradients, unless it is of the last micro-batch."""
        return nullcontext() if is_last else self.accelerator.no_sync(self.module)

    def update_within(self, limits: Limits, share: Tensor) -> Update:
        """* Clip and update, or leave all bits as they are; `share` is `Agreement.share_of_a_target`."""
        return update_within(limits, self.optimizer, self.parameters, self.accelerator.scaler, share, self.fault)

    def gradient_sum(self) -> Tensor | None:
        """Return the sum of this process's own gradients of the step, 0-dim on the device; None where they were not seen."""
        return None

    def drop_gradients(self) -> None:
        """Forget the gradients of a step whose update will not be made."""
        self.optimizer.zero_grad(set_to_none=True)

    # A step that failed

    def reduce_now(self, batch: Mapping[str, Tensor], *, is_first: bool) -> None:
        """* Reduce the gradients that each process has kept to itself, by a backward pass of `batch` that adds nothing to them.

        Nothing to do where each backward pass reduces its own.
        """

    def contribute_nan(self) -> bool:
        """* End a backward pass that failed here for the other processes, by NaN; return False where that is impossible."""
        return False

    def undo_step(self) -> None:
        """* Be as before a step that no process applied."""

    # Weights

    def release_gathered(self) -> None:
        """Forget gathered weights, before weights change other than by an update."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has its averaged weights, where there is an average."""
        if self.average is None:
            yield
            return
        self.release_gathered()
        with self.average.in_place():
            try:
                yield
            finally:
                self.release_gathered()

    def local_tensors(self) -> dict[str, Tensor]:
        """Return the weights and moments that this process holds: the same names on all, none empty."""
        return {**model_tensors(self.inner.model), **optimizer_tensors(self.optimizer)}

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the whole weights by name: sizes are asked before anything is gathered."""
        return {name: tensor.shape for name, tensor in model_tensors(self.inner.model).items()}

    def full_weights(self, without: Collection[str] = ()) -> dict[str, Tensor]:
        """* Return all weights but those `without` by name, on the main process in host memory; empty on the others."""
        return copy_to_host(model_tensors(self.inner.model, without)) if self.accelerator.is_main_process else {}

    def full_moments(self) -> dict[str, Tensor]:
        """* Return the optimizer's whole state by name, on the main process in host memory; empty on the others."""
        return copy_to_host(optimizer_tensors(self.optimizer)) if self.accelerator.is_main_process else {}

    # Checkpoints

    def snapshot(self) -> Snapshot:
        """* Copy what this process writes into a checkpoint: training may continue when this returns."""
        weights, moments = self.full_weights(self.inner.base), self.full_moments()
        writers = tensor_writers(weights, moments, self.average) if self.accelerator.is_main_process else {}
        return Snapshot(writers, None)

    def check_stored(self, folder: Path) -> None:
        """Refuse a checkpoint whose tensors are of other types or shapes than this run's, before anything is changed.

        Raises:
            CheckpointError: names the first.
        """
        check_tensors(folder, self.inner.model, self.optimizer)

    def restore_weights(self, folder: Path) -> None:
        """Read weights and their average from a checkpoint of any layout.

        Raises:
            ValueError: it was made for another model.
        """
        self.release_gathered()
        restore_weights(folder, self.inner.model, self.average)

    def restore_optimizer(self, folder: Path) -> None:
        """Read moments and step counters from a checkpoint of any layout.

        Raises:
            ValueError: they are of other parameters.
        """
        restore_optimizer(folder, self.optimizer)

    def make_average(self, decay: float | None) -> None:
        """Keep an average of the trained weights from now on: with this decay, or that of a schedule-free optimizer."""
        trained = [(name, each) for name, each in self.inner.model.named_parameters() if each.requires_grad]
        if decay is not None:
            self.average = WeightAverage(trained, decay)
        elif isinstance(self.optimizer, ScheduleFree):
            self.average = ScheduleFreeAverage(trained, self.optimizer)
