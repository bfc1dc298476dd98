"""Who reads what: processes that compute each layer together (tensor parallelism) read the same samples, and count once."""

from dataclasses import dataclass

from accelerate import Accelerator


@dataclass(frozen=True)
class DataGroup:
    """The place of this process among those that read different samples.

    Without tensor parallelism every process reads samples of its own: rank and size are the process's and the world's.
    """

    rank: int
    """Which share of each global batch it reads, from 0."""
    size: int
    """How many shares there are."""
    num_sharing: int = 1
    """Processes that read one share: neighbours, as in Accelerate's mesh."""
    is_first: bool = True
    """It is the first of those, and the one whose counts count."""


def data_group(accelerator: Accelerator) -> DataGroup:
    """That of this process: a fact of how the Accelerator was built."""
    sharing = _tp_size(accelerator)
    index = accelerator.process_index
    return DataGroup(index // sharing, accelerator.num_processes // sharing, sharing, index % sharing == 0)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the processes of this run hold parts of the model, and not the whole of it each; they then meet in each forward."""
    return bool(accelerator.is_fsdp2) or _tp_size(accelerator) > 1


def _tp_size(accelerator: Accelerator) -> int:
    config = accelerator.parallelism_config
    return 1 if config is None else int(config.tp_size)
