"""Processes that each hold a part of a model (FSDP2), computing again together: each its own samples, and all at the same time.

Each forward and backward of such a model is full of collectives. So a process that looks for a bad sample computes in turns
that all take part in: who wants none any more computes something small of its own, until nobody wants one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accel_train.counted_collectives import CountedCollectives
from accel_train.memory import is_out_of_memory
from accel_train.sharding import reshard

T = TypeVar("T")


class OutOfStep(RuntimeError):
    """A process has failed where it cannot take part in what the others wait for: the job has to end."""


class TurnFailed(Exception):
    """This process cannot go on with what it was looking for; it still has to `serve` the others."""


class Lockstep:
    """Takes turns with the other processes while it is open, on all of them at once; no trace of it is left in the module.

    Gradients that wait for an update are put aside and back, and those of a turn are never whole: the norm of each is noted
    as it comes, before it is reduced, and what was reduced is thrown away.

    Args:
        inner: the training module, as FSDP2 wrapped it.
        device: of this process.
        collectives: those of the module; None where this version of torch cannot begin a pass again that broke off.
    """

    def __init__(self, inner: nn.Module, device: torch.device, collectives: CountedCollectives | None) -> None:
        self._inner, self._device, self._collectives = inner, device, collectives
        self.pieces: Sequence[Callable[[], object]] = ()
        """What this process computes for the sake of the others, the one that takes the least memory first."""
        self._handles: list[Any] = []
        self._waiting: list[tuple[nn.Parameter, Tensor | None]] = []
        self._gathered: dict[int, nn.Parameter] = {}
        self._norms: dict[str, Tensor] = {}
        self._sums: list[Tensor] = []
        self._is_over = False

    def __enter__(self) -> Self:
        reshard(self._inner)
        if self._collectives is not None:
            self._sums = self._collectives.sums
        self._waiting = [(parameter, parameter.grad) for parameter in self._inner.parameters()]
        self._throw_away()
        for name, module in self._inner.named_modules():
            if issubclass(type(module), FSDPModule):
                watch = partial(self._watch_gathered, f"{name}.".lstrip("."))
                self._handles.append(module.register_forward_pre_hook(watch))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        reshard(self._inner)
        self._throw_away()
        for parameter, gradient in self._waiting:
            parameter.grad = gradient
        if self._collectives is not None:
            self._collectives.begin()
            self._collectives.sums = self._sums

    def take_turn(self, attempt: Callable[[], T]) -> T:
        """Compute, while the others do.

        Raises:
            TurnFailed: this process has failed, or another one cannot take part any more.
            OutOfStep: it has failed with what it computes for the others as well.
        """
        if not self._meet(wants=True):
            raise TurnFailed("another process could not compute any more")
        return self._pass(attempt)

    def serve(self) -> str | None:
        """Take part in the turns of the others until nobody wants one: with the first of `pieces` that does not fail.

        Returns what was wrong where all of them have failed, which ends it for everybody.
        """
        left, said = list(self.pieces), None
        while self._meet(wants=False, is_able=bool(left)):
            try:
                self._pass(left[0])
            except TurnFailed as error:
                said = str(error)
                del left[0]
        return None if left else said

    def gradient_norms(self, loss: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """The backward pass; the norms (0-dim, fp32) of the gradients of this process alone, by parameter as FSDP2's root names it."""
        self._norms = {}
        loss.backward(weight)
        return self._norms

    def _meet(self, *, wants: bool, is_able: bool = True) -> bool:
        """Whether there is another turn: somebody wants one, and all can take part."""
        if self._is_over:
            return False
        told = torch.tensor([wants, not is_able], dtype=torch.float32, device=self._device)
        dist.all_reduce(told)
        num_wanting, num_unable = told.tolist()
        self._is_over = num_wanting == 0 or num_unable > 0
        return not self._is_over

    def _pass(self, attempt: Callable[[], T]) -> T:
        """The others do not notice where it fails here: they get this process's weights and, for gradients, what nobody uses."""
        if self._collectives is not None:
            self._collectives.begin()
        try:
            result = attempt()
            self._throw_away()
            return result
        except Exception as error:
            said, piece = describe_error(error), self.pieces[0 if is_out_of_memory(error) else -1]
        self._keep_up(piece, said)  # by now the error is gone, and with it the tensors of its frames
        self._throw_away()
        raise TurnFailed(said)

    def _keep_up(self, piece: Callable[[], object], said: str) -> None:
        """After a pass that broke off: take part in what is left of it."""
        out_of_step = f"looking into a bad step has failed where the other processes cannot go on: {said}"
        if self._collectives is None:
            raise OutOfStep(out_of_step)
        self._throw_away()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            with self._collectives.resumed():
                piece()
        except Exception as error:
            raise OutOfStep(f"{out_of_step}; then {describe_error(error)}") from error

    def _throw_away(self) -> None:
        for parameter, _ in self._waiting:
            parameter.grad = None

    def _watch_gathered(self, prefix: str, module: nn.Module, args: Any) -> None:
        """Called when a block has its whole weights, which FSDP2 keeps under other objects than the parts of them."""
        parts = {id(parameter) for parameter, _ in self._waiting}
        for name, parameter in module.named_parameters():
            if id(parameter) in parts or id(parameter) in self._gathered or not parameter.requires_grad:
                continue
            self._gathered[id(parameter)] = parameter
            note = partial(self._note_norm, f"{prefix}{name}")
            self._handles.append(parameter.register_post_accumulate_grad_hook(note))

    def _note_norm(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._norms[name] = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float32)


def describe_error(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
