"""The rows of a language model's output layer that a process holds: all, or those of its share of the vocabulary.

Tensor parallelism splits the layer by its rows. A position's softmax is then over the logits of several processes, and what
they have to know of each other's is reduced here, a number of a position at a time.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class HeldRows:
    """The rows of the output layer that this process holds: one for each token of its share of the vocabulary."""

    number: int
    vocabulary: int
    """Tokens in all."""
    first: int = 0
    group: dist.ProcessGroup | None = None
    """The processes that hold all of them together; None: this one does."""

    def find(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each label among those held, 0 for one that is not, and whether it is."""
        rows = labels - self.first
        is_here = (rows >= 0) & (rows < self.number)
        return rows.where(is_here, 0), is_here

    def largest(self, each: Tensor) -> Tensor:
        """Return the largest of these processes, element by element."""
        return each if self.group is None else self._reduced(each.clone(), dist.ReduceOp.MAX)

    def smallest(self, each: Tensor) -> Tensor:
        """Return the smallest of these processes, element by element."""
        return each if self.group is None else self._reduced(each, dist.ReduceOp.MIN)

    def summed(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Return the sums over these processes of columns (N, 1), by one collective."""
        return columns if self.group is None else self._reduced(torch.cat(columns, 1), dist.ReduceOp.SUM).split(1, 1)

    def sum_in_place(self, each: Tensor) -> None:
        """Let a tensor be its sum over these processes."""
        if self.group is not None:
            self._reduced(each, dist.ReduceOp.SUM)

    def _reduced(self, each: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(each, operation, group=self.group)
        return each


def held_rows(head: nn.Linear) -> tuple[Tensor, Tensor | None, HeldRows]:
    """Return the weight and the bias that this process holds of an output layer, and which rows they are."""
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return weight, bias, HeldRows(len(weight), len(weight))
    mesh, own = weight.device_mesh, weight.to_local()
    first = mesh.get_local_rank() * -(-len(weight) // mesh.size())
    own_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return own, own_bias, HeldRows(len(own), len(weight), first, mesh.get_group())


def num_parts(head: nn.Linear) -> int:
    """Return how many processes split the rows of an output layer; 1 where each holds it whole."""
    return head.weight.device_mesh.size() if isinstance(head.weight, DTensor) else 1
