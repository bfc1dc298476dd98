"""The digest of a data set follows the content of its samples, whatever they are made of."""

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from accel_train.data.digest import digest_of_data


class Graph:
    """A sample as libraries of graphs have it: callable, and its content is private."""

    def __init__(self, edges: list[int]) -> None:
        self._store = {"edges": torch.tensor(edges), "above": self}

    def __call__(self) -> Any:
        """Return the content."""
        return self._store


class Slots:
    """A sample without a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


PAIRS = [
    (Graph([0, 1]), Graph([0, 1]), Graph([0, 2])),
    (Slots(1), Slots(1), Slots(2)),
    (Path("a/1.png"), Path("a/1.png"), Path("a/2.png")),
    (date(2026, 1, 1), date(2026, 1, 1), date(2026, 1, 2)),
    (Decimal("1.5"), Decimal("1.5"), Decimal("1.6")),
    (pd.Series([1.0, 2.0]), pd.Series([1.0, 2.0]), pd.Series([1.0, 3.0])),
    (np.array([{1}, None]), np.array([{1}, None]), np.array([{2}, None])),
]


@pytest.mark.parametrize("same, again, other", PAIRS, ids=[type(pair[0]).__name__ for pair in PAIRS])
def test_samples_of_any_class_count_by_their_content(same: Any, again: Any, other: Any) -> None:
    first, second, changed = (digest_of_data([(sample, 0)] * 3) for sample in (same, again, other))
    assert first == second
    assert first[0] != changed[0]
    assert first[1]
    assert changed[1]
