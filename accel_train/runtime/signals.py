"""Being asked to stop: SIGTERM, SIGUSR1, Ctrl-C and a closed terminal (SIGHUP) set a flag; the loop saves at the next step that all processes agree on."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from accel_train.state import Preempted

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
    if getattr(signal, name, None) is not None
)
HANDLER_SECONDS = 1.0
"""How long Python's own handler of a signal has, before it counts as one that cannot run."""
BEFORE_THE_FIRST_STEP = "asked to stop before the first step of this sitting; run the same command again to go on"


def is_ignored(number: int) -> bool:
    """Whether a signal is not to be heard: SIGHUP under `nohup`, which has it ignored from the start.

    Not under torchrun: its processes have sessions of their own, so a SIGHUP comes from torchrun, which ends.
    """
    is_hangup = number == getattr(signal, "SIGHUP", None)
    return is_hangup and signal.getsignal(number) is signal.SIG_IGN and "TORCHELASTIC_RUN_ID" not in os.environ


class StopRequest:
    """Catches signals while it is open: `with StopRequest() as stop: ... stop.requested`.

    The handler only sets a flag, since a signal arrives in the middle of anything, a collective included; while a run is
    only being prepared there is nothing to save, and it raises Preempted. A second Ctrl-C interrupts at once. Outside the
    main thread (some notebooks) signals cannot be caught, and the flag stays down. Opened again, it stays as it is.
    """

    def __init__(self) -> None:
        self.requested = False
        self.insisted = False
        """Ctrl-C came twice."""
        self.is_preparing = False
        self._previous: dict[int, Any] = {}
        self._times_open = 0
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether signals are caught."""
        return bool(self._previous)

    def __enter__(self) -> "StopRequest":
        self._times_open += 1
        if self._times_open == 1 and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if is_ignored(number):
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a data worker, forked while this was open
        if number == signal.SIGINT and self.requested:
            self.insisted = True
            raise KeyboardInterrupt
        self.requested = True
        if number == signal.SIGINT and not self.is_preparing:
            # write(2) alone is safe here: the interrupted code may hold a lock of the buffered streams.
            with suppress(OSError):
                os.write(2, b"\nstopping: saving at the end of this step; press Ctrl-C again to stop at once\n")
        if self.is_preparing:
            raise Preempted(BEFORE_THE_FIRST_STEP)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Inside, nothing has been trained yet, so a signal ends it where it is; what fails because of that is no failure.

        Raises:
            Preempted: a signal came.
        """
        if self.requested:
            raise Preempted(BEFORE_THE_FIRST_STEP)
        self.is_preparing = True
        try:
            yield
        except BaseException as error:
            if self.requested and not self.insisted and not isinstance(error, Preempted):
                raise Preempted(BEFORE_THE_FIRST_STEP) from error
            raise
        finally:
            self.is_preparing = False
        if self.requested:  # raised where it was caught: libraries try one thing after another
            raise Preempted(BEFORE_THE_FIRST_STEP)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._times_open -= 1
        if self._times_open == 0:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous.clear()


@contextmanager
def heard_while_waiting() -> Iterator[None]:
    """Inside, a signal ends this process, with exit code 75, even where the main thread waits in foreign code for others.

    Python's handlers run in the main thread, between two of its instructions, and there may be none for half an hour: while
    processes join, those that have come wait for one that was killed. The byte that C's handler writes
    (`signal.set_wakeup_fd`) is read by a thread; a handler that can run has its time to.
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
    """Afterwards, signals do what they did before."""
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
