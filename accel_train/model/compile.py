"""torch.compile, block by block where a model repeats blocks: the same code is compiled once and used for all of them."""

import warnings

from torch import nn

from accel_train.core.state import Choice
from accel_train.recipe.schema import MemoryBudget, Precision
from accel_train.runtime.private import set_activation_memory_budget


def compile_module(module: nn.Module, precision: Precision) -> Choice[str]:
    """Compile in place, before the module is wrapped; parameter names stay as they were."""
    requested, checkpointing = precision.compile, precision.gradient_checkpointing
    if requested is False:
        return Choice("no", "as the recipe says")
    set_activation_memory_budget(checkpointing.memory_budget if isinstance(checkpointing, MemoryBudget) else 1.0)
    # Dynamo looks for it where a graph continues after a loss that is computed outside of graphs (`chunked_loss.py`).
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    blocks = repeated_blocks(module)
    if requested == "model" or not blocks:
        module.compile()
        return Choice("model", "as the recipe says" if requested == "model" else "the model repeats no block")
    for block in blocks:
        block.compile()
    return Choice("blocks", f"{len(blocks)} x {type(blocks[0]).__name__} share one compiled block")


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members of the longest nn.ModuleList of two or more modules of one class; empty where there is none."""
    lists = [
        list(child)
        for child in module.modules()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1
    ]
    return max(lists, key=len, default=[])
