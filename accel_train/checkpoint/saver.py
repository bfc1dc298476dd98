"""Save in the background: copy the state at once, and write it in a thread during the next steps."""

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
"""Seconds to wait for an abandoned save to stop."""
STARTING_TRIES = 20


class Saved(NamedTuple):
    """The result of one save."""

    step: int
    error: CheckpointError | None
    """Error of the save. None: the checkpoint is published."""
    left_undone: str | None = None
    """Reason why a later task (removing older checkpoints) failed. The checkpoint itself is published."""
    kept: Sequence[Path] = ()
    """Folders of removed checkpoints that still hold other files."""
    seconds: float = 0.0
    """Seconds from the first write to publication, without the copies made before."""


class Saver:
    """A writer of checkpoints below `root`, one at a time, in a thread (or synchronously if not `in_background`).

    A failed save leaves older checkpoints unchanged and is retried when the next one is due. After a second consecutive
    failure, `failed` is True.
    """

    def __init__(self, root: Path, *, in_background: bool) -> None:
        self.root, self._in_background = root, in_background
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._ended: list[Saved] = []
        self._failures_in_a_row = 0
        self.last_error: CheckpointError | None = None
        """Error of the newest save, or None if it succeeded."""

    @property
    def failed(self) -> bool:
        """Return whether two consecutive saves failed."""
        return self._failures_in_a_row > 1

    def save(
        self,
        step: int,
        writers: Mapping[str, Writer],
        then: Callable[[], Sequence[Path]],
        parts: "ShardWriter | None" = None,
    ) -> None:
        """Publish a checkpoint, then call `then` to remove older ones. Waits for a running save first.

        With `parts`, all processes save at the same time, each its part. Once `failed`, nothing is written: the run is
        about to end. Its outcome must not depend on when it learns of the second failure.
        """
        self.wait()
        if self.failed:
            return
        if not self._in_background:
            self._write(step, writers, then, parts)
            return
        # A daemon thread, so that a caller that gives up can exit. Other callers use `wait`.
        self._thread = threading.Thread(
            target=self._write, args=(step, writers, then, parts), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> float:
        """Wait until no save is running or the time is over. Return the seconds waited."""
        if self._thread is None:
            return 0.0
        began = time.monotonic()
        for _ in range(STARTING_TRIES):
            try:
                self._thread.join(timeout_seconds)
                break
            # The error of a signal handler interrupted `start`. The thread may still begin.
            except RuntimeError:
                time.sleep(0.05)
        if not self._thread.is_alive():
            self._thread = None
        return time.monotonic() - began

    def abandon(self) -> None:
        """Give up the running save: it is not published, and a hanging write is not waited for."""
        self._given_up.set()
        self.wait(GIVE_UP_SECONDS)

    def take_ended(self) -> list[Saved]:
        """Return the results of the saves that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _write(
        self, step: int, writers: Mapping[str, Writer], then: Callable[[], Sequence[Path]], parts: "ShardWriter | None"
    ) -> None:
        """Write in the thread. Catches all exceptions, because an exception in a thread would be lost."""
        began = time.monotonic()
        try:
            write = publish if parts is None else parts.publish
            write(self.root, step, writers, given_up=self._given_up.is_set)
        except GivenUp:
            return
        except Exception as error:
            self._failures_in_a_row += 1
            # A new exception: the frames of the caught one hold the copies.
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
