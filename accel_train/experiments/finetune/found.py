"""Facts that a recipe is made of: what was asked for, and what was found in the data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_train.core.state import Choice
from accel_train.recipe.data import Data

TASKS = ("text-classification", "causal-lm", "image-classification", "semantic-segmentation")
"""The tasks for which `accel-train finetune` writes a recipe."""

Settings = Mapping[str, Choice[Any]]
"""Settings by dotted name, with why; an empty reason is for what needs none."""


@dataclass(frozen=True)
class Asked:
    """The words of the user: the path, and flags."""

    path: str
    data: Data
    """`data` with the settings of the command line, and the path as `data.train`."""
    task: str | None = None
    text: tuple[str, ...] = ()
    """The text column, or two that are read as a pair."""
    label: str | None = None
    problem_type: str = "auto"
    """`model.problem_type`."""
    given: frozenset[str] = frozenset()
    """Dotted names of the settings on the command line, which are not chosen here."""


@dataclass(frozen=True)
class Found:
    """The data: their task, sizes and columns."""

    task: str
    why: str
    """Why it is this task."""
    description: str
    """Path, sizes, columns."""
    num_samples: int
    """Rows, texts or images; of plain text, documents."""
    settings: Settings = field(default_factory=dict)
    """Settings of the recipe's section `data`, and those that follow from the data alone."""
    num_chars: int = 0
    """Characters of all texts."""
    longest: int = 0
    """Characters of a long text: one of twenty is longer."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Samples by class; empty without classes."""
    edge: int = 0
    """Pixels of the short edge of the median image."""
    aspect: float = 1.0
    """Width of the median image, as a multiple of its height."""
    has_one_label: bool = False
    """Each text has one label: they are no numbers to predict, and no lists."""
    is_grey: bool = False
    is_chat: bool = False
    eval_fraction: float | None = None
    """The share that is held out as the command line says, 0 where evaluation data are named; None where it is chosen."""
    unused: tuple[str, ...] | None = None
    """Columns and files that are not read; None where that is not known."""
    test: str | None = None
    """A file or folder of test data, which is left alone."""
    notes: tuple[str, ...] = ()
    """Sentences on how the data are read."""


def lengths(sizes: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `Found` for texts of so many characters each."""
    return {"num_chars": sum(sizes), "longest": sorted(sizes)[len(sizes) * 19 // 20]}
