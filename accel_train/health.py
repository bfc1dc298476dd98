"""Which checkpoints are healthy: those that so many clean steps in a row have followed. Only these are gone back to."""

import json
from pathlib import Path

from accel_train.checkpoint import checkpoint_folders, step_of
from accel_train.files import write_atomically

TAGS = "healthy.json"


class Health:
    """Tags checkpoints of one run, on the process that writes them; elsewhere (`root` is none) it does nothing.

    A tag is no part of the checkpoint, whose files never change. One that is lost costs a rollback some steps, no more.
    """

    def __init__(self, root: Path | None, after_steps: int, last_bad_step: int | None) -> None:
        self._root, self._after_steps = root, after_steps
        self._last_bad = last_bad_step or 0
        self._waiting = [] if root is None else sorted(set(steps_of(root)) - healthy_steps(root))

    def saved(self, step: int) -> None:
        """A checkpoint of this step exists from now on."""
        if self._root is not None:
            self._waiting.append(step)

    def note(self, step: int, *, clean: bool) -> None:
        """A step was done; tag what has been followed by enough clean ones."""
        if not clean:
            self._last_bad = step
        if not self._waiting or step - self._waiting[0] < self._after_steps:
            return
        if step - self._last_bad < self._after_steps:
            return
        assert self._root is not None
        tagged = [saved for saved in self._waiting if step - saved >= self._after_steps]
        self._waiting = [saved for saved in self._waiting if saved not in tagged]
        write_tags(self._root, healthy_steps(self._root) | set(tagged))


def steps_of(root: Path) -> list[int]:
    """The steps of the published checkpoints, oldest first."""
    return [step for folder in checkpoint_folders(root) if (step := step_of(folder)) is not None]


def healthy_steps(root: Path) -> set[int]:
    """The steps of the checkpoints that are there and tagged."""
    try:
        tagged = json.loads((root / TAGS).read_text(encoding="utf-8"))["steps"]
        return set(map(int, tagged)) & set(steps_of(root))
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def write_tags(root: Path, steps: set[int]) -> None:
    """Replace the tags, whole or not at all; a full disk costs the tags, not the run."""
    try:
        write_atomically(root / TAGS, json.dumps({"steps": sorted(steps)}).encode())
    except OSError:
        return
