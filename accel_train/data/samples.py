"""Read samples of a data set by number."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Drawn(Dataset[Any]):
    """Training samples by draw (`order.DataOrder`). Augmentation depends only on (seed, epoch, index)."""

    def __init__(self, draw: Callable[[int, np.random.Generator], Any], seed: int, num_samples: int) -> None:
        self.draw, self.seed, self.num_samples = draw, seed, num_samples

    def __getitem__(self, number: int) -> Any:
        epoch, index = divmod(number, self.num_samples)
        return self.draw(index, np.random.default_rng((self.seed, epoch, index)))


class SeededReads(Dataset[Any]):
    """Training samples by draw, for data sets and collators that use the global random generators.

    Seeds the generators of Python, NumPy and torch by (seed, epoch, first sample) before each batch. Random masks and
    crops therefore do not depend on the number of readers or on the step of a resume.
    """

    def __init__(self, dataset: "Dataset[Any]", seed: int, num_samples: int) -> None:
        self.dataset, self.seed, self.num_samples = dataset, seed, num_samples

    def __getitems__(self, numbers: list[int]) -> Sequence[Any]:
        epoch, index = divmod(numbers[0], self.num_samples)
        value = int(np.random.SeedSequence((self.seed, epoch, index)).generate_state(1, np.uint32)[0])
        random.seed(value)
        np.random.seed(value)
        torch.default_generator.manual_seed(value)
        return fetch(self.dataset, [number % self.num_samples for number in numbers])


def fetch(dataset: "Dataset[Any]", indices: list[int]) -> Sequence[Any]:
    """Return samples by index, in one call if the data set offers torch's `__getitems__`."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many is not None else [dataset[index] for index in indices]
