"""Tensors that are sharded over processes (DTensors), and the part of a tensor that this process holds."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_train.runtime.private import norms_of


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, sharing its memory; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor that is sharded like `whole`, with `part` as this process's shard."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def holders(tensor: DTensor) -> dist.ProcessGroup:
    """Return the process group that holds the shards of one copy of a tensor: the whole mesh, or one replica under
    HSDP.
    """
    mesh = tensor.device_mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    if tensor.placements[0].is_replicate():
        return mesh.get_group(1)
    everybody = dist.group.WORLD
    assert everybody is not None
    assert mesh.size() == everybody.size(), "layers that are split over neighboring processes have one copy"
    return everybody


def parts_in(whole: Tensor, other: DTensor) -> list[Tensor]:
    """Return views of a whole tensor: the shard that each of the `holders` of `other` would hold under its sharding."""
    parts = [whole]
    # FSDP2 is the first dimension of the mesh, and shards tensors that are already split.
    for size, placement in zip(reversed(other.device_mesh.shape), reversed(other.placements), strict=True):
        dim = getattr(placement, "dim", None)
        cut = [[part] * size if dim is None else _chunks(part, size, dim) for part in parts]
        parts = [each for row in zip(*cut, strict=True) for each in row]
    return parts[: holders(other).size()]


def _chunks(tensor: Tensor, size: int, dim: int) -> list[Tensor]:
    """Return `size` chunks of a tensor as views. The last ones may be shorter or empty, as FSDP2 makes them."""
    length = tensor.shape[dim]
    bounds = [min(number * -(-length // size), length) for number in range(size + 1)]
    return [tensor.narrow(dim, start, end - start) for start, end in pairwise(bounds)]


def is_quantised(parameter: Tensor) -> bool:
    """Return whether a parameter has 4-bit weights, packed two to a byte (bitsandbytes)."""
    return getattr(parameter, "quant_state", None) is not None


def unpacked_numel(parameter: Tensor) -> int:
    """Return the number of weights in a parameter. A quantized parameter has more weights than elements."""
    state: Any = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple | Mapping):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(each)


def is_writable(tensor: Tensor) -> bool:
    """Return whether every element has separate memory. Elements of an expanded tensor (an index) share memory."""
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def names_not_finite(tensors: Mapping[str, Tensor], *, across_ranks: bool = False) -> list[str]:
    """Return the names of floating-point tensors that hold a NaN or Inf.

    With `across_ranks`, all ranks must call this function together, each with its shards under the same names. All get
    the same answer. The cost is one collective.
    """
    floats = {
        name: local_part(each.detach()) for name, each in tensors.items() if each.is_floating_point() and each.numel()
    }
    if not floats:
        return []
    # max() of an empty tensor is an error, and a rank may hold an empty shard.
    parts = [part if part.numel() else part.new_zeros(1) for part in floats.values()]
    largest = torch.stack([norm.float() for norm in norms_of(parts, math.inf)])
    # On some backends, MAX does not propagate NaN.
    is_broken = (~torch.isfinite(largest)).float()
    if across_ranks:
        dist.all_reduce(is_broken, op=dist.ReduceOp.MAX)
    return [name for name, broken in zip(floats, is_broken.tolist(), strict=True) if broken]
