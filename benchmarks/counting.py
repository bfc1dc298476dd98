"""Counts what this process hands to collectives, by watching the calls: counted, where a plan computes."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

SMALL_BYTES = 512
"""Less than that is what processes agree with, and the norms of gradients: not of the model."""
METHODS = {
    "all_gather_single": ("all-gather", 0),
    "_allgather_base": ("all-gather", 0),  # before torch 2.13
    "reduce_scatter_single": ("reduce-scatter", 1),
    "_reduce_scatter_base": ("reduce-scatter", 1),
    "allreduce": ("all-reduce", 0),
    "all_to_all_single": ("all-to-all", 0),
    "alltoall_base": ("all-to-all", 0),  # before torch 2.13
}
"""Of a process group: the kind of collective, and which argument is the whole tensor."""
OF_TENSORS_IN_PARTS = {"all_reduce": "all-reduce", "all_gather_single": "all-gather"}
"""Those of torch.distributed._functional_collectives that DTensor calls (torch 2.13): they reach a group without
Python.
"""


def count_collectives() -> Counter[str]:
    """From now on the counter fills: bytes by kind, of what an all-gather ends with and a reduction begins with.

    DDP's buckets are reduced by a hook in Python (`accel_train.parallel.ddp`), which is seen.
    """
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    counts: Counter[str] = Counter()
    for method, (kind, which) in METHODS.items():
        if hasattr(dist.ProcessGroup, method):
            setattr(dist.ProcessGroup, method, _counted(getattr(dist.ProcessGroup, method), kind, which, counts))
    for function, kind in OF_TENSORS_IN_PARTS.items():
        if hasattr(functional, function):
            setattr(functional, function, _counted_result(getattr(functional, function), kind, counts))
    return counts


def _counted_result(original: Any, kind: str, counts: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result.nbytes >= SMALL_BYTES:
            counts[kind] += result.nbytes
        return result

    return call


def _counted(original: Any, kind: str, which: int, counts: Counter[str]) -> Any:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = args[which] if isinstance(args[which], list) else [args[which]]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes >= SMALL_BYTES:
            counts[kind] += num_bytes
        return original(group, *args, **kwargs)

    return call


def per_step(counts: Mapping[str, int], num_steps: int) -> dict[str, float]:
    """The counts of one of so many equal steps."""
    return {kind: total / num_steps for kind, total in counts.items()}
