"""Read samples of a data set by number, and choose the held-out ones by hash, class, or group."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from accel_train.core.errors import DataError, SettingError
from accel_train.data.labels import is_missing


class Drawn:
    """Training samples by draw (`order.DataOrder`). Augmentation depends only on (seed, epoch, index)."""

    def __init__(self, draw: Callable[[int, np.random.Generator], Any], seed: int, num_samples: int) -> None:
        self.draw, self.seed, self.num_samples = draw, seed, num_samples

    def __getitem__(self, number: int) -> Any:
        epoch, index = divmod(number, self.num_samples)
        return self.draw(index, np.random.default_rng((self.seed, epoch, index)))


class SeededReads:
    """Training samples by draw, for data sets and collators that use the global random generators.

    Seeds the generators of Python, NumPy and torch by (seed, epoch, first sample) before each batch. Random masks and
    crops therefore do not depend on the number of readers or on the step of a resume.
    """

    def __init__(self, dataset: Any, seed: int, num_samples: int) -> None:
        self.dataset, self.seed, self.num_samples = dataset, seed, num_samples

    def __getitems__(self, numbers: list[int]) -> Sequence[Any]:
        seed_reads(self.seed, *divmod(numbers[0], self.num_samples))
        return fetch(self.dataset, [number % self.num_samples for number in numbers])


def seed_reads(*numbers: int) -> None:
    """Seed the generators of Python, NumPy and torch for a read, by the run's seed and the place of the read."""
    value = int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])
    random.seed(value)
    np.random.seed(value)
    import torch

    torch.default_generator.manual_seed(value)


def fetch(dataset: Any, indices: list[int]) -> Sequence[Any]:
    """Return samples by index, in one call if the data set offers torch's `__getitems__`."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many is not None else [dataset[index] for index in indices]


def fetch_readable(dataset: Any, indices: Iterable[int]) -> tuple[list[Any], list[str]]:
    """Return the samples that can be read, and the errors of the others."""
    samples, faults = list[Any](), list[str]()
    for index in indices:
        try:
            samples += fetch(dataset, [index])
        except DataError as error:
            faults.append(str(error))
    return samples, faults


def first_readable(dataset: Any, most_broken: int) -> Sequence[Any]:
    """Return the first sample that can be read.

    Raises:
        DataError: none of the first `most_broken` + 1 samples can be read.
    """
    for number in range(most_broken):
        with suppress(DataError):
            return fetch(dataset, [number])
    return fetch(dataset, [most_broken])


def numbered(error: str, number: int, most: int) -> str:
    """Return the error of a broken sample with its number.

    Raises:
        DataError: it is one too many. `most` is `data.max_broken`.
    """
    named = f"{error} (broken sample {number}, and data.max_broken is {most})" if most else error
    if number > most:
        raise DataError(named)
    return named


def held_out_units(hashes: Sequence[int], classes: Sequence[int], fraction: float) -> list[bool]:
    """Return whether each row is held out: of each class, the rows with the lowest hashes.

    Rows with the same hash stay together and belong to the smallest of their classes. A row, or rows that stay
    together, are taken if this brings the class closer to `fraction` of its rows. A class with two different hashes has
    rows on both sides.
    """
    sizes = Counter(hashes)
    class_of: dict[int, int] = {}
    for value, number in zip(hashes, classes, strict=True):
        class_of[value] = min(number, class_of.get(value, number))
    units = defaultdict(list)
    for value in sorted(class_of):
        units[class_of[value]].append(value)
    chosen: set[int] = set()
    for members in units.values():
        missing = round(fraction * sum(sizes[value] for value in members))
        held: list[int] = []
        for value in members:
            if len(held) + 1 < len(members) and abs(missing - sizes[value]) < missing:
                held.append(value)
                missing -= sizes[value]
        # The fraction is less than half of each unit.
        if not held and len(members) > 1:
            held = [min(members, key=lambda value: (sizes[value], value))]
        chosen.update(held)
    return [value in chosen for value in hashes]


def group_names(cells: Sequence[Any], wheres: Sequence[str], column: str) -> list[str]:
    """Return the group of each row: the text of its cell in `data.group_column`.

    Raises:
        SettingError: a cell is empty, or all rows are one group.
    """
    at, settings = f"data.group_column={column}", ("data.group_column",)
    names = list(map(str, cells))
    missing = next((where for cell, where in zip(cells, wheres) if is_missing(cell)), None)
    if missing is not None:
        problem = f"{missing} has no group"
        raise SettingError(problem, "Fill in the cell, or drop the row", at, settings)
    if len(set(names)) == 1:
        problem = f"all {len(names):,} rows are in the group {names[0]!r}, so none can be held out"
        raise SettingError(problem, "Name another column, or name evaluation data in data.eval", at, settings)
    return names
