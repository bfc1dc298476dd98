"""Watch every module of a model during one forward and backward, and find the first that produces NaN or Inf."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accel_train.model.tensors import tensors_in

OnNotFinite = Callable[[str, nn.Module, Any, Any, Any], None]
"""Callback that takes a module's name, the module, its positional inputs, its keyword inputs, and its output."""


@dataclass
class Call:
    """One call of a module."""

    name: str  # prefix of its parameters' names: `transformer.h.3.mlp`; empty for the model itself
    kind: str  # its class
    inputs_finite: bool
    largest: float = 0.0  # largest absolute value of its outputs; NaN if any is NaN
    output_gradients_finite: bool = True

    @property
    def output_finite(self) -> bool:
        """Return whether every number in the output is finite."""
        return math.isfinite(self.largest)


class ModuleWatch:
    """Hooks on all modules of a model, active while it is open.

    Usage: `with ModuleWatch(model) as watch: loss = ...; watch.forward_is_over(); ...`. It waits for the device at each
    module, so use it only for failed steps.

    Args:
        model: model whose modules are watched.
        on_not_finite: called at the first module with finite inputs and an output that is not finite.
    """

    def __init__(self, model: nn.Module, on_not_finite: OnNotFinite | None = None) -> None:
        self._model, self._on_not_finite = model, on_not_finite
        self.calls: list[Call] = []
        """Calls in the order in which they returned. Inner modules come before the modules that call them."""
        self.first_in_backward: Call | None = None
        """First call in the backward with finite output gradients and an input gradient that is not finite.

        It is the deepest such call.
        """
        self._running: list[Call] = []
        self._handles: list[RemovableHandle] = []
        self._records = True

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                module.register_forward_hook(partial(self._after, name), with_kwargs=True),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward_is_over(self) -> None:
        """Stop recording calls. Gradient checkpointing recomputes blocks in the backward."""
        self._records = False

    def first_not_finite(self, ignored: Collection[str] = ()) -> Call | None:
        """Return the first call with finite inputs and an output that is not finite.

        It is the deepest such call, because the deepest call returns first.

        Args:
            ignored: names of modules that always return such numbers, such as a mask of -Inf.
        """
        calls = (call for call in self.calls if call.inputs_finite and not call.output_finite)
        return next((call for call in calls if call.name not in ignored), None)

    def not_finite(self) -> set[str]:
        """Return the modules with an output that is not finite."""
        return {call.name for call in self.calls if not call.output_finite}

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = Call(name, type(module).__name__, inputs_finite=not _has_nan_or_inf((args, kwargs)))
        if self._records:
            self._running.append(call)
        aliases: dict[int, Tensor] = {}

        def alias(value: Tensor) -> Tensor:
            """Return a view used by this call only, so that its gradient comes from this call only."""
            if not (value.requires_grad and value.is_floating_point()):
                return value
            if id(value) not in aliases:
                aliases[id(value)] = view = value.view_as(value)
                view.register_hook(partial(self._input_gradient, call))
            return aliases[id(value)]

        return recursively_apply(alias, args), recursively_apply(alias, kwargs)

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
        is_first = self.first_in_backward is None and call.output_gradients_finite
        if is_first and not math.isfinite(_largest(gradient)):
            self.first_in_backward = call


def _floats(tree: Any) -> list[Tensor]:
    return [each for each in tensors_in(tree) if each.numel() and (each.is_floating_point() or each.is_complex())]


def _largest(tree: Any) -> float:
    """Return the largest absolute value of all floating-point numbers; NaN if any is NaN, 0 if the tree has none."""
    norms = [float(torch.linalg.vector_norm(tensor.detach(), math.inf)) for tensor in _floats(tree)]
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)


def _has_nan_or_inf(tree: Any) -> bool:
    """Return whether the tree contains NaN or +Inf. A mask may contain -Inf."""
    largest = [float(tensor.detach().max()) for tensor in _floats(tree) if not tensor.is_complex()]
    return any(math.isnan(value) or value == math.inf for value in largest)
