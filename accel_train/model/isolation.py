"""Run a forward without side effects: restore random generators, buffers, and extra state afterwards."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from accel_train.model.batch_norm import trained_batch_norms
from accel_train.model.tensors import is_writable, load_extra_state, packed, split_state


class RandomState:
    """State of torch's random generators on the host and on this process's device."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.get_rng_state()
        self.on_device: Any = None
        # A process computes on its current device, and MPS has one.
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None:
            self.on_device = self._module.get_rng_state()

    def put_back(self) -> None:
        """Restore the saved state of the generators."""
        torch.set_rng_state(self.host)
        if self._module is not None:
            self._module.set_rng_state(self.on_device)


class Buffers:
    """Copy of a module's buffers, extra state, and plain numbers, to restore after a forward."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [
            (part, name, buffer, buffer.clone())
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
            if is_writable(buffer)
        ]
        self._numbers = [
            (part, {name: value for name, value in vars(part).items() if type(value) in (bool, int, float)})
            for part in module.modules()
        ]
        self._module = module
        self._extra = {name: each.clone() for name, each in packed(split_state(module)[1]).items()}

    def put_back(self) -> None:
        """Restore the buffers, both the tensor objects and their contents, extra state, and numbers."""
        for part, numbers in self._numbers:
            vars(part).update(numbers)
        with torch.no_grad():
            for part, name, buffer, content in self._kept:
                buffer.copy_(content)
                setattr(part, name, buffer)
        load_extra_state(self._module, self._extra)


@contextmanager
def isolated(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the module's buffers and all random generators (torch, Python, NumPy) when the context exits."""
    buffers, states = Buffers(module), (RandomState(device), random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        buffers.put_back()
        states[0].put_back()
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def without_batch_statistics(module: nn.Module) -> Iterator[None]:
    """Make batch norms normalize by their running statistics inside the context, so rows do not affect each other.

    Running statistics that are not finite become 0 and 1. The caller must restore the buffers.
    """
    norms: list[Any] = trained_batch_norms(module)
    for norm in norms:
        norm.training = False
        if norm.running_mean is not None and norm.running_var is not None:
            norm.running_mean.nan_to_num_(0, 0, 0)
            norm.running_var.nan_to_num_(1, 1, 1)
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
