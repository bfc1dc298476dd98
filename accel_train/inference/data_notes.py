"""Notes on the data that a trained model reads: the run's changed data, or other data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train.task import TaskData

_OF_TRAINING = ("in data.train too", "no training ", "trained on")
"""Parts of notes that only apply to training data."""


def changes_of(before: Any, facts: Mapping[str, Any], folder: Path) -> list[str]:
    """Return a note if a run's own data has other numbers of samples than at training time.

    Raises:
        ValueError: the data has other classes.
    """
    before = before if isinstance(before, dict) else {}
    names = ("num_train", "num_eval", "label_names")
    was, now = (list[Any](map(each.get, names)) for each in (before, facts))
    if None not in (was[2], now[2]) and was[2] != now[2]:
        raise ValueError(
            f"the data of {folder} has changed: its classes are {', '.join(now[2])}, and were {', '.join(was[2])}; "
            "name data as the run knows it"
        )
    # Packing depends on the machine's attention kernel, so numbers of windows cannot be compared.
    if None in (*was[:2], *now[:2]) or was[:2] == now[:2] or "fill" in facts:
        return []
    return [
        f"the data of {folder} has changed: {now[0]:,} samples and {now[1]:,} held out, and it was trained with "
        f"{was[0]:,} and {was[1]:,}"
    ]


def of_other(said: object, name: str) -> str:
    """Return a message with `data.train` replaced by the user's name for other data.

    The task reads other data as data.train, although the user did not set data.train.
    """
    return str(said).replace("data.train", name)


def notes_on(data: TaskData) -> list[str]:
    """Return the task's notes on other data, reworded from training data to data that is read."""
    notes = [note for note in data.facts.get("notes", ()) if not any(part in note for part in _OF_TRAINING)]
    return [of_other(note.replace("training ", ""), "DATA") for note in dict.fromkeys(notes)]
