"""Saving beside the training: the state is copied at once, and written by a thread while the next steps run."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from accel_train.checkpoint import Writer, publish
from accel_train.state import CheckpointError


class Saved(NamedTuple):
    """How one save ended."""

    step: int
    error: CheckpointError | None
    """None: it is published."""


class Saver:
    """Writes checkpoints below `root`, one at a time, in a thread of its own (or, not `in_background`, at once).

    A save that fails leaves the older checkpoints as they are, and is tried again when the next one is due; a second one
    in a row means that the disk will not do, and `failed` says so.
    """

    def __init__(self, root: Path, *, in_background: bool) -> None:
        self.root, self._in_background = root, in_background
        self._thread: threading.Thread | None = None
        self._ended: list[Saved] = []
        self._failures_in_a_row = 0
        self.last_error: CheckpointError | None = None
        """Why the newest save could not be written; None where it could."""

    @property
    def failed(self) -> bool:
        """Whether two saves in a row could not be written."""
        return self._failures_in_a_row > 1

    def save(self, step: int, writers: Mapping[str, Writer], then: Callable[[], object]) -> None:
        """Publish a checkpoint and then call `then`; waits first for the one that is being written, if any."""
        self.wait()
        if not self._in_background:
            self._write(step, writers, then)
            return
        # Not a daemon: a process that ends by itself finishes its checkpoint.
        self._thread = threading.Thread(target=self._write, args=(step, writers, then), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def take_ended(self) -> list[Saved]:
        """How saves ended since the last call."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return ended

    def _write(self, step: int, writers: Mapping[str, Writer], then: Callable[[], object]) -> None:
        try:
            publish(self.root, step, writers)
            then()
        except CheckpointError as error:
            self._failures_in_a_row += 1
            self.last_error = error
        else:
            self._failures_in_a_row = 0
            self.last_error = None
        self._ended.append(Saved(step, self.last_error))
