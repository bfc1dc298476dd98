"""Which checkpoints are healthy: those that so many clean steps in a row have followed. Only these are gone back to."""

import json
from collections.abc import Collection
from pathlib import Path

from accel_train.checkpoint import checkpoint_folders, digest_of_manifest, folder_of, read_json, step_of
from accel_train.files import write_atomically

TAGS = "healthy.json"


class Health:
    """Tags checkpoints of one run, on the process that writes them; elsewhere (`root` is none) it does nothing.

    A tag is no part of the checkpoint, whose files never change. One that is lost costs a rollback some steps, no more.
    """

    def __init__(self, root: Path | None, after_steps: int, last_bad_step: int | None) -> None:
        self._root, self._after_steps = root, after_steps
        self._last_bad = last_bad_step or 0
        self._counting = [] if root is None else sorted(set(steps_of(root)) - healthy_steps(root))
        self._ripe: list[int] = []

    def begun(self, step: int) -> None:
        """A checkpoint of this step is being written: the steps that follow count, however long the disk takes."""
        if self._root is not None and step not in self._counting:
            self._counting.append(step)

    def note(self, step: int, *, clean: bool) -> None:
        """A step was done; tag what has been followed by enough clean ones."""
        if not clean:
            self._last_bad = step
        if self._counting and step - max(self._counting[0], self._last_bad) >= self._after_steps:
            ripe = [saved for saved in self._counting if step - saved >= self._after_steps]
            self._counting = [saved for saved in self._counting if saved not in ripe]
            self._ripe += ripe
        self.tag()

    def tag(self) -> None:
        """Tag what has become healthy, as far as it is on the disk by now."""
        if not self._ripe:
            return
        assert self._root is not None
        published = [step for step in self._ripe if folder_of(self._root, step).exists()]
        if published and add_tags(self._root, published):
            # One that is older and not there was never written, or is rotated away.
            self._ripe = [step for step in self._ripe if step > max(published)]

    def go_back(self, to_step: int) -> None:
        """The run goes on from the checkpoint of this step: what was saved and noted after it counts no more."""
        self._counting = [saved for saved in self._counting if saved <= to_step]
        self._ripe = [saved for saved in self._ripe if saved <= to_step]
        self._last_bad = min(self._last_bad, to_step)


def steps_of(root: Path) -> list[int]:
    """The steps of the published checkpoints, oldest first."""
    return [step for folder in checkpoint_folders(root) if (step := step_of(folder)) is not None]


def healthy_steps(root: Path) -> set[int]:
    """The steps of the checkpoints that are there and tagged.

    A tag names the manifest it was given for, so another checkpoint of the same step does not inherit it.
    """
    return {step for step, digest in _read_tags(root).items() if digest == _digest(root, step)}


def steps_to_spare(root: Path) -> set[int]:
    """What rotation leaves for a rollback: the newest healthy checkpoint, and the oldest one after it, which is next to be.

    Without that one, a run that saves often would remove each checkpoint before enough steps have followed it.
    """
    newest = max(healthy_steps(root), default=-1)
    later = [step for step in steps_of(root) if step > newest]
    return {newest, *later[:1]}


def add_tags(root: Path, steps: Collection[int]) -> bool:
    """Tag checkpoints as healthy; False where that could not be written (a full disk costs the tags, not the run)."""
    known = {step: digest for step, digest in _read_tags(root).items() if digest == _digest(root, step)}
    new = {step: digest for step in steps if (digest := _digest(root, step)) is not None}
    content = json.dumps({"steps": {str(step): digest for step, digest in sorted((known | new).items())}}, indent=1)
    try:
        write_atomically(root / TAGS, content.encode(), durable=False)  # the loop does not wait for a disk
    except OSError:
        return False
    return True


def _digest(root: Path, step: int) -> str | None:
    try:
        return digest_of_manifest(folder_of(root, step))
    except OSError:
        return None


def _read_tags(root: Path) -> dict[int, str]:
    try:
        return {int(step): str(digest) for step, digest in read_json(root / TAGS)["steps"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
