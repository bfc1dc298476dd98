"""The memory that a piece of code takes, by torch's own allocator."""

from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], None]) -> int:
    """The most bytes alive at once beyond those before, by the allocator's events."""
    run()  # the first makes what stays
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = worst = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        worst = max(worst, total)
    return worst
