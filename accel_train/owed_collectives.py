"""What a process owes the others when its step broke off: the collectives that are left of it, handed in as NaN or made good.

The others wait for them: in the next layer, in the next exchange of slices, in the next reduction of gradients. Which ones
there are, a dry run tells, whatever the strategy. How many of them were held, the process groups know: so a step that goes well
pays nothing for it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

NAMES_OF_GROUPS = ("process_group", "group_name")
"""What torch's collectives call the argument that says who takes part."""


def can_begin_again() -> bool:
    """Whether this torch does a step again that broke off: since 2.13."""
    return hasattr(FSDPModule, "reset_iter_state")


@dataclass(frozen=True)
class Buffer:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def filled(self, value: float) -> Tensor:
        """Such a tensor, of this value; of 0 where there are only integers."""
        given = value if self.dtype.is_floating_point else 0
        return torch.full(self.shape, given, dtype=self.dtype, device=self.device)


def _buffer_like(tensor: Tensor) -> Buffer:
    return Buffer(tuple(tensor.shape), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Collective:
    """One collective, as a dry run came to it."""

    operation: OpOverload
    arguments: tuple[Any, ...]
    """Of the operation, with a `Buffer` in the place of each tensor."""
    group: str

    def hand_in_nan(self) -> None:
        """Hold it with the others."""
        result = self.operation(*tree_map_only(Buffer, lambda each: each.filled(math.nan), self.arguments))
        if self.operation.namespace == "c10d":
            dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
        else:
            tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, result)


def num_held() -> Counter[str]:
    """In how many collectives of each process group this process has taken part so far, by the group's name."""
    groups: Any = _world.pg_map
    return Counter({group.group_name: group._get_sequence_number_for_group() for group in groups})


def hand_in_nan(collectives: Sequence[Collective], held: Counter[str]) -> None:
    """Take part in those of a step that are left: all but as many of each group as were `held` before it broke off.

    Raises:
        RuntimeError: more were held than there are.
    """
    groups = Counter(each.group for each in collectives)
    if any(held[group] > count for group, count in groups.items()):
        raise RuntimeError(f"the step that broke off has held {held} collectives, and all of it are {groups}")
    for each in _left_of(collectives, held):
        each.hand_in_nan()


def _left_of(collectives: Sequence[Collective], held: Counter[str]) -> Iterator[Collective]:
    left_out = Counter(held)
    for each in collectives:
        if left_out[each.group]:
            left_out[each.group] -= 1
        else:
            yield each


def collectives_of(compute: Callable[[int], object], num_rows: int) -> list[Collective]:
    """Those of a computation over so many rows, in their order.

    It is called with 1 row and with 2: activations grow with them, weights and gradients do not. Inside, nobody is waited
    for, what a collective would bring is anything, and activations are not kept.

    Raises:
        RuntimeError: with 2 rows there are others than with 1.
    """
    found = []
    for rows in (1, 2) if num_rows > 1 else (1,):
        with DryRun() as dry_run, saved_tensors_hooks(_forget, _recall):
            compute(rows)
        found.append(dry_run.collectives)
    one, two = found[0], found[-1]
    if [(each.operation, each.group) for each in one] != [(each.operation, each.group) for each in two]:
        raise RuntimeError(f"a step holds other collectives with 2 rows ({len(two)}) than with 1 ({len(one)})")
    return [_with_rows(*pair, num_rows) for pair in zip(one, two, strict=True)]


def _with_rows(one: Collective, two: Collective, num_rows: int) -> Collective:
    def grown(with_one: Any, with_two: Any) -> Any:
        if isinstance(with_one, Buffer):
            sizes = zip(with_one.shape, with_two.shape, strict=True)
            return Buffer(tuple(grown(*each) for each in sizes), with_one.dtype, with_one.device)
        return with_one + (with_two - with_one) * (num_rows - 1) if type(with_one) is int else with_one

    return Collective(one.operation, tree_map(grown, one.arguments, two.arguments), one.group)


class DryRun(TorchDispatchMode):
    """Inside, forward and backward note the collectives that they come to, and hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for each operation on tensors, in autograd's threads as well."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it takes itself apart, and comes back with the collectives that it consists of
        group = _group_of(func, args) if isinstance(func, OpOverload) else None
        if group is not None:
            return self._hold(func, args, group)
        in_python = OPDEFS.get(func._schema.name) if isinstance(func, OpOverload) else None
        if in_python is None:
            return func(*args, **(kwargs or {}))
        with self:  # of `torch.library.custom_op`: what it does may be a collective
            return in_python._init_fn(*args, **(kwargs or {}))

    def _hold(self, operation: OpOverload, args: tuple[Any, ...], group: str) -> Any:
        self.collectives.append(Collective(operation, tree_map_only(Tensor, _buffer_like, args), group))
        return _as_if_held(operation, args)


class TakenUpAgain(DryRun):
    """Inside, forward and backward leave out as many collectives of each group as were `held` before they broke off, and hold the rest.

    So a process that begins again, with as little of its batch as it likes, comes to where the others wait for it: they get its
    true weights, and what it computes of what was left out is anything.
    """

    def __init__(self, held: Counter[str]) -> None:
        super().__init__()
        self._left_out = Counter(held)

    def _hold(self, operation: OpOverload, args: tuple[Any, ...], group: str) -> Any:
        if not self._left_out[group]:
            return operation(*args)
        self._left_out[group] -= 1
        return _as_if_held(operation, args)


def _group_of(operation: OpOverload, args: tuple[Any, ...]) -> str | None:
    """The name of the group that takes part; None for what is no collective."""
    if operation.namespace not in ("c10d", "_c10d_functional"):
        return None
    named = zip(operation._schema.arguments, args, strict=False)
    for given in (value for argument, value in named if argument.name in NAMES_OF_GROUPS):
        return given if isinstance(given, str) else str(dist.ProcessGroup.unbox(given).group_name)
    return None


def _as_if_held(operation: OpOverload, args: tuple[Any, ...]) -> Any:
    """What a collective gives back, without the others: what was there in its outputs, or 0."""
    if operation.namespace == "c10d":
        outputs = args[0]
        work = _create_work_from_future(_done(outputs if isinstance(outputs, list) else [outputs])).boxed()
        return work if len(operation._schema.returns) == 1 else (outputs, work)
    if operation._schema.is_mutable:
        return args[0]
    device = next(each.device for each in tree_leaves(args) if isinstance(each, Tensor))
    shapes = operation(*tree_map_only(Tensor, lambda each: each.to("meta"), args))
    return tree_map_only(Tensor, lambda each: torch.zeros_like(each, device=device), shapes)


def _done(outputs: list[Any]) -> "torch.futures.Future[list[Any]]":
    devices = {each.device for each in tree_leaves(outputs) if each.device.type != "cpu"}
    done: torch.futures.Future[list[Any]] = torch.futures.Future(devices=list(devices))
    done.set_result(outputs)
    return done


def _forget(saved: Tensor) -> Any:
    """What is kept of a tensor that autograd saves: of activations their size, for a dry run has to fit where a step did not."""
    if isinstance(saved, DTensor):
        return _forget(saved._local_tensor), saved._spec
    return _buffer_like(saved) if type(saved) is Tensor and saved.is_floating_point() else saved


def _recall(kept: Any) -> Tensor:
    if isinstance(kept, tuple):
        return DTensor(_recall(kept[0]), kept[1], requires_grad=False)
    return kept.filled(0.0) if isinstance(kept, Buffer) else kept
