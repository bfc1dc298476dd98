"""The facts behind a recipe: the user's request, and the properties of the data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_train.core.state import Choice

TASKS = ("text-classification", "causal-lm", "image-classification", "semantic-segmentation")
"""Tasks for which `accel-train finetune` writes a recipe."""

Settings = Mapping[str, Choice[Any]]
"""Settings by dotted name, with reasons. Self-explanatory settings have an empty reason."""


@dataclass(frozen=True)
class Asked:
    """The user's request: the path, and flags."""

    path: str
    data: Any
    """Section `data` of `ANY_TASK`, with the settings of the command line. The path is `data.train`."""
    task: str | None = None
    text: tuple[str, ...] = ()
    """Name of the text column, or of two columns that are read as a pair."""
    label: str | None = None
    problem_type: str = "auto"
    """Setting `model.problem_type`. Default: auto."""
    given: frozenset[str] = frozenset()
    """Dotted names of the settings on the command line. finetune does not choose these settings."""


@dataclass(frozen=True)
class Found:
    """The recognized data: task, sizes, and columns."""

    task: str
    why: str
    """Reason for the task."""
    description: str
    """Path, sizes, and columns, in words."""
    num_samples: int
    """Number of rows, texts, or images. For plain text, the number of files."""
    settings: Settings = field(default_factory=dict)
    """Settings of the section `data`, and other settings that depend only on the data."""
    num_chars: int = 0
    """Characters of all texts."""
    longest: int = 0
    """Length of a long text in characters. One text of twenty is longer."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Samples by class. Empty without classes."""
    edge: int = 0
    """Short edge of the median image, in pixels."""
    aspect: float = 1.0
    """Width of the median image divided by its height."""
    has_one_label: bool = False
    """Whether each text has exactly one label, as opposed to a number or a list of labels."""
    is_grey: bool = False
    is_chat: bool = False
    eval_fraction: float | None = None
    """Held-out share from the command line, or 0 with named evaluation data. None: finetune chooses it."""
    unused: tuple[str, ...] | None = None
    """Columns and files that are not read. None if unknown."""
    test: str | None = None
    """File or folder of test data. Training does not use it."""
    notes: tuple[str, ...] = ()
    """Sentences about how the data are read."""


def lengths(sizes: Sequence[int]) -> dict[str, Any]:
    """Return the length fields of `Found` from the sizes of texts in characters."""
    return {"num_chars": sum(sizes), "longest": sorted(sizes)[len(sizes) * 19 // 20]}
