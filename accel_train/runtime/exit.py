"""End a process: its exit code, its error message, and the order in which it closes resources."""

import errno
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import extract_tb
from typing import NoReturn

from accel_train.core.errors import (
    OUT_OF_MEMORY_REMEDY,
    CheckpointError,
    DataError,
    DataWorkerGone,
    ExitedEarly,
    OutOfMemory,
    Preempted,
    ProcessFailed,
    RecipeError,
    RestartNeeded,
    TrainingStopped,
    UserError,
)
from accel_train.core.redaction import print_traceback, redact_text
from accel_train.core.terminal import paint, use_colour
from accel_train.runtime.heartbeat import Failure, is_peer_error
from accel_train.runtime.launcher import launch_mistake
from accel_train.runtime.signals import INTERRUPTED_MESSAGE
from accel_train.runtime.stacks import finish_writing
from accel_train.runtime.watchdog import AGREED, Watchdog

WAIT_FOR_RANK_0_SECONDS = 8.0
"""Seconds that other ranks wait for rank 0 to report an error. On a busy machine, processes are seconds apart."""
INTERRUPTED = 130
OUTPUT_CLOSED = 141
"""Exit code that a shell reports for a program ended by SIGPIPE: `accel-train plan RECIPE | head -1`."""
WRITING_SECONDS = 60.0
"""Seconds that a failed process waits for a checkpoint that is being written."""
_DATA_WORKER_ERRORS_OF_TORCH = ("DataLoader worker", "DataLoader timed out", "Pin memory thread exited unexpectedly")
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of a failure; None for an unexpected error."""
    kinds: dict[type[BaseException], int] = {
        ExitedEarly: 1,
        UserError: 2,
        DataError: 2,
        RecipeError: 2,
        TrainingStopped: 3,
        CheckpointError: 4,
        Preempted: 75,
        RestartNeeded: 75,
        KeyboardInterrupt: INTERRUPTED,
        MemoryError: 6,
        OutOfMemory: 6,
    }
    if isinstance(error, ProcessFailed):
        return error.exit_code
    for kind, code in kinds.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return 4
    if compiled_file_of(error) is not None:
        return 1
    if "torch" not in sys.modules or not isinstance(error, RuntimeError):
        return None
    from accel_train.runtime.memory import is_out_of_memory

    if is_out_of_memory(error):
        return 6
    if is_peer_error(error):
        return 5 if (cause := _cause()) is None else cause.exit_code
    return 5 if is_data_worker_error(error) else None


def _cause() -> Failure | None:
    """Return the failure of another process that made this one fail, if the watchdog knows one."""
    return None if Watchdog.current is None else Watchdog.current.cause


def is_data_worker_error(error: BaseException) -> bool:
    """Return whether a process that reads the data ahead has died or hangs; torch says so in the text of a RuntimeError
    alone.
    """
    of_torch = isinstance(error, RuntimeError) and str(error).startswith(_DATA_WORKER_ERRORS_OF_TORCH)
    return of_torch or isinstance(error, DataWorkerGone)


def compiled_file_of(error: BaseException) -> str | None:
    """Return the cached file of torch.compile that could not be loaded; None for other errors."""
    path, folder = getattr(error, "path", None), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return str(path) if isinstance(error, ImportError) and path and folder and path.startswith(f"{folder}/") else None


def is_output_closed() -> bool:
    """Return whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Turn `sys.exit()` inside the context into an error, so that an unfinished run does not look finished.

    Raises:
        ExitedEarly: some code exited, with any code. The message names the place.
    """
    try:
        yield
    except SystemExit as asked:
        frames = [frame for frame in extract_tb(asked.__traceback__) if "_sitebuiltins" not in frame.filename]
        where = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}"
        given = "" if asked.code is None else repr(asked.code)
        raise ExitedEarly(
            f"exit({given}) was called before the run was done ({where}); raise an error there that names the problem"
        ) from asked


def report(error: BaseException) -> None:
    """Print each line of an error on stderr, with the rank.

    Rank 0 alone prints errors that all processes raise together.
    """
    rank, who, watchdog, cause = os.environ.get("RANK", "0"), "", Watchdog.current, _cause()
    if (isinstance(error, AGREED) and rank != "0") or (watchdog is not None and watchdog.is_reported):
        return
    if watchdog is not None and watchdog.heartbeats is not None:
        who = "" if isinstance(error, AGREED) and cause is None else watchdog.who
    elif rank != "0" and launch_mistake(os.environ) is None:
        # All processes find the same mistake in a recipe. The launcher ends the others when rank 0 has failed, during
        # this sleep.
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(WAIT_FOR_RANK_0_SECONDS)
        who = f"rank {rank}: "
    if os.environ.get("ACCEL_TRAIN_DEBUG") == "1":
        print_traceback(error)
    is_stop = isinstance(error, Preempted) if cause is None else cause.event == "preempted"
    kind = "preempted" if is_stop else "error"
    label = paint(f"{kind}:", "bold", "yellow" if is_stop else "red", on=use_colour(sys.stderr))
    try:
        for line in message_of(error).splitlines():
            print(f"{label} {who}{line}", file=sys.stderr, flush=True)
    # The terminal is closed. Writing the rest at exit would change the exit code.
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def message_of(error: BaseException) -> str:
    """Return the text to print for an error, without secrets, one line per problem.

    If another process failed earlier, its failure is the text.
    """
    cause = _cause()
    text = cause.message if cause is not None else redact_text(str(error).strip()) or type(error).__name__
    if cause is None and is_data_worker_error(error):
        text += "; workers read the data ahead (data.num_workers): is the host out of memory, or the storage stuck?"
    if (path := compiled_file_of(error)) is not None:
        text = f"{text}; torch cannot load this compiled code. Remove {path}, and it is compiled again"
    if isinstance(error, KeyboardInterrupt) and not error.args:
        text = INTERRUPTED_MESSAGE
    if isinstance(error, OutOfMemory):
        text = f"out of memory: {text}"
    elif exit_code(error) == 6 and not is_peer_error(error):
        text = f"out of memory: {text.splitlines()[0]}; {OUT_OF_MEMORY_REMEDY}"
    return text


def end_process_group() -> None:
    """Destroy the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def exit_process(code: int) -> NoReturn:
    """End this process with an exit code.

    One of several processes ends immediately. Python's normal exit would stop gloo's threads anywhere. A thread that
    still waits for the interpreter's lock then aborts the process (torch 2.13, on a busy machine).

    A process that was interrupted twice also ends immediately. Its checkpoint may still be written.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and code != INTERRUPTED:
        # Otherwise Python searches torch's million objects for garbage three times, for more than a second.
        gc.freeze()
        sys.exit(code)
    finish_writing(0.0 if code == INTERRUPTED else WRITING_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        # The reader has closed the stream.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
