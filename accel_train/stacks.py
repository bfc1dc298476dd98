"""Where the threads of this process are, and what is left to do before it ends: for whoever ends it from outside of its loop."""

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from accel_train.peers import within
from accel_train.state import CheckpointError, Preempted

LIBRARY = os.path.dirname(os.__file__)
WAITING_FUNCTIONS = ("_engine_run_backward", "_receive", "read_last", "settle", "synchronize", "wait_for_everyone")
"""Where a process waits for others, beside whatever is in torch.distributed: the gradients are reduced in the backward."""


def write_stacks(path: Path, rank: int, *, aloud: bool) -> None:
    """The stack of every thread of this process, into a file and, `aloud`, to stderr; a disk that does not answer is left."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    within(2.0, write)
    if aloud:
        with suppress(OSError):
            os.write(2, f"rank {rank}, all threads:\n".encode())
            faulthandler.dump_traceback(2, all_threads=True)


def one_line(error: BaseException) -> str:
    """An error in a line: what a user's mistake says of itself, and else its kind before it."""
    text = next(iter(str(error).strip().splitlines()), "")
    kind = type(error).__name__
    return (
        text if text and isinstance(error, ValueError | CheckpointError | Preempted) else f"{kind}: {text}".rstrip(": ")
    )


def finish_writing(seconds: float) -> None:
    """Let threads that write (a checkpoint) come to their end, for so long."""
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.main_thread(), threading.current_thread()):
            thread.join(max(0.0, deadline - time.monotonic()))


def place_of_main_thread() -> tuple[str, bool]:
    """The innermost line of the main thread outside of libraries, and whether it waits for other processes there."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    waits, depth, outermost = False, 0, frame
    while frame is not None:
        path = frame.f_code.co_filename
        if depth < 12 and ("torch/distributed" in path or frame.f_code.co_name in WAITING_FUNCTIONS):
            waits = True
        if not path.startswith((LIBRARY, "<")) and "site-packages" not in path:
            return f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno} ({frame.f_code.co_name})", waits
        frame, depth = frame.f_back, depth + 1
    return (f"{outermost.f_code.co_filename}:{outermost.f_lineno}" if outermost else "no line of Python"), waits
