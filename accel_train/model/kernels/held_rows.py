"""The rows of a language model's output layer that a process holds: all rows, or its share of the vocabulary.

Tensor parallelism splits the layer by its rows. The softmax of a position then covers logits of several processes. This
module reduces the numbers that they exchange: one number per position at a time.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

TENSOR_PARALLEL = "tp"
"""Name of the mesh dimension of the processes that split layers, in Accelerate's meshes."""


@dataclass(frozen=True)
class HeldRows:
    """The rows of the output layer that this process holds, one per token of its share of the vocabulary."""

    number: int
    vocabulary: int
    """Number of tokens in the vocabulary."""
    first: int = 0
    group: dist.ProcessGroup | None = None
    """Processes that together hold all rows; None if this process holds all of them."""

    def find(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local row of each label (0 if not held), and a mask of the labels that are held."""
        rows = labels - self.first
        is_here = (rows >= 0) & (rows < self.number)
        return rows.where(is_here, 0), is_here

    def largest(self, each: Tensor) -> Tensor:
        """Return the elementwise maximum over these processes."""
        return each if self.group is None else self._reduced(each.clone(), dist.ReduceOp.MAX)

    def smallest(self, each: Tensor) -> Tensor:
        """Return the elementwise minimum over these processes."""
        return self._reduced(each, dist.ReduceOp.MIN)

    def summed(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Return the sums of columns (N, 1) over these processes, with one collective."""
        return columns if self.group is None else self._reduced(torch.cat(columns, 1), dist.ReduceOp.SUM).split(1, 1)

    def sum_in_place(self, each: Tensor) -> None:
        """Replace a tensor by its sum over these processes."""
        self._reduced(each, dist.ReduceOp.SUM)

    def _reduced(self, each: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None:
            dist.all_reduce(each, operation, group=self.group)
        return each


def held_rows(head: nn.Linear) -> tuple[Tensor, Tensor | None, HeldRows]:
    """Return this process's weight and bias of an output layer, and the rows that they are.

    Call it in the layer's forward, where FSDP2 has gathered the weights.
    """
    weight, bias = head.weight, head.bias
    if split_of(head) is None:
        return weight, bias, HeldRows(len(weight), len(weight))
    assert isinstance(weight, DTensor), "the weight is split"
    mesh, own = weight.device_mesh, weight.to_local()
    first = mesh.get_local_rank() * -(-len(weight) // mesh.size())
    own_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return own, own_bias, HeldRows(len(own), len(weight), first, mesh.get_group())


def num_parts(head: nn.Linear) -> int:
    """Return the number of processes that split the rows of an output layer; 1 if each one holds the whole layer."""
    split = split_of(head)
    return 1 if split is None else split[0]


def split_of(head: nn.Linear) -> tuple[int, Placement] | None:
    """Return how many processes split an output layer, and how; None if tensor parallelism does not split it.

    The other dimensions of the weight's mesh are FSDP2's. They are there while the weight is not gathered.
    """
    weight = head.weight
    names = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    if not isinstance(weight, DTensor) or TENSOR_PARALLEL not in names:
        return None
    number = names.index(TENSOR_PARALLEL)
    return weight.device_mesh.size(number), weight.placements[number]
