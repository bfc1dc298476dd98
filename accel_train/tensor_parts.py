"""A tensor that is spread over processes (a DTensor), and the part of it that this process holds."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_spread(module: nn.Module) -> bool:
    """Whether this process holds parts of a module's weights, and not the whole of them."""
    return any(isinstance(parameter, DTensor) for parameter in module.state_dict().values())


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory; all of it where it is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor) -> Tensor:
    """The tensor that is spread as `whole` is, and of which this process holds `part`."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on every process; all processes call it at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
