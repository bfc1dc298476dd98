"""Work outside of training steps: of the main thread, for which the watchdog waits, and of processes that help it."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_current: list[str] = []
_num_beats = 0


def beat() -> None:
    """Report progress: one part of a longer computation is done."""
    global _num_beats
    _num_beats += 1


@contextmanager
def working(what: str) -> Iterator[None]:
    """Exempt the main thread from the hang timeout, as long as it does not wait for other processes.

    `what` completes "rank 0 is ...", for example "writing model/".
    """
    beat()
    _current.append(what)
    try:
        yield
    finally:
        _current.pop()
        beat()


@contextmanager
def helped(count: int, target: Callable[..., object], *arguments: Any) -> Iterator[list[Any]]:
    """Run a block while forked processes call `target`, and kill those that are left at its end.

    The block must get its work done without them: a process that may not fork has no helpers.
    """
    may_fork = "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon
    helpers = [
        multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
        for _ in range(count * may_fork)
    ]
    for helper in helpers:
        helper.start()
    try:
        yield helpers
    finally:
        for helper in helpers:
            helper.kill()
            helper.join()


def current_work() -> tuple[str, int]:
    """Return the innermost work in progress ("" for none) and the number of beats so far."""
    return "".join(_current[-1:]), _num_beats
