"""The progress of this process, the stacks of its threads, and the wait for its writers, for the watchdog."""

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from accel_train.core.errors import CheckpointError, OutOfMemory, Preempted, RestartNeeded
from accel_train.core.work import current_work

T = TypeVar("T")
Done = Callable[[], tuple[int, int]]
"""Function that returns the numbers of steps done and of batches evaluated."""

LIBRARY = os.path.dirname(os.__file__)
PREPARING = "preparing the run"
WAITING_FUNCTIONS = ("_engine_run_backward", "_receive", "read_last", "settle", "synchronize", "wait_for_all")
"""Functions in which a process waits for others, in addition to torch.distributed. The backward reduces gradients."""


class Progress:
    """The progress of the loop, and the time since the last progress."""

    def __init__(self) -> None:
        self.idle_seconds = self.longest_idle_seconds = 0.0
        """Seconds since the last progress, and the longest such time between steps."""
        self.has_begun = False
        self.done: Done = lambda: (0, 0)
        self.phase: Callable[[], str] = str
        """Function that returns the current phase of the loop: train, evaluate, save."""
        self.work = PREPARING
        """Work outside of steps at the last look; "" in a step."""
        self._first_step = 0
        self._last: object = None

    def begin(self, done: Done, phase: Callable[[], str]) -> None:
        """Expect steps from now on."""
        self.idle_seconds, self._first_step = 0.0, done()[0]
        self.phase, self.done, self.has_begun = phase, done, True

    @property
    def is_first_step(self) -> bool:
        """Return whether this process has not finished a step yet."""
        return self.done()[0] == self._first_step

    def look(self, elapsed_seconds: float) -> None:
        """Record whether the loop has moved since the last look, `elapsed_seconds` ago."""
        work, num_beats = current_work()
        now = (self.done(), self.phase(), num_beats)
        if now == self._last:
            self.idle_seconds += elapsed_seconds
        else:
            if not (self.is_first_step or self.work):
                self.longest_idle_seconds = max(self.longest_idle_seconds, self.idle_seconds)
            self._last, self.idle_seconds = now, 0.0
        self.work = work if self.has_begun else work or PREPARING

    def describe(self) -> str:
        """Return the end of a sentence: the last step, and the line of code that the main thread executes."""
        return f"has done step {self.done()[0]}, and is in {place_of_main_thread()[0]}"


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of a call; None if it fails or takes longer. Its thread then continues to run."""
    answer: list[T] = []

    def run() -> None:
        with suppress(Exception):
            answer.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def write_stacks(path: Path, rank: int) -> None:
    """Write the stack of every thread of this process to stderr, and into a file if its disk answers in time."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            faulthandler.dump_traceback(file)

    within(2.0, write)
    with suppress(OSError):
        os.write(2, f"rank {rank}, all threads:\n".encode())
        faulthandler.dump_traceback(2)


def one_line(error: BaseException) -> str:
    """Return an error as one line: its message if it is meant for users, otherwise its type and message."""
    text = next(iter(str(error).strip().splitlines()), "")
    is_for_users = isinstance(error, ValueError | CheckpointError | Preempted | RestartNeeded | OutOfMemory)
    return text if text and is_for_users else f"{type(error).__name__}: {text}".rstrip(": ")


def finish_writing(seconds: float) -> None:
    """Wait at most `seconds` for threads that write (a checkpoint)."""
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.main_thread(), threading.current_thread()):
            thread.join(max(0.0, deadline - time.monotonic()))


def place_of_main_thread() -> tuple[str, bool]:
    """Return the main thread's innermost line outside of libraries, and whether it waits for other processes there."""
    # A garbage collection inside of the call crashes Python before 3.12 (python/cpython#106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if was_enabled:
            gc.enable()
    if innermost is None:
        return "no line of Python", False
    waits = False
    for depth, (frame, line) in enumerate(traceback.walk_stack(innermost)):
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        waits |= depth < 12 and ("torch/distributed" in path or function in WAITING_FUNCTIONS)
        if not path.startswith((LIBRARY, "<")) and "site-packages" not in path:
            return f"{'/'.join(Path(path).parts[-2:])}:{line} ({function})", waits
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}", waits
