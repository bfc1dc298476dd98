"""What the guard costs: one run whose guard decides on every step in one turn and none in the next, in one process.

    python -m benchmarks.guard --preset micro --save

The difference is all that the host does for the guard: statistics, limits, health of checkpoints. On the device it
stays in both turns: three operations on one number. `micro` is so small that a step is nearly all Python: no step costs
less.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.turns import BLOCK_STEPS, Pairs, measure_preset, small_run, train_on

BAR = 0.003
"""Of the step time."""


class Switch:
    """The run's guard, or one that lets everything pass, in turns."""

    def __init__(self, guard: Any) -> None:
        from accel_train.guard.guard import CONTINUE

        self.guard, self.nothing, self.is_on = guard, CONTINUE, True
        self.limits = guard.limits

    def decide(self, result: Any) -> Any:
        if not self.is_on:
            return self.nothing
        decision = self.guard.decide(result)
        self.limits = self.guard.limits
        return decision


def measure(name: str, blocks: int, folder: Path) -> Pairs:
    """CPU seconds a step (with the guard, without), a pair for each two turns."""
    block_steps = BLOCK_STEPS[name]
    num_steps = 2 * block_steps * blocks + 1
    run = small_run(name, num_steps, folder, log_every_steps=1_000_000, warmup_steps=1)
    switch: Any = Switch(run.guard)
    run.guard = switch
    seconds: dict[bool, list[float]] = {True: [], False: []}

    def in_turns(batches: Iterator[Any]) -> Iterator[Any]:
        began = time.process_time()
        for number, step_batches in enumerate(batches):
            if number == num_steps - 1:
                return  # the last step would save and evaluate
            if number and number % block_steps == 0:
                seconds[switch.is_on].append((time.process_time() - began) / block_steps)
                switch.is_on = not switch.is_on
                began = time.process_time()
            yield step_batches

    train_on(run, in_turns)
    pairs = list(zip(seconds[True], seconds[False], strict=False))
    return pairs[len(pairs) // 5 :]  # from where the window of the guard is full


def summary(pairs: Pairs) -> dict[str, str]:
    """Medians, and whether the bar is met."""
    with_guard, without = ([pair[index] * 1e6 for pair in pairs] for index in (0, 1))
    extra = statistics.median(a - b for a, b in zip(with_guard, without, strict=True))
    share = extra / statistics.median(without)
    return {
        "without us": f"{statistics.median(without):.0f}",
        "with the guard us": f"{statistics.median(with_guard):.0f}",
        "median difference us": f"{extra:+.1f}",
        "of the step": f"{share:+.2%}",
        "bar": f"<= {BAR:.1%} {'met' if share <= BAR else 'MISSED'}",
    }


if __name__ == "__main__":
    title = "## What the guard costs on the host, CPU time a step, 1 thread, in turns in one process"
    measure_preset("guard", __doc__, title, {"micro": 200, "tiny": 40}, measure, summary)
