"""Processes that each hold a part of a model, computing again together: each its own samples, and all at the same time.

Each forward and backward of such a model is full of collectives. So a process that looks for a bad sample computes in turns
that all take part in: who wants none any more computes something small of its own, until nobody wants one.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accel_train.memory import is_out_of_memory
from accel_train.owed_collectives import TakenUpAgain, can_begin_again, num_held
from accel_train.reduction import ShardedReduction
from accel_train.sharding import forget_broken_pass, reshard
from accel_train.step import TrainingModule
from accel_train.tensor_parts import local_part
from accel_train.zero import Zero

T = TypeVar("T")


class OutOfStep(RuntimeError):
    """A process has failed where it cannot take part in what the others wait for: the job has to end."""


class TurnFailed(Exception):
    """This process cannot go on with what it was looking for; it still has to `serve` the others."""


class Lockstep(ABC):
    """Takes turns with the other processes while it is open, on all of them at once; no trace of it is left in the module.

    Gradients that wait for an update stay as they are, and those of a turn are never whole: the norm of each is noted as it
    comes, before it is reduced, and it is thrown away.
    """

    def __init__(self, inner: TrainingModule, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.pieces: Sequence[Callable[[], object]] = ()
        """What this process computes for the sake of the others, the one that takes the least memory first."""
        self._handles: list[Any] = []
        self._norms: dict[str, Tensor] = {}
        self._is_over = False

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._end()

    @abstractmethod
    def gradient_norms(self, loss: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """The backward pass; the norms (0-dim, fp32) of the gradients of this process alone, by parameter as the training module names it."""

    @abstractmethod
    def local_parts(self) -> dict[str, Tensor]:
        """What this process holds of the model's weights, by name: the same names on all."""

    @abstractmethod
    def _begin(self) -> None:
        """Put aside what waits, and watch."""

    @abstractmethod
    def _end(self) -> None:
        """Put back what waits; whoever watches is gone."""

    @abstractmethod
    def _forget_pass(self) -> None:
        """Let another pass begin, whatever became of the one before."""

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
        held_before = num_held()
        try:
            result = attempt()
            self._forget_pass()
            return result
        except Exception as error:
            said, piece = describe_error(error), self.pieces[0 if is_out_of_memory(error) else -1]
        # By now the error is gone, and with it the tensors of its frames.
        self._keep_up(piece, said, num_held() - held_before)
        raise TurnFailed(said)

    def _keep_up(self, piece: Callable[[], object], said: str, held: Counter[str]) -> None:
        """After a pass that broke off: take part in what is left of it."""
        out_of_step = f"looking into a bad step has failed where the other processes cannot go on: {said}"
        if not can_begin_again():
            raise OutOfStep(out_of_step)
        self._forget_pass()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            with TakenUpAgain(held):
                piece()
            self._forget_pass()
        except Exception as error:
            raise OutOfStep(f"{out_of_step}; then {describe_error(error)}") from error

    def _note_norm(self, name: str, gradient: Tensor) -> None:
        self._norms[name] = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)


class ShardedLockstep(Lockstep):
    """Of a model that FSDP2 has spread; `reduction` notes what is handed in of a step."""

    def __init__(self, inner: TrainingModule, device: torch.device, reduction: ShardedReduction | None) -> None:
        super().__init__(inner, device)
        self._reduction = reduction
        self._waiting: list[tuple[nn.Parameter, Tensor | None]] = []
        self._gathered: dict[int, nn.Parameter] = {}
        self._sums: list[Tensor] = []

    def gradient_norms(self, loss: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """As above, block by block, while FSDP2 reduces the gradients."""
        self._norms = {}
        loss.backward(weight)
        return self._norms

    def local_parts(self) -> dict[str, Tensor]:
        """As above."""
        return {name: local_part(each.detach()) for name, each in self._inner.model.named_parameters() if each.numel()}

    def _begin(self) -> None:
        reshard(self._inner)
        if self._reduction is not None:
            self._sums = self._reduction.sums
        self._waiting = [(parameter, parameter.grad) for parameter in self._inner.parameters()]
        self._throw_away()
        for name, module in self._inner.named_modules():
            if issubclass(type(module), FSDPModule):
                watch = partial(self._watch_gathered, f"{name}.".lstrip("."))
                self._handles.append(module.register_forward_pre_hook(watch))

    def _end(self) -> None:
        reshard(self._inner)
        for parameter, gradient in self._waiting:
            parameter.grad = gradient
        if self._reduction is not None:
            self._reduction.sums = self._sums

    def _forget_pass(self) -> None:
        self._throw_away()
        if self._reduction is not None:
            self._reduction.begin()
        root: Any = self._inner
        forget_broken_pass(root)

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
            note = partial(self._note_gradient_of, f"{prefix}{name}")
            self._handles.append(parameter.register_post_accumulate_grad_hook(note))

    def _note_gradient_of(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._note_norm(name, parameter.grad)


class ZeroLockstep(Lockstep):
    """Of a model whose weights DeepSpeed has spread (stage 3). It is not told of the backward pass, and reduces nothing."""

    def __init__(self, inner: TrainingModule, device: torch.device, zero: Zero) -> None:
        super().__init__(inner, device)
        self._zero = zero

    def gradient_norms(self, loss: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """As above; what is handed on in the place of a gradient takes no memory."""
        self._norms = {}
        parameters = {name: each for name, each in self._inner.named_parameters() if each.requires_grad}
        hooks = [each.register_hook(partial(self._note, name)) for name, each in parameters.items()]
        try:
            torch.autograd.grad(loss, list(parameters.values()), weight, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        return self._norms

    def local_parts(self) -> dict[str, Tensor]:
        """As above."""
        return self._zero.parts.local_weights()

    def _begin(self) -> None:
        self._zero.let_go_of_gathered_weights()

    def _end(self) -> None:
        self._zero.let_go_of_gathered_weights()

    def _forget_pass(self) -> None:
        self._zero.let_go_of_gathered_weights()

    def _note(self, name: str, gradient: Tensor) -> Tensor:
        self._note_norm(name, gradient)
        return gradient.new_zeros(()).expand(gradient.shape)


def describe_error(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
