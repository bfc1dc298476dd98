"""Updates of sharded weights by FusedAdam, beside torch's own Adam over the same DTensors: `sharded_update.py`.

Asserts the same bits, given the same norm. Prints, a line of JSON: the operators on DTensors by layout and step.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from accel_train.guard.guard import Limits
from accel_train.model.tensors import local_part
from accel_train.optim.adam import FusedAdam
from accel_train.optim.update import update_within
from accel_train.runtime.private import norms_of, watch_operators

SHAPES = ((12, 8), (5, 9), (1, 6), (7,), (8, 8), (3, 4))
LAYOUTS = (
    ((Shard(0),), (Shard(0),)),
    ((Shard(0),), (Replicate(),)),  # layers that are split, and norms that are not
    ((Replicate(), Shard(0)), (Replicate(), Shard(0))),  # HSDP
    ((Shard(0), Shard(1)), (Shard(0), Replicate())),  # FSDP2 and layers that are split
)
"""Placements of matrices and of vectors; two dimensions need four processes."""
STEPS, SKIPPED = 5, 3


def main() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    counts: list[list[int]] = []
    for of_matrices, of_vectors in LAYOUTS if size > 2 else LAYOUTS[:2]:
        mesh = init_device_mesh("cpu", (size,) if len(of_matrices) == 1 else (2, size // 2))

        def sharded(whole: Tensor, mesh: Any = mesh, of: Any = (of_vectors, of_matrices)) -> DTensor:
            return distribute_tensor(whole, mesh, of[whole.dim() > 1])

        counts.append([])
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(each, generator=generator) for each in SHAPES]
        ours, theirs = ([nn.Parameter(sharded(each)) for each in values] for _ in range(2))
        update = FusedAdam([{"params": ours}], lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True)
        reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True)
        for step in range(STEPS):
            for mine, other, each in zip(ours, theirs, SHAPES, strict=True):
                gradient = torch.randn(each, generator=generator) * (torch.inf if step == SKIPPED else 1)
                mine.grad, other.grad = sharded(gradient), sharded(gradient)
            grads = [each.grad for each in theirs if each.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack(norms_of(grads))).full_tensor()  # type: ignore[attr-defined]
            found: list[int] = []

            def look(arguments: Any, _: Any, found: list[int] = found) -> None:
                found.append(_has_dtensor(arguments))

            with watch_operators(look):
                result = update_within(Limits(1.0), update, ours, None)
            counts[-1].append(sum(found))
            assert len(found) > 3, "operators are seen"
            # Two orders of one sum: their last bit depends on the processor.
            assert torch.isclose(result.grad_norm, norm, rtol=1e-6, atol=0) or not norm.isfinite()
            reference.found_inf = result.skipped if result.skipped else None  # type: ignore[attr-defined]
            scale = None if result.skipped else (result.grad_norm + 1e-6).clamp(min=1.0)
            reference.grad_scale = scale  # type: ignore[attr-defined]
            reference.step()
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(local_part(mine.detach()), local_part(other.detach())), (step, of_matrices)
    print(json.dumps(counts))
    dist.destroy_process_group()


def _has_dtensor(arguments: object) -> bool:
    return any(isinstance(each, DTensor) for each in tree_leaves(arguments))


if __name__ == "__main__":
    main()
