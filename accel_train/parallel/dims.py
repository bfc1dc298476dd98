"""Groups of processes that read the same samples, because they split layers or sequences.

Processes that split layers (tensor parallelism) compute the same results and count them once. Processes that split
sequences (sequence parallelism) have one slice each and count their own slice.
"""

import os
from dataclasses import dataclass

from accelerate import Accelerator
from torch import nn

from accel_train.core.errors import SettingError, setting_error
from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.batch_sizes import divisors
from accel_train.recipe.parallel import Parallel


@dataclass(frozen=True)
class ParallelDims:
    """The position of this process among the processes that read different samples.

    Without tensor or sequence parallelism, every process reads different samples. `rank` and `size` are then the
    process's rank and the world size.
    """

    rank: int
    """Index of the share of each global batch that this process reads, from 0."""
    size: int
    """Number of shares."""
    tp_size: int = 1
    """Number of processes that compute the same results for a share, as in Accelerate's mesh."""
    sp_size: int = 1
    """Number of processes that split the sequences of a share into slices."""
    place: int = 0
    """Index of this process among all processes that read its share."""

    @property
    def num_sharing(self) -> int:
        """Number of processes that read one share."""
        return self.tp_size * self.sp_size

    @property
    def slice_index(self) -> int:
        """Index of this process's slice of each sequence, from 0."""
        return self.place // self.tp_size

    @property
    def is_first_in_group(self) -> bool:
        """Return whether this process's counts are added. Among processes with equal counts, only the first is."""
        return self.place % self.tp_size == 0

    @property
    def random_rank(self) -> int:
        """Rank that seeds the random numbers: equal for processes that compute the same results."""
        return self.rank * self.sp_size + self.slice_index


def parallel_dims(accelerator: Accelerator) -> ParallelDims:
    """Return the dims of this process from the Accelerator's parallelism configuration."""
    config = accelerator.parallelism_config
    tp_size, sp_size = (1, 1) if config is None else (int(config.tp_size), int(config.sp_size))
    index, sharing = accelerator.process_index, tp_size * sp_size
    return ParallelDims(index // sharing, accelerator.num_processes // sharing, tp_size, sp_size, index % sharing)


def check_divides(setting: str, size: int, world_size: int, alternative: str = "") -> None:
    """Check that `parallel.SETTING` divides the number of processes.

    Raises:
        ValueError: it does not. The message names both numbers and the sizes that fit.
    """
    if world_size % size:
        problem = f"does not divide the {format_count(world_size, 'process', 'processes')} of this run"
        fitting = ", ".join(map(str, divisors(world_size)))
        remedy = f"Use {fitting}{alternative or f', or run on {size} or {2 * size} processes'}"
        raise setting_error(f"parallel.{setting}", size, problem, remedy)


def check_dimensions(model: nn.Module, strategy: str) -> None:
    """Check that a strategy can shard every weight of a model: a weight needs at least one dimension.

    Raises:
        ValueError: a weight is 0-dim. The message names the first one.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            problem = f"parallel.strategy {strategy} cannot shard {name}, a weight without dimensions"
            remedy = "Give it one dimension (torch.ones(1)), or use parallel.strategy ddp"
            raise SettingError(problem, remedy, settings=("parallel.strategy",))


def processes_on_machine(world_size: int) -> int:
    """Return the number of the run's processes on this machine, from LOCAL_WORLD_SIZE; without it, all of them."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) > 0 else world_size


def across_machines(section: Parallel, processes_on_machine: int) -> str | None:
    """Return a warning if processes that split layers are on several machines; None if they are on one."""
    if processes_on_machine % section.tp_size == 0:
        return None
    return f"parallel.tp_size={section.tp_size}: a group {_spans_machines(processes_on_machine)}"


def choose_sequences(section: Parallel, world_size: int, on_machine: int | None = None) -> Choice[int]:
    """Return the number of processes that split each sequence, with an explanation.

    `on_machine` is the number of processes per machine.

    Raises:
        ValueError: it does not divide the number of processes.
    """
    size = section.sp_size
    check_divides("sp_size", size, world_size)
    reason = (
        f"groups of {size} processes read the same samples, each process computes a slice of every sequence, and "
        "DeepSpeed's attention joins the slices"
    )
    on_machine = on_machine or processes_on_machine(world_size)
    return Choice(size, f"{reason}; a group {_spans_machines(on_machine)}" if on_machine % size else reason)


def _spans_machines(size: int) -> str:
    use = ", ".join(map(str, divisors(size)))
    return f"spans machines of {size} processes, so each layer waits for the network several times. Use {use}"
