"""Being asked to stop: SIGTERM, SIGUSR1 and Ctrl-C set a flag; the loop saves at the next step that all processes agree on."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if getattr(signal, name, None) is not None
)


class StopRequest:
    """Catches signals while it is open: `with StopRequest() as stop: ... stop.requested`.

    The handler only sets a flag, since a signal arrives in the middle of anything, a collective included. A second Ctrl-C
    interrupts at once. Outside the main thread (some notebooks) signals cannot be caught, and the flag stays down.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if number == signal.SIGINT:
            # write(2) alone is safe here: the interrupted code may hold a lock of the buffered streams.
            with suppress(OSError):
                os.write(2, b"\nstopping: saving at the end of this step; press Ctrl-C again to stop at once\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
