"""Stop requests: SIGTERM, SIGUSR1, SIGHUP (a closed terminal), and Ctrl-C set a flag.

The loop then saves after a step, the same step on all processes.
"""

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
"""Seconds for Python's signal handler to start, before the process counts as unable to run it."""
BEFORE_THE_FIRST_STEP = "asked to stop before the first step; run the same command again to resume"
INTERRUPTED_MESSAGE = "interrupted; run the same command again to resume from the last checkpoint"


class StopRequest:
    """A flag that signals set while it is open: `with StopRequest() as stop: ... stop.requested`.

    A signal can arrive at any point, also in a collective, so the handler only sets the flag. While a run is being
    prepared, nothing needs saving, and the handler raises Preempted. A second Ctrl-C interrupts immediately. Signals
    cannot be caught outside the main thread (some notebooks), and the flag then stays false. A request can be opened
    several times.
    """

    _is_held = _came_while_held = False

    def __init__(self) -> None:
        self.requested = False
        # Whether Ctrl-C came twice.
        self.insisted = False
        self.is_preparing = False
        self.has_failed = False
        """Whether an error has ended the run. Later signals, such as a launcher's SIGTERM, do not change the reason."""
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
            # `nohup` ignores SIGHUP from the start. torchrun's processes have separate sessions, and get SIGHUP from
            # torchrun.
            is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and "TORCHELASTIC_RUN_ID" not in os.environ
            caught = [number for number in SIGNALS if number != signal.SIGHUP or not is_ignored]
            self._previous = {number: signal.signal(number, self._handle) for number in caught}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # This is a data worker that was forked while the request was open.
            return
        if number == signal.SIGINT and self.requested:
            self.insisted = True
            raise KeyboardInterrupt
        self.requested = True
        if self.has_failed and number != signal.SIGINT:
            return
        if number == signal.SIGINT and not self.is_preparing:
            # Only write(2) is safe here, because the interrupted code may hold a lock of the buffered streams.
            with suppress(OSError):
                os.write(2, b"\nstopping: saving at the end of this step; press Ctrl-C again to stop at once\n")
        if self.is_preparing and StopRequest._is_held:
            StopRequest._came_while_held = True
        elif self.is_preparing:
            raise Preempted(BEFORE_THE_FIRST_STEP)

    @staticmethod
    @contextmanager
    def held() -> Iterator[None]:
        """Delay signals until the end of the context.

        A signal in the middle of a collective would interrupt it. The next collective of this process would then not
        match the other processes.

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
        """Make signals raise Preempted inside the context, where nothing is trained yet.

        Errors that follow from a signal also become Preempted.

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
        """Raise Preempted if a signal came. A library may have caught the exception that its handler raised."""
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
    """Make a signal inside the context end this process with exit code 75, even during a wait in native code.

    Python's signal handlers run in the main thread, between two instructions. While processes join, they may wait half
    an hour for a process that was killed. A thread therefore reads the byte that C's handler writes
    (`signal.set_wakeup_fd`). It ends the process if Python's handler does not run soon.
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
    """Restore the signal handlers at the end of the context."""
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
