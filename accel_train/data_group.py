"""Who reads what: processes that compute samples together read the same ones.

Neighbours that split layers (tensor parallelism) compute the same of them, and count them once. Neighbours that split
sequences (sequence parallelism) have a slice each, and count what is theirs.
"""

from dataclasses import dataclass

from accelerate import Accelerator


@dataclass(frozen=True)
class DataGroup:
    """The place of this process among those that read different samples.

    Without tensor or sequence parallelism every process reads samples of its own: rank and size are the process's and the world's.
    """

    rank: int
    """Which share of each global batch it reads, from 0."""
    size: int
    """How many shares there are."""
    num_alike: int = 1
    """Processes that compute the same of a share: neighbours, as in Accelerate's mesh."""
    num_slices: int = 1
    """Processes that have a slice each of the sequences of a share: neighbours, too."""
    place: int = 0
    """Of this process among all that read its share, from 0."""

    @property
    def num_sharing(self) -> int:
        """Processes that read one share."""
        return self.num_alike * self.num_slices

    @property
    def slice_index(self) -> int:
        """Which slice of each sequence it has, from 0."""
        return self.place // self.num_alike

    @property
    def does_count(self) -> bool:
        """Its counts count: it is the first of those that count alike."""
        return self.place % self.num_alike == 0

    @property
    def random_rank(self) -> int:
        """Whose random numbers it draws: those that compute the same draw the same."""
        return self.rank * self.num_slices + self.slice_index

    @property
    def shared_by(self) -> str:
        """The setting by which processes share what they read."""
        return "parallel.sp_size" if self.num_slices > 1 else "parallel.tp_size"


def data_group(accelerator: Accelerator) -> DataGroup:
    """That of this process: a fact of how the Accelerator was built."""
    config = accelerator.parallelism_config
    alike, slices = (1, 1) if config is None else (int(config.tp_size), int(config.sp_size))
    index, sharing = accelerator.process_index, alike * slices
    return DataGroup(index // sharing, accelerator.num_processes // sharing, alike, slices, index % sharing)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the processes of this run hold parts of the model, and not the whole of it each; they then meet in each forward."""
    return bool(accelerator.is_fsdp2) or data_group(accelerator).num_alike > 1
