"""Processes that are joined by gloo on the CPU, or by NCCL on GPUs, and take any number of calls."""

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self

from accel_train.experiments.subprocess_run import LAUNCHER_VARIABLES
from accel_train.runtime.launcher import free_port, stop_with_parent

SECONDS = 120.0
"""Time limit of one training, including the start of its processes."""
SECONDS_FOR_OTHERS = 10.0
"""Time that the other processes have to end after one has failed."""
PRELOADED = ("accel_train.training.train", "accel_train.tasks.causal_lm.task", "accel_train.parallel.strategies")


class Failure(NamedTuple):
    """The end of a call that failed."""

    text: str
    is_refusal: bool
    """Whether it is an error of the recipe, not of the program."""


class Processes:
    """Processes on the CPU that are joined by gloo and compute what they are asked to: `with Processes(2) as several:`.

    They are forked from a server that has imported torch, and take any number of calls. After a failure on only some
    of them, the next call starts new ones. With `on_gpus`, each has a GPU, and a new interpreter, because CUDA may not
    be used in a fork of a process that has asked for GPUs.
    """

    def __init__(self, size: int, begin: Callable[[], None] | None = None, *, on_gpus: bool = False) -> None:
        self.size, self._begin, self._on_gpus = size, begin, on_gpus
        self._started: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the processes. The next call starts new ones."""
        for process, connection in self._started:
            connection.close()
            process.kill()
        for process, _ in self._started:
            process.join()
        self._started = []

    def call(self, function: Callable[[], object], seconds: float = SECONDS) -> Failure | None:
        """Run a function on all processes, and return the first failure, or None."""
        if not self._started:
            self._start()
        answers: dict[int, Failure | None] = {}
        deadline = time.monotonic() + seconds
        for _, connection in self._started:
            with suppress(OSError):
                connection.send(function)
        while len(answers) < self.size and time.monotonic() < deadline:
            ready = wait([each for _, each in self._started], timeout=1.0)
            for rank, (_, connection) in enumerate(self._started):
                if connection in ready and rank not in answers:
                    try:
                        answers[rank] = connection.recv()
                    except (EOFError, OSError):
                        answers[rank] = Failure(f"process {rank} ended", is_refusal=False)
                    if answers[rank] is not None:
                        deadline = min(deadline, time.monotonic() + SECONDS_FOR_OTHERS)
        failures = [each for _, each in sorted(answers.items()) if each is not None]
        if len(answers) < self.size:
            failures.append(Failure(f"not over after {seconds:.0f} seconds", is_refusal=False))
        if failures:
            self.end()
        return next(iter(failures), None)

    def _start(self) -> None:
        port = free_port()
        context: Any = multiprocessing.get_context("spawn" if self._on_gpus else "forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        with _silent_errors():
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, rank, self.size, port, self._begin, self._on_gpus)
                )
                process.start()
                theirs.close()
                self._started.append((process, ours))


@contextmanager
def _silent_errors() -> Iterator[None]:
    """Start the server of multiprocessing without a standard error: it would print warnings of packages."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _serve(
    connection: Connection, rank: int, size: int, port: int, begin: Callable[[], None] | None, on_gpus: bool
) -> None:
    """Answer calls until the connection closes."""
    stop_with_parent()
    gc.freeze()  # A collection would copy the memory that is shared with the server.
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    if size > 1:
        os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not on_gpus:
        os.environ.update(ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
    import torch

    torch.set_num_threads(1)
    if begin is not None:
        begin()
    while True:
        try:
            function = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        failure = None
        try:
            function()
        except (Exception, SystemExit) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            # A library's own ValueError says nothing about a setting.
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            is_refusal = isinstance(error, ValueError) and Path(__file__).parents[1] in Path(raised_in).parents
            failure = Failure(text if is_refusal else f"{type(error).__name__}: {text}", is_refusal)
        sys.stdout.flush()
        connection.send(failure)
