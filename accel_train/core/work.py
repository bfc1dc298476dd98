"""Work of the main thread outside of training steps: writing, metrics, callbacks. The watchdog waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager

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


def current_work() -> tuple[str, int]:
    """Return the innermost work in progress ("" for none) and the number of beats so far."""
    return "".join(_current[-1:]), _num_beats
