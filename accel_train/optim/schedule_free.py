"""Schedule-free optimizers: an average of the weights replaces a schedule (Defazio et al. 2024, arXiv 2405.15682).

The optimizers are from the package schedulefree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.model.tensors import like, local_part
from accel_train.optim.ema import Average
from accel_train.recipe.optimizer import Group, Groups

COUNTERS = ("k", "weight_sum", "lr_max")
"""Counters that the package keeps in its groups. A checkpoint stores them as numbers of each weight."""


class ScheduleFree(torch.optim.Optimizer):
    """A schedulefree optimizer that stays in training mode: the weights are y, at which gradients are computed.

    `ScheduleFreeAverage` swaps in x, the weights to evaluate. The package's `eval()` and `train()` round, so a run
    would depend on when it was evaluated.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    @property
    def beta1(self) -> float:
        """Position of y between the average x and the fastest weights z."""
        defaults = self.defaults
        return float(defaults["betas"][0] if "betas" in defaults else defaults["momentum"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient, and reuse the memory of the gradients."""
        assert closure is None, "gradients are there before the step"
        inner = self._inner
        # Assign the state at each step, because `load_state_dict` creates new objects.
        inner.state = self.state
        inner.param_groups = [{**group, "train_mode": True, **self._counters(group)} for group in self.param_groups]
        inner.step()
        for group in inner.param_groups:
            for state in self._states(group):
                state.update({name: group[name] for name in COUNTERS})
        inner.param_groups = self.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        """Load state and groups. A scheduler built for the package's optimizer sets the rates in the new groups."""
        super().load_state_dict(state_dict)
        self._inner.param_groups = self.param_groups

    def _counters(self, group: Group) -> dict[str, float]:
        """Return the counters of a group after its last step, equal for all weights; empty before the first step."""
        state = next(self._states(group), {})
        return {name: state[name] for name in COUNTERS if name in state}

    def _states(self, group: Group) -> Iterator[dict[str, Any]]:
        return (state for each in group["params"] if "z" in (state := self.state.get(each, {})))


class ScheduleFreeAdamW(ScheduleFree):
    """`schedulefree.AdamWScheduleFree` with the recipe's options."""

    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float, **options: Any) -> None:
        from schedulefree import AdamWScheduleFree

        warmup = options.get("warmup_steps", 0)
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ValueError(f"warmup_steps={warmup!r} is not a number of steps")
        super().__init__(AdamWScheduleFree(groups, lr=lr, betas=betas, eps=eps, **options))


def always_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a schedulefree optimizer as `ScheduleFree`, and any other optimizer unchanged."""
    is_of_package = type(optimizer).__module__.partition(".")[0] == "schedulefree"
    return ScheduleFree(optimizer) if is_of_package else optimizer


class ScheduleFreeAverage(Average):
    """The average that a schedule-free optimizer finds: x = y + (1 - 1 / beta1) (z - y), computed when it is read."""

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], optimizer: ScheduleFree) -> None:
        self.names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._optimizer = optimizer
        self._is_in_place = False

    def update(self, step: int, skipped: Tensor) -> None:
        """Do nothing. The optimizer's step keeps the state from which the average is computed."""

    def begin_anew(self) -> None:
        """Do nothing. The average is computed from the optimizer's state."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average into the model inside the context, and restore the weights exactly afterwards.

        Contexts may be nested.
        """
        if self._is_in_place:
            yield
            return
        self._is_in_place = True
        kept = list[Tensor]()
        for parameter in self._parameters:
            weight = local_part(parameter.detach())
            kept.append(weight.clone())
            weight.copy_(self._average_of(parameter))
        try:
            yield
        finally:
            self._is_in_place = False
            # Look the weights up again, because `model.to("cpu:0")`, for example, gives them other memory.
            for parameter, before in zip(self._parameters, kept, strict=True):
                local_part(parameter.detach()).copy_(before)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, in new memory, for the checkpoint. Resuming does not read them."""
        found = zip(self.names, self._parameters, strict=True)
        return {name: like(self._average_of(parameter), parameter.detach()) for name, parameter in found}

    def _average_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the average of this process's part of a weight; a copy of the weight if no step has changed it."""
        weight, state = local_part(parameter.detach()), self._optimizer.state.get(parameter, {})
        return weight.lerp(local_part(state["z"]), 1 - 1 / self._optimizer.beta1) if "z" in state else weight.clone()
