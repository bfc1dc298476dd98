"""The collectives that FSDP2 holds in a step, counted: so a process that had to begin its step again can take up where the others are."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class CountedCollectives:
    """Every gather of weights and every reduction of gradients of a model that is spread over processes, in their order.

    The order is the same in each step and on each process: forward, then backward, block after block. So a process whose step
    broke off can do all of it again, with as little of its batch as it likes, and leave out as many collectives as it has
    taken part in. The others never notice; they wait for the next one, and it comes.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._blocks = [each for each in root.modules() if isinstance(each, FSDPModule)]
        self._num_held = self._num_left_out = 0
        self._num_reduced: Counter[FSDPModule] = Counter()
        self.sums: list[torch.Tensor] = []
        """Of what this process has handed in to each reduction, 0-dim on the device."""
        for block in self._blocks:
            groups: Any = block._get_fsdp_state()._fsdp_param_groups
            for group in groups:
                group._all_gather_comm = _Counted(group._all_gather_comm, self.gather)
                group._reduce_scatter_comm = _Counted(group._reduce_scatter_comm, partial(self.reduce, block))

    def begin(self) -> None:
        """A step begins."""
        self._num_held = self._num_left_out = 0
        self._num_reduced.clear()
        self.sums = []

    def sum_here(self) -> torch.Tensor | None:
        """Of this process's own gradients in this step: finite where all of them were, before they were summed over processes."""
        return torch.stack([each.float() for each in self.sums]).sum() if self.sums else None

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """After a step that broke off: inside, the same forwards and backwards are done from their beginning, and the collectives
        that were held before are left out. What those would have brought is 0 for weights, and NaN for gradients."""
        root: Any = self._root
        root.reset_iter_state()
        self._num_left_out, self._num_held = self._num_held, 0
        # Of several copies of the model (HSDP), the sum over the copies follows at once, and was held as well.
        for block in self._num_reduced:
            block.set_requires_all_reduce(False, recurse=False)
        try:
            yield
        finally:
            for block in self._blocks:
                block.set_requires_all_reduce(True, recurse=False)
            root.reset_iter_state()
            self.begin()

    def gather(self, collective: Any, output: torch.Tensor, **how: Any) -> Any:
        """Gather the weights of a block."""
        if self._was_held():
            output.zero_()
            return None
        work = collective(output_tensor=output, **how)
        self._num_held += 1
        return work

    def reduce(self, block: FSDPModule, collective: Any, output: torch.Tensor, **how: Any) -> Any:
        """Reduce the gradients of a block."""
        if self._was_held():
            output.fill_(math.nan)
            self._num_reduced[block] -= 1
            if not self._num_reduced[block]:
                block.set_requires_all_reduce(True, recurse=False)  # from its next micro-batch on
            return None
        self.sums.append(how["input_tensor"].sum())
        work = collective(output_tensor=output, **how)
        self._num_held += 1
        self._num_reduced[block] += 1
        return work

    def _was_held(self) -> bool:
        if self._num_left_out == 0:
            return False
        self._num_left_out -= 1
        return True


def count_collectives(root: nn.Module, *, num_sharing: int) -> CountedCollectives | None:
    """Those of this model; None where FSDP2 does not hold them all (`num_sharing` processes split each layer, or it is whole),
    or where this torch cannot begin a step again that broke off (it can since 2.13)."""
    if num_sharing > 1 or not isinstance(root, FSDPModule) or not hasattr(root, "reset_iter_state"):
        return None
    return CountedCollectives(root)


class _Counted:
    """As torch's own, which FSDPModule lets one replace (`set_custom_all_gather`, `set_custom_reduce_scatter`)."""

    def __init__(self, inner: Any, call: Callable[..., Any]) -> None:
        self._inner, self._call = inner, call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what goes in or comes out."""
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, **how: Any) -> Any:
        """Take part."""
        return self._call(self._inner, output_tensor, **how)
