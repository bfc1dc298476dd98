"""The memory that a piece of code takes, by torch's own allocator."""

from collections.abc import Callable

from benchmarks.loss import with_peak


def peak_bytes(run: Callable[[], None]) -> int:
    """The most bytes alive at once beyond those before, by the allocator's events."""
    run()  # the first makes what stays
    return with_peak(run)[1]
