"""Choose held-out rows by hash: groups of rows that stay together, or the same share of each class."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from accel_train.core.errors import SettingError
from accel_train.data.labels import is_missing


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
    names: list[Hashable] = [None if cell != cell or is_missing(cell) else str(cell) for cell in cells]
    if None in names:
        problem = f"{wheres[names.index(None)]} has no group"
        raise SettingError(problem, "Fill in the cell, or drop the row", at, settings)
    if len(set(names)) == 1:
        problem = f"all {len(names):,} rows are in the group {names[0]!r}, so none can be held out"
        raise SettingError(problem, "Name another column, or name evaluation data in data.eval", at, settings)
    return list(map(str, names))
