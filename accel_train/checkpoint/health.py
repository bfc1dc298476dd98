"""Known-good checkpoints: checkpoints followed by enough consecutive clean steps. Rollbacks only use these."""

from collections.abc import Collection
from pathlib import Path

from accel_train.checkpoint.store import MANIFEST, folder_of, steps_of
from accel_train.core.files import sha256
from accel_train.core.json_io import read_plain_json, write_plain_json

TAGS = "healthy.json"


class Health:
    """A tracker that tags known-good checkpoints of one run. It does nothing if `root` is None.

    `root` is None on processes that write no checkpoints. A tag is not part of the checkpoint, whose files never
    change. A lost tag only costs a rollback some steps.
    """

    def __init__(self, root: Path | None, after_steps: int, last_bad_step: int | None) -> None:
        self._root, self._after_steps = root, after_steps
        self._last_bad = last_bad_step or 0
        self._counting = [] if root is None else sorted(set(steps_of(root)) - healthy_steps(root))
        self._ripe_to = -1
        """Last step whose checkpoints have been followed by enough clean steps."""

    def begun(self, step: int) -> None:
        """Start counting the steps after a checkpoint, while it is still being written."""
        if self._root is not None and step not in self._counting:
            self._counting.append(step)

    def note(self, step: int, *, clean: bool) -> None:
        """Record a finished step, and tag the checkpoints that enough clean steps have followed."""
        if not clean:
            self._last_bad = step
        if step - self._last_bad >= self._after_steps:
            self._ripe_to = step - self._after_steps
        self.tag()

    def tag(self) -> None:
        """Tag the known-good checkpoints that are on disk."""
        ripe = [step for step in self._counting if step <= self._ripe_to]
        if not ripe:
            return
        assert self._root is not None, "only the writing process counts"
        published = [step for step in ripe if folder_of(self._root, step).exists()]
        if published and add_tags(self._root, published):
            # An older checkpoint that does not exist was never written, or was rotated away.
            self._counting = [step for step in self._counting if step > max(published)]

    def go_back(self, to_step: int) -> None:
        """Forget everything after this step. The run continues from its checkpoint."""
        self._counting = [saved for saved in self._counting if saved <= to_step]
        self._ripe_to = min(self._ripe_to, to_step)
        self._last_bad = min(self._last_bad, to_step)


def healthy_steps(root: Path) -> set[int]:
    """Return the steps of the existing checkpoints with a tag.

    A tag holds the digest of the checkpoint's manifest, so another checkpoint of the same step does not inherit it.
    """
    return {step for step, digest in _read_tags(root).items() if digest == _digest(root, step)}


def protected_steps(root: Path) -> set[int]:
    """Return the steps that rotation keeps for a rollback: the newest known-good checkpoint and the oldest after it.

    The oldest after it becomes known-good next. If rotation removed it, a run that saves often would never have a new
    known-good checkpoint.
    """
    newest = max(healthy_steps(root), default=-1)
    later = [step for step in steps_of(root) if step > newest]
    return {newest, *later[:1]}


def add_tags(root: Path, steps: Collection[int]) -> bool:
    """Tag checkpoints as known-good. Return False if the tags could not be written (for example, disk full)."""
    tagged = sorted({*healthy_steps(root), *steps})
    tags = {str(step): digest for step in tagged if (digest := _digest(root, step)) is not None}
    try:
        # Not durable, so that the loop does not wait for a disk.
        write_plain_json(root / TAGS, {"steps": tags}, durable=False)
    except OSError:
        return False
    return True


def _digest(root: Path, step: int) -> str | None:
    try:
        return sha256(folder_of(root, step) / MANIFEST)
    except OSError:
        return None


def _read_tags(root: Path) -> dict[int, str]:
    try:
        return {int(step): str(digest) for step, digest in read_plain_json(root / TAGS)["steps"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
