"""The section on how a run spent its time: goodput over all launches."""

from collections.abc import Sequence
from typing import Any

from accel_train.core.format import format_count, format_seconds
from accel_train.observe.goodput import ACCOUNTS
from accel_train.report.metric_names import MISSING
from accel_train.report.run import Run

LONGEST_PERCENT = 36
"""Width of the longest bar in percent. Its text needs room on a phone."""


def describe_time(run: Run) -> dict[str, Any] | None:
    """Return a sentence and a bar for each category, productive steps first, or None if the time is not recorded."""
    goodput = run.goodput
    accounts, wall = goodput.get("accounts"), goodput.get("wall_seconds")
    if not accounts or not wall:
        return None
    names = sorted(accounts, key=lambda name: (name != "productive_steps", -accounts[name]))
    longest = max(accounts.values())
    launches = format_count(goodput["launches"], "launch", "launches")
    return {
        "lead": f"{goodput['productive_share']:.1%} of {format_seconds(wall)} were productive steps, over {launches}: "
        "from the first start to the last end.",
        "bars": [
            {
                "label": ACCOUNTS[name][:1].upper() + ACCOUNTS[name][1:],
                "value": f"{_seconds(accounts[name])}, {accounts[name] / wall:.1%}",
                "percent": round(LONGEST_PERCENT * accounts[name] / longest, 2),
                "this": name == "productive_steps",
            }
            for name in names
        ],
    }


def compare_times(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return a row for each recorded category, with its name and each run's seconds and share."""
    accounts = [run.goodput.get("accounts") or {} for run in runs]
    present = [name for name in ACCOUNTS if any(name in found for found in accounts)]
    return [
        (
            ACCOUNTS[name][:1].upper() + ACCOUNTS[name][1:],
            [
                f"{_seconds(found[name])}, {found[name] / run.goodput['wall_seconds']:.1%}"
                if name in found
                else MISSING
                for run, found in zip(runs, accounts, strict=True)
            ],
        )
        for name in present
    ]


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 60 else f"{seconds:.1f} s"
