"""Groups of processes that read the same samples: those that split layers or sequences with each other.

Neighbours that split layers (tensor parallelism) compute the same of them, and count them once. Neighbours that split
sequences (sequence parallelism) have a slice each, and count what is theirs.
"""

import os
from dataclasses import dataclass

from accelerate import Accelerator
from torch import nn

from accel_train.core.state import Choice
from accel_train.data.batch_sizes import divisors
from accel_train.recipe.parallel import Parallel


@dataclass(frozen=True)
class ParallelDims:
    """The place of this process among those that read different samples.

    Without tensor or sequence parallelism every process reads its own samples: rank and size are the process's and the world's.
    """

    rank: int
    """The share of each global batch that it reads, from 0."""
    size: int
    """The number of shares."""
    tp_size: int = 1
    """Neighbours that compute the same of a share, as in Accelerate's mesh."""
    sp_size: int = 1
    """Neighbours that have a slice each of the sequences of a share."""
    place: int = 0
    """The index of this process among all that read its share."""

    @property
    def num_sharing(self) -> int:
        """Processes that read one share."""
        return self.tp_size * self.sp_size

    @property
    def slice_index(self) -> int:
        """The slice of each sequence that it has, from 0."""
        return self.place // self.tp_size

    @property
    def is_first_in_group(self) -> bool:
        """It is the one whose counts are added, of those that count the same."""
        return self.place % self.tp_size == 0

    @property
    def random_rank(self) -> int:
        """The rank whose random numbers it draws: those that compute the same draw the same."""
        return self.rank * self.sp_size + self.slice_index


def parallel_dims(accelerator: Accelerator) -> ParallelDims:
    """Return the dims of this process, by how the Accelerator was built."""
    config = accelerator.parallelism_config
    tp_size, sp_size = (1, 1) if config is None else (int(config.tp_size), int(config.sp_size))
    index, sharing = accelerator.process_index, tp_size * sp_size
    return ParallelDims(index // sharing, accelerator.num_processes // sharing, tp_size, sp_size, index % sharing)


def check_divides(setting: str, size: int, world_size: int, alternative: str = "") -> None:
    """Refuse a number of processes that is no multiple of `parallel.SETTING`.

    Raises:
        ValueError: names both numbers, and those that fit.
    """
    if world_size % size:
        fitting = ", ".join(map(str, divisors(world_size)))
        raise ValueError(
            f"parallel.{setting}={size} does not divide the {world_size} process{'es' * (world_size > 1)} of this run; use "
            f"{fitting}{alternative or f', or run on {size} or {2 * size} processes'}"
        )


def check_dimensions(model: nn.Module, strategy: str) -> None:
    """Refuse weights that a strategy cannot divide, because they have no dimension.

    Raises:
        ValueError: names the first.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"{name} is a weight without dimensions, and parallel.strategy {strategy} cannot shard it; make it a tensor of one number "
                "(torch.ones(1)), or use parallel.strategy ddp"
            )


def processes_on_machine(world_size: int) -> int:
    """Return how many of the run's processes are on this machine, by what the launcher says; else all of them."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) > 0 else world_size


def across_machines(section: Parallel, processes_on_machine: int) -> str | None:
    """Return a warning where neighbours that split layers are on several machines; None where they are on one."""
    if processes_on_machine % section.tp_size == 0:
        return None
    return f"parallel.tp_size={section.tp_size} reaches {_over_machines(processes_on_machine)}"


def choose_sequences(section: Parallel, world_size: int, on_machine: int | None = None) -> Choice[int]:
    """Return how many processes split each sequence, with what that means; a machine has `on_machine` of the processes.

    Raises:
        ValueError: the number of processes is no multiple of them.
    """
    size = section.sp_size
    check_divides("sp_size", size, world_size)
    reason = f"groups of {size} processes read the same samples, each process has a slice of every sequence, and DeepSpeed's attention joins them"
    on_machine = on_machine or processes_on_machine(world_size)
    return Choice(size, f"{reason}; they reach {_over_machines(on_machine)}" if on_machine % size else reason)


def _over_machines(size: int) -> str:
    use = ", ".join(map(str, divisors(size)))
    return f"over machines of {size} processes, and each layer waits for the network several times; use {use}"
