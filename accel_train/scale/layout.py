"""Where the processes of a run are: nodes, and who shares a copy of the model with whom."""

from dataclasses import dataclass

import torch

from accel_train.recipe import Parallel
from accel_train.sequence_parallel import choose_sequences
from accel_train.sharding import choose_sharding

USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Layout:
    """Processes on nodes. Those that share a copy of the model are neighbours, as in Accelerate's mesh."""

    world_size: int
    gpus_per_node: int
    shard_size: int
    """Processes that share one copy of the model as FSDP2 has it; 1: each holds all of it, or ZeRO spreads it its own way."""
    reason: str
    tp_size: int = 1
    """Neighbours that split each layer; the copy's other parts are with as many groups of them."""
    sp_size: int = 1
    """Neighbours that split each sequence."""

    @property
    def num_nodes(self) -> int:
        """Nodes, all of them full."""
        return self.world_size // self.gpus_per_node

    @property
    def num_copies(self) -> int:
        """Copies of the model, whose gradients are averaged."""
        return self.world_size // (self.shard_size * self.tp_size)


def choose_layout(section: Parallel, world_size: int, device_type: str, gpus_per_node: int | None = None) -> Layout:
    """Nodes of as many GPUs as are said; else of 8, or the next smaller number that the processes fill.

    Raises:
        ValueError: the processes do not fill the nodes, or the sharding cannot be, in the words of the run.
    """
    filled = [n for n in range(min(USUAL_GPUS_PER_NODE, world_size), 0, -1) if world_size % n == 0]
    size = filled[0] if gpus_per_node is None else gpus_per_node
    if size < 1:
        raise ValueError(f"--gpus-per-node={size}: must be at least 1")
    if world_size % size:
        fitting = ", ".join(map(str, filled))
        raise ValueError(f"--gpus-per-node={size}: {world_size} processes do not fill such nodes; use {fitting}")
    sharding = choose_sharding(section, world_size, torch.device(device_type))
    sequences = choose_sequences(section, world_size, size)
    shard_size = sharding.value if section.strategy == "fsdp2" else 1
    reason = sharding.reason if sequences.value == 1 else f"{sharding.reason}; {sequences.reason}"
    return Layout(world_size, size, shard_size, reason, section.tp_size, sequences.value)
