"""Optimizers as somebody else may have written them: one that is good, and some that cannot be used."""

from typing import Any

import torch


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum, which counts its steps in a Python int."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, memory: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "memory": memory})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["steps"] = state.get("steps", 0) + 1
                    state["mean"] = state.get("mean", torch.zeros_like(parameter)).lerp(
                        parameter.grad, 1 - group["memory"]
                    )
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(state["mean"], alpha=group["lr"])
                    self.keep(group, state)

    def keep(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Keep something more."""


class KeepsInGroups(Momentum):
    def keep(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1


class KeepsLists(Momentum):
    def keep(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        state.setdefault("history", []).append(1.0)


class KeepsRows(Momentum):
    def keep(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["rows"] = state["mean"].sum(-1)


class SaysFused(Momentum):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.defaults["fused"] = True


class NeedsClosure(Momentum):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


class NoDecay(Momentum):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        del self.defaults["weight_decay"]


class NoRate(Momentum):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        del self.defaults["lr"]


def function(params: Any, lr: float) -> None:
    """No class."""
