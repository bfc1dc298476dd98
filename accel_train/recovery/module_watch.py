"""Watching every module of a model during one forward and backward: what is the first to turn numbers into NaN or Inf."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle


@dataclass
class Call:
    """One call of a module."""

    name: str
    """As parameters are named: `transformer.h.3.mlp`; empty for the model itself."""
    kind: str
    """Its class."""
    inputs_finite: bool
    largest: float = 0.0
    """Of its outputs, by absolute value; NaN where one is NaN."""
    output_gradients_finite: bool = True
    input_gradients_finite: bool = True

    @property
    def output_finite(self) -> bool:
        """Whether every number it returned is finite."""
        return math.isfinite(self.largest)


class ModuleWatch:
    """Hooks on all modules while it is open: `with ModuleWatch(model) as watch: loss = ...; watch.forward_is_over(); ...`.

    Every number is looked at as it is made, which waits for the device each time: this is for a step that went wrong.

    Args:
        model: whose modules are watched.
        on_not_finite: called at the first module with finite inputs and an output that is not: (name, module, inputs by
            position, inputs by name, output).
    """

    def __init__(
        self, model: nn.Module, on_not_finite: Callable[[str, nn.Module, Any, Any, Any], None] | None = None
    ) -> None:
        self._model, self._on_not_finite = model, on_not_finite
        self.calls: list[Call] = []
        """In the order in which they returned: what a module calls comes before it."""
        self.first_in_backward: Call | None = None
        """The first call, on the way back, with finite gradients at its outputs and others at an input: the deepest of them."""
        self._running: list[Call] = []
        self._handles: list[RemovableHandle] = []
        self._records = True

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._after, name), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward_is_over(self) -> None:
        """What is called from now on (gradient checkpointing computes blocks again) is no news."""
        self._records = False

    def first_not_finite(self, innocent: Collection[str] = ()) -> Call | None:
        """The first call that made what is not finite out of what is; the deepest, since it returns first.

        `innocent` modules always return such numbers (a mask of -Inf, say), also where all is well.
        """
        for call in self.calls:
            if call.inputs_finite and not call.output_finite and call.name not in innocent:
                return call
        return None

    def not_finite(self) -> set[str]:
        """The modules that returned something not finite."""
        return {call.name for call in self.calls if not call.output_finite}

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = Call(name, class_name(module), inputs_finite=not _has_nan_or_inf((args, kwargs)))
        if self._records:
            self._running.append(call)
        aliases: dict[int, Tensor] = {}

        def alias(value: Any) -> Any:
            """The same numbers under a name of this call's own, so that their gradient is what comes from this call alone."""
            if not (isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()):
                return value
            if id(value) not in aliases:
                aliases[id(value)] = own = value.view_as(value)
                own.register_hook(partial(self._input_gradient, call))
            return aliases[id(value)]

        return tree_map(alias, args), tree_map(alias, kwargs)

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._records:
            return
        call = self._running.pop()
        assert call.name == name, (call.name, name)
        call.largest = _largest(output)
        is_first = call.inputs_finite and not call.output_finite and self.first_not_finite() is None
        self.calls.append(call)
        for tensor in _floats(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._output_gradient, call))
        if is_first and self._on_not_finite is not None:
            self._on_not_finite(name, module, args, kwargs, output)

    def _output_gradient(self, call: Call, gradient: Tensor) -> None:
        call.output_gradients_finite &= math.isfinite(_largest(gradient))

    def _input_gradient(self, call: Call, gradient: Tensor) -> None:
        call.input_gradients_finite &= math.isfinite(_largest(gradient))
        if self.first_in_backward is None and call.output_gradients_finite and not call.input_gradients_finite:
            self.first_in_backward = call


def class_name(module: nn.Module) -> str:
    """Of a module, as it was written: FSDP2 puts a class of its own in front."""
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _floats(tree: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.numel() and (leaf.is_floating_point() or leaf.is_complex())
    ]


def _largest(tree: Any) -> float:
    """The largest absolute value of all tensors; NaN where there is one, 0 where there are no floating-point numbers."""
    norms = [float(torch.linalg.vector_norm(tensor.detach(), math.inf)) for tensor in _floats(tree)]
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)


def _has_nan_or_inf(tree: Any) -> bool:
    """Whether there is a NaN or +Inf: a mask may hold -Inf."""
    largest = [float(tensor.detach().max()) for tensor in _floats(tree) if not tensor.is_complex()]
    return any(math.isnan(value) or value == math.inf for value in largest)
