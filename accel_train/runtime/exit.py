"""How a process of several, or alone, ends: its exit code, the one line that says why, and in which order things are let go."""

import errno
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import extract_tb
from typing import TYPE_CHECKING, NoReturn

from accel_train.flags import UserError
from accel_train.launcher import launch_mistake
from accel_train.peers import is_peer_error
from accel_train.redaction import print_traceback, redact_text
from accel_train.stacks import finish_writing
from accel_train.state import (
    CheckpointError,
    DataError,
    ExitedEarly,
    OutOfMemory,
    Preempted,
    RecipeError,
    TrainingStopped,
)
from accel_train.watchdog import Watchdog

if TYPE_CHECKING:
    from torch import nn

WAIT_FOR_RANK_0_SECONDS = 8.0
"""On a busy machine processes that were started together come to the same line seconds apart."""
INTERRUPTED = 130
OUTPUT_CLOSED = 141
"""As a shell shows a program that SIGPIPE ended: `accel-train plan RECIPE | head -1`."""
WRITING_SECONDS = 60.0
"""How long a process that has failed waits for a checkpoint that is being written."""
DATA_WORKER_ERRORS = ("DataLoader worker", "DataLoader timed out", "Pin memory thread exited unexpectedly")
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def exit_code(error: BaseException) -> int | None:
    """What a failure exits with; None for one that nobody foresaw."""
    kinds: dict[type[BaseException], int] = {
        ExitedEarly: 1, UserError: 2, DataError: 2, RecipeError: 2, TrainingStopped: 3, CheckpointError: 4, Preempted: 75, KeyboardInterrupt: INTERRUPTED, MemoryError: 6, OutOfMemory: 6,
    }  # fmt: skip
    for kind, code in kinds.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return 4
    torch = sys.modules.get("torch")  # what torch raises can only come up where it has been imported
    if torch is None or not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or "DefaultCPUAllocator: can't allocate" in text
    ):
        return 6
    return 5 if is_peer_error(error) or text.startswith(DATA_WORKER_ERRORS) else None


def is_output_closed() -> bool:
    """Return whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Inside, `sys.exit()` is an error, whatever its code: what is not done must not end as if it were.

    Raises:
        ExitedEarly: some code exited; the text says where.
    """
    try:
        yield
    except SystemExit as asked:
        frames = [frame for frame in extract_tb(asked.__traceback__) if "_sitebuiltins" not in frame.filename]
        where = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}"
        given = "" if asked.code is None else repr(asked.code)
        raise ExitedEarly(
            f"exit({given}) was called before the run was done ({where}); raise an error there that says what is wrong"
        ) from asked


def report(error: BaseException) -> None:
    """One line on stderr for each problem, from one process of all: rank 0, or one that fails where rank 0 does not."""
    rank, who = os.environ.get("RANK", "0"), ""
    watchdog = Watchdog.current
    if rank != "0" and isinstance(error, TrainingStopped | CheckpointError | Preempted):
        return  # all processes have agreed on these, so rank 0 says it
    if watchdog is not None and watchdog.peers is not None:
        if not watchdog.speaks():
            return
        who = "" if rank == "0" or watchdog.first_cause else f"rank {rank}: "
    elif rank != "0" and launch_mistake(os.environ) is None:
        # The launcher ends the others as soon as one has failed: if rank 0 has, it speaks, and this sleep is not survived.
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(WAIT_FOR_RANK_0_SECONDS)
        who = f"rank {rank}: "
    if os.environ.get("ACCEL_TRAIN_DEBUG") == "1":
        print_traceback(error)
    text = redact_text(str(error).strip()) or type(error).__name__
    if watchdog is not None and watchdog.first_cause is not None:
        text = watchdog.first_cause
    if isinstance(error, RuntimeError) and text.startswith(DATA_WORKER_ERRORS):
        text += "; workers read the data ahead (data.num_workers): is the host out of memory, or the storage stuck?"
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted; run the same command to go on from the last checkpoint"
    if exit_code(error) == 6:
        remedy = (
            "lower batch.per_device_batch_size where it is above 1, set precision.gradient_checkpointing, or spread the model "
            "over more GPUs (parallel.strategy: fsdp2)"
        )
        text = f"out of memory: {text.splitlines()[0]}; {remedy}"
    kind = "preempted" if isinstance(error, Preempted) else "error"
    try:
        for line in text.splitlines():
            print(f"{kind}: {who}{line}", file=sys.stderr, flush=True)
    except OSError:  # the terminal is closed; what is left to write would cost the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    if watchdog is not None and not isinstance(error, TrainingStopped | CheckpointError | Preempted):
        watchdog.see_others_off()


def leave_the_other_processes(module: "nn.Module") -> None:
    """The process group ends in good order, once nothing is left to do together."""
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    # DDP's reducer must not be the last to hold the process group: it is freed with the interpreter's lock held, and joins
    # gloo's threads, which may be waiting for that lock (torch 2.13: one exit in ten hung on a busy machine).
    for name in ("reducer", "logger"):
        if hasattr(module, name):
            setattr(module, name, None)
    torch.distributed.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """The end of this process, with its exit code.

    One of several processes ends at once. Python's own way out would stop gloo's threads where they happen to be, and one
    that still waits for the interpreter's lock then aborts the process (torch 2.13, on a busy machine). So does a process
    that was interrupted twice, whose checkpoint may still be written.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and code != INTERRUPTED:
        sys.exit(code)
    finish_writing(0.0 if code == INTERRUPTED else WRITING_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by whoever read it
            stream.flush()
    os._exit(code)
