"""Replace activations that transformers computes operator by operator in Python by single torch kernels.

The function, the configuration, and the names of weights and modules do not change. The formulas are from Hendrycks and
Gimpel 2016, https://arxiv.org/abs/1606.08415.
"""

from typing import Literal

from torch import nn
from transformers.activations import AccurateGELUActivation, FastGELUActivation, NewGELUActivation

from accel_train.core.state import Choice

_TANH_GELUS = (NewGELUActivation, FastGELUActivation, AccurateGELUActivation)
"""Three ways of writing 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). QuickGELU has no such kernel."""


class FusedTanhGELU(nn.GELU):
    """GELU with the tanh approximation, of any shape, in one kernel. It keeps only its input for the backward pass."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


def fuse_activations(model: nn.Module, requested: Literal["auto"] | bool) -> None:
    """Replace in place each activation that has an equivalent kernel. `requested` is `model.fused_kernels`.

    Outputs and gradients stay equal up to rounding: within 1e-6 in fp32.
    """
    if requested is False:
        return
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in _TANH_GELUS:
            model.set_submodule(name, FusedTanhGELU().train(module.training))


def slow_on_cpu(model: nn.Module) -> str | None:
    """Return what the GELU by tanh of a new model costs on a CPU, or None if its configuration names another one."""
    given = vars(getattr(model, "config", None) or object)
    for key in ("activation_function", "hidden_act"):
        if given.get(key) in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"):
            return (
                f"model.config.{key} is {given[key]}, GELU by tanh. On a CPU, the exact GELU (`gelu`) takes a third of "
                "its time, forward and backward (AMD EPYC, fp32)"
            )
    return None


def describe_activations(model: nn.Module, requested: Literal["auto"] | bool) -> Choice[str]:
    """Return the number of activations that `fuse_activations` replaced in a model, or why it replaced none."""
    if requested is False:
        return Choice("no", "as set")
    count = sum(isinstance(module, FusedTanhGELU) for module in model.modules())
    if count:
        return Choice(f"{count} x tanh GELU", "the same function in one kernel, where transformers takes eight or more")
    return Choice("none", f"{type(model).__name__} has no activation to replace, or the program built it itself")
