"""A tensor that is spread over processes (a DTensor), and the part of it that this process holds."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from accel_train.runtime.private import norms_of


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, sharing its memory; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return the tensor that is sharded as `whole` is, and of which this process holds `part`."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def whole_of(tensor: Tensor) -> Tensor:
    """* Return all of a tensor on every process: one gather over the processes that share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(whole: Tensor, other: Tensor) -> Tensor:
    """Return the part that this process would hold of `whole`, which every process has, if it were sharded as `other` is."""
    if not isinstance(other, DTensor):
        return whole
    alike = DTensor.from_local(whole, other.device_mesh, [Replicate()] * other.device_mesh.ndim, run_check=False)
    return alike.redistribute(placements=other.placements).to_local()


def is_quantised(parameter: Tensor) -> bool:
    """Return whether a parameter is one of 4 bits, packed two to a byte (bitsandbytes)."""
    return getattr(parameter, "quant_state", None) is not None


def unpacked_numel(parameter: Tensor) -> int:
    """Return the weights in a parameter, which are more than its elements where it is quantised."""
    state: Any = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple | Mapping):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(each)


def names_not_finite(tensors: Mapping[str, Tensor], *, across_ranks: bool = False) -> list[str]:
    """Return the names of floating-point tensors that hold a NaN or Inf.

    With `across_ranks` all ranks call it at once, each with its shards under the same names, and get the same answer: one
    collective.
    """
    floats = {
        name: local_part(each.detach()) for name, each in tensors.items() if each.is_floating_point() and each.numel()
    }
    if not floats:
        return []
    # max() of nothing is an error, and a rank may hold nothing of a tensor.
    parts = [part if part.numel() else part.new_zeros(1) for part in floats.values()]
    largest = torch.stack([norm.float() for norm in norms_of(parts, math.inf)])
    is_broken = (~torch.isfinite(largest)).float()  # MAX does not carry NaN everywhere
    if across_ranks:
        dist.all_reduce(is_broken, op=dist.ReduceOp.MAX)
    return [name for name, broken in zip(floats, is_broken.tolist(), strict=True) if broken]
