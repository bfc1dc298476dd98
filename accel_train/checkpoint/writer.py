"""Saving beside the training: the state is copied at once, and written by a thread while the next steps run."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from accel_train.checkpoint.store import GivenUp, Writer, publish
from accel_train.core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_train.checkpoint.sharded import ShardWriter

GIVE_UP_SECONDS = 2.0
"""How long a save that is abandoned may take to notice."""
STARTING_TRIES = 20


class Saved(NamedTuple):
    """The end of one save."""

    step: int
    error: CheckpointError | None
    """None: it is published."""
    left_undone: str | None = None
    """It is published, and what was to be done then (removing older ones) failed for this reason."""
    kept: Sequence[Path] = ()
    """Folders of removed checkpoints in which other files are kept."""
    seconds: float = 0.0
    """From the first write to the publication; what `save` copies before that does not count."""


class Saver:
    """Writes checkpoints below `root`, one at a time, in a thread of its own (or, not `in_background`, at once).

    A save that fails leaves the older checkpoints as they are, and is tried again when the next one is due; a second one
    in a row means that the disk will not do, and `failed` says so.
    """

    def __init__(self, root: Path, *, in_background: bool) -> None:
        self.root, self._in_background = root, in_background
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._ended: list[Saved] = []
        self._failures_in_a_row = 0
        self.last_error: CheckpointError | None = None
        """Return why the newest save could not be written; None where it could."""

    @property
    def failed(self) -> bool:
        """Return whether two saves in a row could not be written."""
        return self._failures_in_a_row > 1

    def save(
        self,
        step: int,
        writers: Mapping[str, Writer],
        then: Callable[[], Sequence[Path]],
        parts: "ShardWriter | None" = None,
    ) -> None:
        """Publish a checkpoint, and call `then`, which removes older ones; waits for one that is being written.

        With `parts` all processes save at once, each its own. Once `failed`, nothing more is written: the run is about to end,
        and how it ends must not hang on whether it heard of the second failure before the third save was due.
        """
        self.wait()
        if self.failed:
            return
        if not self._in_background:
            self._write(step, writers, then, parts)
            return
        # A daemon, so that a caller who gives up on it can leave; others wait (see `wait`).
        self._thread = threading.Thread(
            target=self._write, args=(step, writers, then, parts), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> float:
        """Until nothing is being written, or the time is over; returns the seconds it took."""
        if self._thread is None:
            return 0.0
        began = time.monotonic()
        for _ in range(STARTING_TRIES):
            try:
                self._thread.join(timeout_seconds)
                break
            except RuntimeError:  # a signal handler's error has broken `start` off, and it may yet begin
                time.sleep(0.05)
        if not self._thread.is_alive():
            self._thread = None
        return time.monotonic() - began

    def abandon(self) -> None:
        """Give up what is being written: it is not published, and a write that hangs is not waited for."""
        self._given_up.set()
        self.wait(GIVE_UP_SECONDS)

    def take_ended(self) -> list[Saved]:
        """Return how saves ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _write(
        self, step: int, writers: Mapping[str, Writer], then: Callable[[], Sequence[Path]], parts: "ShardWriter | None"
    ) -> None:
        """Write in the thread; no exception leaves it, since nobody would see it."""
        began = time.monotonic()
        try:
            write = publish if parts is None else parts.publish
            write(self.root, step, writers, given_up=self._given_up.is_set)
        except GivenUp:
            return
        except Exception as error:
            self._failures_in_a_row += 1
            # A new one: the caught one's frames hold the copies that were to be written.
            self.last_error = CheckpointError(str(error) or type(error).__name__)
            self._ended.append(Saved(step, self.last_error))
            return
        self._failures_in_a_row, self.last_error = 0, None
        seconds, left_undone = time.monotonic() - began, None
        kept: Sequence[Path] = ()
        try:
            kept = then()
        except Exception as error:
            left_undone = f"{type(error).__name__}: {error}"
        self._ended.append(Saved(step, None, left_undone, kept, seconds))
