"""Stop requests: SIGTERM, SIGUSR1, Ctrl-C and a closed terminal (SIGHUP) set a flag; then the loop saves after a step, the same on all processes."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from accel_train.core.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
HANDLER_SECONDS = 1.0
"""Time for Python's handler of a signal to begin, before it counts as one that cannot run."""
BEFORE_THE_FIRST_STEP = "asked to stop before the first step; run the same command again to resume"
INTERRUPTED_MESSAGE = "interrupted; run the same command again to resume from the last checkpoint"


class StopRequest:
    """A flag that signals set while it is open: `with StopRequest() as stop: ... stop.requested`.

    The handler only sets the flag, since a signal arrives in the middle of anything, a collective included. While a run is
    prepared there is nothing to save, and the handler raises Preempted. A second Ctrl-C interrupts at once. Outside the
    main thread (some notebooks) signals cannot be caught, and the flag stays false. It can be opened several times.
    """

    _is_held = _came_while_held = False

    def __init__(self) -> None:
        self.requested = False
        self.insisted = False  # Ctrl-C came twice
        self.is_preparing = False
        self.has_failed = False
        """True once an error has ended the run: what comes later, a SIGTERM of the launcher say, does not change why."""
        self._previous: dict[int, Any] = {}
        self._times_open = 0
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """Return whether signals are caught."""
        return bool(self._previous)

    def __enter__(self) -> "StopRequest":
        self._times_open += 1
        if self._times_open == 1 and threading.current_thread() is threading.main_thread():
            # `nohup` ignores SIGHUP from the start. Torchrun's processes have sessions of their own: theirs comes from torchrun.
            is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and "TORCHELASTIC_RUN_ID" not in os.environ
            caught = [number for number in SIGNALS if number != signal.SIGHUP or not is_ignored]
            self._previous = {number: signal.signal(number, self._handle) for number in caught}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a data worker, forked while this was open
        if number == signal.SIGINT and self.requested:
            self.insisted = True
            raise KeyboardInterrupt
        self.requested = True
        if self.has_failed and number != signal.SIGINT:
            return
        if number == signal.SIGINT and not self.is_preparing:
            # write(2) alone is safe here: the interrupted code may hold a lock of the buffered streams.
            with suppress(OSError):
                os.write(2, b"\nstopping: saving at the end of this step; press Ctrl-C again to stop at once\n")
        if self.is_preparing and StopRequest._is_held:
            StopRequest._came_while_held = True
        elif self.is_preparing:
            raise Preempted(BEFORE_THE_FIRST_STEP)

    @staticmethod
    @contextmanager
    def held() -> Iterator[None]:
        """Inside, a signal waits for the end: what a process sent next, out of the middle of a collective, would not fit the others'.

        Raises:
            Preempted: a signal came.
        """
        StopRequest._is_held, StopRequest._came_while_held = True, False
        try:
            yield
        finally:
            StopRequest._is_held = False
        if StopRequest._came_while_held:
            raise Preempted(BEFORE_THE_FIRST_STEP)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Inside, where nothing is trained yet, a signal raises Preempted; an error that follows from it becomes Preempted.

        Raises:
            Preempted: a signal came.
        """
        self.raise_if_requested()
        self.is_preparing = True
        try:
            yield
        except BaseException as error:
            if self.requested and not (self.insisted or self.has_failed or isinstance(error, Preempted)):
                raise Preempted(BEFORE_THE_FIRST_STEP) from error
            raise
        finally:
            self.is_preparing = False
        self.raise_if_requested()

    def raise_if_requested(self) -> None:
        """Raise Preempted where a signal came: what its handler raised may have been caught, for libraries try one thing after another."""
        if self.requested:
            raise Preempted(BEFORE_THE_FIRST_STEP)

    def __exit__(self, *_: object) -> None:
        self._times_open -= 1
        if self._times_open == 0:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous.clear()


@contextmanager
def stopped_while_joining() -> Iterator[None]:
    """Inside, a signal ends this process with exit code 75, even where the main thread waits for others in native code.

    Python's handlers run in the main thread, between two of its instructions, and there may be none for half an hour: while
    processes join, they wait for one that was killed. So a thread reads the byte that C's handler writes
    (`signal.set_wakeup_fd`), and ends the process where Python's handler does not run soon.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before, is_over = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), threading.Event()

    def listen() -> None:
        while received := os.read(reader, 1):
            if received[0] in SIGNALS and not is_over.wait(HANDLER_SECONDS):
                os.write(2, f"preempted: {BEFORE_THE_FIRST_STEP}\n".encode())
                os._exit(75)
        os.close(reader)

    threading.Thread(target=listen, name="signals", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


@contextmanager
def signals_put_back() -> Iterator[None]:
    """Restore the handlers of signals at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
