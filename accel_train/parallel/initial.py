"""Initial weights of which each process makes only its part, with the numbers that torch draws for the whole model.

Inside `Recording.active`, a model runs all code that initializes it, but `torch.empty` takes no memory. Each weight
keeps the steps that make its values, and the generator's state before each step that draws. The generator jumps over
numbers that are not needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from accel_train.model.tensors import Cut, plain_tensors, tensors_in
from accel_train.parallel.mersenne import jumped
from accel_train.runtime.private import answer_operators, changes_first_argument, looks_like_cpu

ATEN = torch.ops.aten
DRAWS = (ATEN.uniform_.default, ATEN.normal_.default)
OVERWRITES = (*DRAWS, ATEN.zero_.default, ATEN.fill_.Scalar)
"""Operators after which a tensor does not depend on its values before."""
BLOCK = 16
"""Numbers that `normal_` makes together. It draws the last ones again if they are not a whole block."""
LEAST_JUMP = 2**20
"""Count of numbers from which a jump takes less time than drawing them."""
NUMEL = 7001
"""Size of the tensor that `draws_as_expected` draws: more than one block, and not a multiple of it."""


class Step(NamedTuple):
    """An operator that changes a tensor in place."""

    operator: Any
    layout: Any
    """Size, strides, and offset of the tensor in its storage."""
    arguments: Any
    """Arguments after the tensor."""
    state: Tensor | None
    """State of the generator before the step; None if it draws no numbers."""


class Drawn:
    """A tensor whose values are made when they are copied. `steps` make them, on the same storage as `like`."""

    def __init__(self, like: Tensor, steps: list[Step]) -> None:
        self.shape, self._dtype, self._steps, self._layout = like.shape, like.dtype, steps, _layout(like)
        self._stored = like.untyped_storage().nbytes() // like.element_size()
        self._has_parts = _is_plain(like) and all(
            step.layout == self._layout
            and (step.operator in OVERWRITES or torch.Tag.pointwise in step.operator.tags)
            and not list(tensors_in(step.arguments))
            for step in steps
        )
        """Whether each value can be made without the others, except those of its block."""

    @torch.no_grad()
    def copy_to(self, target: Tensor, cut: Cut | None = None) -> None:
        """Copy the tensor, or a part of it, into a tensor of the same shape on any device.

        Takes the memory of the part's rows, or of the whole tensor if a step changes only a part of it.
        """
        rows, *others = cut or [slice(0, size) for size in self.shape]
        begin, end, first, last = 0, self._stored, 0, self._stored
        if self._has_parts:
            width, count = self.shape[1:].numel(), self.shape.numel()
            begin, end = rows.start * width, rows.stop * width
            # The last block and the one before it are made together.
            first = max(0, min(begin, count - 2 * BLOCK)) // BLOCK * BLOCK
            last = count if end > count - 2 * BLOCK else -(-end // BLOCK) * BLOCK
        values = torch.empty(last - first, dtype=self._dtype)
        for operator, layout, arguments, state in self._steps:
            changed = values if self._has_parts else values.as_strided(*layout)
            if state is None:
                operator(changed, *arguments)
            else:
                generator = torch.Generator()
                generator.set_state(jumped(state, first))
                operator(changed, *arguments, generator=generator)
        if self._has_parts:
            made = values[begin - first : end - first].view(-1, *self.shape[1:])
        else:
            made = values.as_strided(*self._layout)[rows]
        target.copy_(made[(slice(None), *others)])


class Recording:
    """A build of a model whose `torch.empty` takes no memory."""

    def __init__(self) -> None:
        self._steps: dict[StorageWeakRef, list[Step]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the steps that make values inside the context.

        Operators raise a ValueError if their result needs the values of a tensor without memory.
        """
        with looks_like_cpu(self._holds), answer_operators(self._answer):
            yield

    def take_out(self, model: nn.Module) -> dict[str, Drawn]:
        """Return the values of the parameters on the meta device, by name.

        Raises:
            ValueError: a parameter never got values, or another tensor has no memory.
        """
        if any(each.is_meta for each in [*model.buffers(), *plain_tensors(model)]):
            raise ValueError("it makes buffers or other tensors with torch.empty")
        found = {}
        for name, each in model.named_parameters():
            if each.is_meta:
                if not (steps := self._steps.get(_storage(each))):
                    raise ValueError(f"nothing initializes {name}")
                found[name] = Drawn(each, steps)
        return found

    def _holds(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._steps

    def _answer(self, operator: Any, arguments: Any, named: Any) -> Any:
        if operator is ATEN.empty.memory_format and torch.device(named.get("device") or "cpu").type == "cpu":
            made = operator(*arguments, **{**named, "device": "meta"})
            self._steps[_storage(made)] = []
            return made
        held = list(filter(self._holds, tensors_in([arguments, named])))
        if not held:
            return operator(*arguments, **named)
        target, overwrites = arguments[0], operator in OVERWRITES
        is_step = overwrites or operator is ATEN.copy_.default or torch.Tag.pointwise in operator.tags
        if len(held) == 1 and held[0] is target and not named:
            if not changes_first_argument(operator):
                views = operator(*arguments)
                if (tensors := list(tensors_in([views]))) and all(map(self._holds, tensors)):
                    return views
            elif is_step:
                steps, state = self._steps[_storage(target)], torch.get_rng_state() if operator in DRAWS else None
                if overwrites and target.is_contiguous() and target.nbytes == target.untyped_storage().nbytes():
                    steps.clear()
                if state is not None:
                    _draw(operator, target, arguments[1:], state)
                steps.append(Step(operator, _layout(target), tree_map_only(Tensor, torch.clone, arguments[1:]), state))
                return target
        raise ValueError(f"{operator} needs the values of weights")


def _draw(operator: Any, like: Tensor, arguments: Any, state: Tensor) -> None:
    """Move torch's generator as far as if the operator had drawn a tensor in memory."""
    if _is_plain(like) and like.numel() >= LEAST_JUMP:
        torch.set_rng_state(jumped(state, _draws_of(operator, like.numel())))
    else:
        operator(torch.empty_like(like, device="cpu"), *arguments)


@cache
def draws_as_expected() -> bool:
    """Return whether this build of torch draws numbers in the order on which `Drawn` and jumps depend."""
    for operator in DRAWS:
        values, generator = torch.empty(NUMEL), torch.Generator()
        state = jumped(generator.get_state(), _draws_of(operator, NUMEL))
        for _ in range(2):
            operator(values, generator=generator)
        part = torch.empty(NUMEL - 99)
        Drawn(values, [Step(operator, _layout(values), (), state)]).copy_to(part, [slice(99, NUMEL)])
        if not torch.equal(part, values[99:]):
            return False
    return True


def _draws_of(operator: Any, numel: int) -> int:
    """Return the count of 32-bit numbers that an operator draws for this count of values, at least `BLOCK`."""
    return numel + BLOCK * (operator is DRAWS[1] and numel % BLOCK > 0)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether values are drawn from one number each, in the order of the elements."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
