"""Select the strategy of a run from the recipe and the number of processes."""

import torch

from accel_train.parallel.ddp import Ddp
from accel_train.parallel.fsdp2 import Fsdp2
from accel_train.parallel.strategy import Strategy
from accel_train.parallel.zero import Zero
from accel_train.recipe.parallel import Parallel

STRATEGIES: dict[str, type[Strategy]] = {each.name: each for each in (Ddp, Fsdp2, Zero)}


def open_strategy(section: Parallel, world_size: int, device: torch.device) -> Strategy:
    """Return the strategy that the recipe asks for; plain data parallelism if it would shard nothing.

    Raises:
        ValueError: the number of processes does not fit the recipe.
    """
    strategy = STRATEGIES[section.strategy]
    choice = strategy.choose(section, world_size, device)
    return (strategy if choice.value * section.tp_size > 1 else Ddp)(section, choice)
