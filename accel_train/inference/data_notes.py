"""Say what is to be known of the data that a trained model is shown: its own, which may have changed, or other data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train.task import TaskData

_OF_TRAINING = ("in data.train too", "no training ", "trained on")
"""Parts of notes that say nothing of data that a trained model is shown."""


def changes_of(before: Any, facts: Mapping[str, Any], folder: Path) -> list[str]:
    """Return a note where a run's own data holds other numbers of samples than when it was trained.

    Raises:
        ValueError: it has other classes.
    """
    before = before if isinstance(before, dict) else {}
    names = ("num_train", "num_eval", "label_names")
    was, now = (list[Any](map(each.get, names)) for each in (before, facts))
    if None not in (was[2], now[2]) and was[2] != now[2]:
        raise ValueError(
            f"the data of {folder} has changed: its classes are {', '.join(now[2])}, and were {', '.join(was[2])}; name data as the run knows it"
        )
    # Rows that are packed into windows are so by the attention of the machine, and their number says nothing.
    if None in (*was[:2], *now[:2]) or was[:2] == now[:2] or "fill" in facts:
        return []
    return [
        f"the data of {folder} has changed: {now[0]:,} samples and {now[1]:,} held out, and it was trained with {was[0]:,} and {was[1]:,}"
    ]


def of_other(said: object, name: str) -> str:
    """Return a sentence on other data by its own name: the task knows it as data.train, which nobody has set."""
    return str(said).replace("data.train", name)


def notes_on(data: TaskData) -> list[str]:
    """Return the notes on other data, which the task took for data to train on, in words for data to read."""
    notes = [note for note in data.facts.get("notes", ()) if not any(part in note for part in _OF_TRAINING)]
    return [of_other(note.replace("training ", ""), "DATA") for note in dict.fromkeys(notes)]
