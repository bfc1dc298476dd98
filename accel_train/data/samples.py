"""Read samples of a data set by their numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset


class Drawn(Dataset[Any]):
    """Training samples by draw (`order.DataOrder`), each augmented by (seed, epoch, index) and nothing else."""

    def __init__(self, draw: Callable[[int, np.random.Generator], Any], seed: int, num_samples: int) -> None:
        self.draw, self.seed, self.num_samples = draw, seed, num_samples

    def __getitem__(self, number: int) -> Any:
        epoch, index = divmod(number, self.num_samples)
        return self.draw(index, np.random.default_rng((self.seed, epoch, index)))


def fetch(dataset: "Dataset[Any]", indices: list[int]) -> Sequence[Any]:
    """Return samples by index, in one call where the data set offers it (torch's `__getitems__`)."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many is not None else [dataset[index] for index in indices]
