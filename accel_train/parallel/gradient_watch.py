"""Find the weights that take no part in a micro-batch, before a sharded model reduces its gradients."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_train.core.errors import RecipeError
from accel_train.model.training_module import TrainingModule
from accel_train.runtime.private import before_reduction


class Fsdp2Gradients:
    """Sets a gradient of 0 for each weight that took no part in a micro-batch, before FSDP2 reduces its group.

    FSDP2 concatenates the gradients that a process has, without their names. If processes lacked different gradients,
    it would add gradients of different weights. A group without any gradient is not reduced.
    """

    def __init__(self, inner: TrainingModule, take_fault: Callable[[], Tensor | None]) -> None:
        self._take_fault = take_fault
        self._parameters = {name: each for name, each in inner.model.named_parameters() if each.requires_grad}
        self._names = {id(each): name for name, each in self._parameters.items()}
        for part in inner.modules():
            if isinstance(part, FSDPModule):
                before_reduction(part, self._complete)
        self.begin_step()

    def begin_step(self) -> None:
        """Clear the records of the step before."""
        self.lacking: set[str] = set()
        """Names of weights that had no gradient in some micro-batch of this process."""
        self._used: set[str] = set()
        self._idle: dict[str, int] = {}

    def _complete(self, weights: Sequence[tuple[nn.Parameter, nn.Parameter | None]]) -> None:
        """Fill in the missing gradients of a group. `weights` are its trained weights as (sharded, gathered) pairs."""
        named = [(self._names[id(sharded)], gathered) for sharded, gathered in weights]
        grads = [gathered.grad for _, gathered in named if gathered is not None and gathered.grad is not None]
        if grads and (fault := self._take_fault()) is not None:
            smallest = min(grads, key=torch.numel)
            (smallest.to_local() if isinstance(smallest, DTensor) else smallest).add_(fault)
        lacking = {name for name, gathered in named if gathered is None or gathered.grad is None}
        self.lacking |= lacking
        self._used.update(name for name, _ in named if name not in lacking)
        if len(lacking) < len(named):
            for name, gathered in named:
                if name in lacking and gathered is not None:
                    gathered.grad = torch.zeros_like(gathered)
        elif named:
            first = named[0][0]
            self._idle[first] = self._idle.get(first, 0) + 1

    def settle(self, device: torch.device) -> None:
        """* Remove the gradients of weights that took part on no process, so that these get no update.

        With one process they get none either.

        Raises:
            RecipeError: on all processes: a group took part on some of them only, but FSDP2 gathers it on all.
        """
        names = list(self._parameters)
        used, idle = ([int(name in self._used) for name in names], [self._idle.get(name, 0) for name in names])
        # Send the largest and the (negated) smallest counts in one collective.
        packed: Tensor = torch.tensor([used, idle, [-count for count in idle]], dtype=torch.int32, device=device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        taking_part, most, fewest = packed.tolist()
        for name, largest, smallest in zip(names, most, fewest, strict=True):
            if largest != -smallest:
                raise RecipeError(
                    f"the module with {name} takes part in the loss on some processes and not on others, and fsdp2 "
                    "gathers it on all at once; let all processes compute it in each micro-batch, or use "
                    "parallel.strategy ddp"
                )
        for name, is_used in zip(names, taking_part, strict=True):
            if not is_used:
                self._parameters[name].grad = None


class ZeroGradients:
    """Records the trained weights that get no gradient in a backward pass.

    DeepSpeed does not keep gradients where torch does, so hooks record them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = [name for name, each in module.named_parameters() if each.requires_grad]
        self._seen: set[str] = set()
        self.lacking: set[str] = set()
        """Names of weights that had no gradient in some micro-batch of the step on this process."""
        for name, each in module.named_parameters():
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(lambda _, name=name: self._seen.add(name))

    def begin_step(self) -> None:
        """Clear the records of the step before."""
        self.lacking.clear()
        self._seen.clear()

    def end_backward(self) -> None:
        """Record the weights that had no gradient in the last backward pass."""
        if len(self._seen) < len(self._names):
            self.lacking.update(name for name in self._names if name not in self._seen)
        self._seen.clear()
