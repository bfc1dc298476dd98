"""Muon over matrices that FSDP2 shards, beside Muon over whole ones with the same gradients: `sharded_muon.py COPIES`.

Some matrices have rows that the processes do not divide, one has fewer rows than there are processes. The third step
has a NaN,
and is skipped. Prints, a line of JSON: the shapes of the stacks that this process made orthogonal in a step.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from accel_train.checkpoint.contents import optimizer_tensors
from accel_train.model.tensors import local_part
from accel_train.optim import muon
from accel_train.optim.optimizers import name_parameters

SHAPES = ((12, 8), (8, 12), (5, 9), (9, 5), (1, 6), (8, 8), (7, 16))
STEPS, SKIPPED = 5, 2


class Matrices(nn.Module):
    """Weights, and a step of Muon over them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def make_optimizer(self) -> None:
        group = {"params": list(self.weights), "is_matrix": True, "weight_decay": 0.1}
        self.optimizer = muon.Muon([group], lr=0.1, momentum=0.9)
        name_parameters(self.optimizer, self)

    def step(self, gradients: list[Tensor], *, skip: bool) -> None:
        for weight, whole in zip(self.weights, gradients, strict=True):
            gradient = whole.clone()
            if isinstance(weight, DTensor):
                gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements)
            weight.grad = gradient
        self.optimizer.found_inf = torch.tensor(float(skip))
        self.optimizer.step()

    def bytes(self) -> dict[str, bytes]:
        """What this process holds of weights and momentum."""
        held = {**dict(self.named_parameters()), **optimizer_tensors(self.optimizer)}
        assert len(held) == 2 * len(SHAPES)
        return {name: local_part(tensor.detach()).numpy().tobytes() for name, tensor in held.items()}


def main() -> None:
    copies, made = int(sys.argv[1]), []
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    sizes, names = ((size,), ("shard",)) if copies == 1 else ((copies, size // copies), ("replicate", "shard"))
    whole, sharded = Matrices(), Matrices()
    fully_shard(sharded, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    for each in (whole, sharded):
        each.make_optimizer()

    def counted(stack: Tensor) -> Tensor:
        made.append(tuple(stack.shape))
        return muon.orthogonalise(stack)

    generator = torch.Generator().manual_seed(2)
    for number in range(STEPS):
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        skip = number == SKIPPED
        if skip:
            gradients[0][-1, 0] = torch.nan  # of the last process's part
            before = sharded.bytes()
        else:
            whole.step(gradients, skip=False)
        sharded.optimizer.orthogonalise, made = counted, []
        sharded.step(gradients, skip=skip)
        if skip:
            assert sharded.bytes() == before, "a skipped step changed a byte"
    for ours, theirs in zip(sharded.weights, whole.weights, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-6)
    print(json.dumps(made))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
