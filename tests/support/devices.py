"""Tensors on the host that say they are on a GPU, so code that a GPU decides runs with numbers on any machine."""

import torch
from torch import Tensor


class OnGpu(Tensor):
    """A CPU tensor whose `device` is `cuda:0`."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_gpu(value: float) -> Tensor:
    """Return a 0-dim fp32 tensor that says it is on a GPU."""
    return torch.tensor(value).as_subclass(OnGpu)
