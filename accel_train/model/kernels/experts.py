"""Products of the experts in a mixture, in the type of autocast. torch's autocast leaves out `grouped_mm`."""

from typing import Any

import torch
from torch import Tensor, nn

from accel_train.core.state import Choice

AUTOCAST_GROUPED = "autocast_grouped_mm"
"""Name of `grouped_in_autocast` among transformers' implementations of experts."""
ALIGNMENT_BYTES = 16
"""Rows of weights that `grouped_mm` multiplies are a multiple of this long."""


def autocast_experts(model: nn.Module) -> dict[str, Choice[str]]:
    """Let the experts of a transformers model compute in the type of autocast; return the choice, if it has experts.

    transformers casts the input of `grouped_mm` to the type of its weights. That is fp32 on one GPU and under DDP, and
    16 bits if FSDP2 gathers the weights.
    """
    experts: list[Any] = [each for each in model.modules() if hasattr(each, "has_post_expert_norm")]
    if not experts:
        return {}
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_GROUPED, grouped_in_autocast)
    for each in experts:
        if each.config._experts_implementation == "grouped_mm":
            each.config._experts_implementation = AUTOCAST_GROUPED
    used = experts[0].config._experts_implementation
    why = "as the model's configuration says"
    if used == AUTOCAST_GROUPED:
        why = "products in 16 bits in mixed precision, like linear layers; transformers alone computes in fp32"
    return {"experts": Choice(used, why)}


def grouped_in_autocast(experts: nn.Module, hidden: Tensor, *routing: Tensor) -> Tensor:
    """Compute (positions, width) outputs of all experts by transformers' grouped products, with cast weights."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return grouped_mm_experts_forward(experts, hidden, *routing)
    dtype = torch.get_autocast_dtype(kind)
    sizes = {size for each in experts.parameters(recurse=False) if each.dim() > 2 for size in each.shape[1:]}
    if any(size * dtype.itemsize % ALIGNMENT_BYTES for size in sizes):
        dtype = torch.float32
    return grouped_mm_experts_forward(_Cast(experts, dtype), hidden, *routing)


class _Cast:
    """A module whose own weights have another type."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
