"""A tensor that is spread over processes (a DTensor), and the part of it that this process holds."""

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
    """Return this process's shard of a tensor, sharing its memory; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return the tensor that is sharded as `whole` is, and of which this process holds `part`."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def holders(tensor: DTensor) -> dist.ProcessGroup:
    """Return the processes that hold the parts of one copy of a tensor: all of its mesh, or without the other copies (HSDP)."""
    mesh = tensor.device_mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    if tensor.placements[0].is_replicate():
        return mesh.get_group(1)
    everybody = dist.group.WORLD
    assert everybody is not None
    assert mesh.size() == everybody.size(), "of layers that are split over neighbours there is one copy"
    return everybody


def parts_in(whole: Tensor, other: DTensor) -> list[Tensor]:
    """Return views of a whole tensor: what each of the `holders` of `other` would hold of it, if it were sharded as that is."""
    parts = [whole]
    # FSDP2, the first dimension of the mesh, shards what is split already.
    for size, placement in zip(reversed(other.device_mesh.shape), reversed(other.placements), strict=True):
        dim = getattr(placement, "dim", None)
        cut = [[part] * size if dim is None else _chunks(part, size, dim) for part in parts]
        parts = [each for row in zip(*cut, strict=True) for each in row]
    return parts[: holders(other).size()]


def _chunks(tensor: Tensor, size: int, dim: int) -> list[Tensor]:
    """Return views of as many chunks as `size`, the last ones shorter or empty, as FSDP2 makes them."""
    length = tensor.shape[dim]
    bounds = [min(number * -(-length // size), length) for number in range(size + 1)]
    return [tensor.narrow(dim, start, end - start) for start, end in pairwise(bounds)]


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


def is_writable(tensor: Tensor) -> bool:
    """Return whether each element has memory of its own: those of an expanded tensor (an index) share it."""
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


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
