"""Goodput: the time of all launches of a run by category, kept in a file that survives a kill.

`launches.jsonl` has one line per launch. Each second, a thread rewrites the line of the running launch. After a kill,
the last line is at most about a second old. The time until the next launch counts as down time.
"""

import json
import math
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accel_train.core.files import cut_incomplete_line, read_regular
from accel_train.core.json_io import parse_json
from accel_train.core.state import JsonRecord

LAUNCHES_FILE = "launches.jsonl"
WRITE_SECONDS = 1.0
LINE_BYTES = 1024
"""Length of each line in bytes, padded with spaces so that a line can be rewritten in place."""
ACCOUNTS = {
    "imports": "Imports",
    "start_up": "Starting up",
    "data_preparation": "Preparing data",
    "compile": "Compiling",
    "first_step": "First steps",
    "productive_steps": "Productive steps",
    "repeated_steps": "Steps done again",
    "skipped_steps": "Skipped steps",
    "waiting_for_data": "Waiting for data",
    "evaluation": "Evaluation",
    "saving": "Saving",
    "recovery": "Diagnosis and rollbacks",
    "profiling": "Writing profiles",
    "stopping": "Stopping",
    "down_time": "Between launches",
}
"""All categories of time, with their display names."""
T = TypeVar("T")


@dataclass
class _Step:
    """The time of a step whose outcome the host may not know yet."""

    account: str
    seconds: float = 0.0
    is_settled: bool = False

    @property
    def account_now(self) -> str:
        """Category of the step if the launch ended now.

        A step without an outcome counts as repeated, except in the category of first steps.
        """
        return self.account if self.is_settled or self.account == "first_step" else "repeated_steps"


class LaunchClock:
    """A clock that assigns each second of a launch to one category.

    It runs on the main process, whose time counts for the run.

    Args:
        age_seconds: seconds that the process has already spent on this launch: interpreter start and imports.
        clock: function that returns monotonic seconds.
        wall: function that returns seconds since 1970.
    """

    def __init__(
        self,
        age_seconds: float = 0.0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._started, self._since = wall() - age_seconds, clock()
        self._seconds = defaultdict(float, imports=age_seconds)
        self._account, self._inside = "start_up", list[str]()
        self._steps: dict[int, _Step] = {}
        self._open_step: int | None = None
        self._num_begun = self._num_saves = self._num_done = 0
        self._earlier: list[JsonRecord] = []
        self._facts: JsonRecord = {}

    def stop(self) -> None:
        """Count the time from now on as stopping; within `inside`, from the end of the context on."""
        with self._lock:
            self._close()
            self._account, self._open_step = "stopping", None

    @contextmanager
    def inside(self, account: str) -> Iterator[None]:
        """Return a context whose time counts for one category. Contexts may be nested."""
        self.enter(account)
        try:
            yield
        finally:
            self.leave()

    def enter(self, account: str) -> None:
        """Enter the context of `inside` without a context manager."""
        with self._lock:
            self._close()
            self._inside.append(account)
            self._num_saves += account == "saving"

    def leave(self) -> None:
        """Leave the context that `enter` entered last."""
        with self._lock:
            self._close()
            self._inside.pop()

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the same batches, and count the time until each one as waiting for data.

        After the last batch, the launch counts as stopping.
        """
        while True:
            # Does not use `inside`, because a context manager in each step costs 3 us.
            self.enter("waiting_for_data")
            try:
                batch = next(batches)
            except StopIteration:
                break
            finally:
                self.leave()
            yield batch
        self.stop()

    def begin_step(self, step: int) -> None:
        """Begin a step (0-based). Earlier steps that began but did not end, and now begin again, count as repeated."""
        with self._lock:
            self._close()
            for number, each in list(self._steps.items()):
                if each.is_settled or number >= step:
                    self._seconds[each.account_now] += each.seconds
                    del self._steps[number]
            is_again = step < self._num_done
            account = "repeated_steps" if is_again else "productive_steps"
            self._steps[step] = _Step(account if self._num_begun else "first_step")
            self._open_step = step
            self._num_begun += 1

    def end_step(self, step: int, *, skipped: bool) -> None:
        """Record the outcome of a step (0-based). The next step may already have begun."""
        with self._lock:
            self._num_done = max(self._num_done, step + 1)
            if (done := self._steps.get(step)) is not None:
                done.is_settled = True
                if skipped:
                    done.account = "skipped_steps"

    def accounts(self) -> dict[str, float]:
        """Return the seconds of each category up to now, in the order of `ACCOUNTS`, without empty categories."""
        with self._lock:
            self._close()
            seconds = self._seconds.copy()
            for each in self._steps.values():
                seconds[each.account_now] += each.seconds
        return {name: round(seconds[name], 6) for name in ACCOUNTS if seconds[name]}

    def goodput(self) -> JsonRecord:
        """Return the goodput of all launches, including this one up to now, in the form of `goodput_of`."""
        return goodput_of([*self._earlier, self._line(ended=False)])

    @contextmanager
    def recorded(self, run_folder: Path, **facts: Any) -> Iterator[None]:
        """Return a context that records this launch and `facts` about it in `launches.jsonl`.

        A full disk does not affect the run.
        """
        path = run_folder / LAUNCHES_FILE
        self._earlier, self._facts = read_launches(run_folder), {"host": socket.gethostname(), **facts}
        self._num_done = max((line["step"] for line in self._earlier), default=0)
        ended = threading.Event()

        def write_again() -> None:
            while not ended.wait(WRITE_SECONDS):
                self._write(file, place)

        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            yield
            return
        try:
            place = cut_incomplete_line(file)
            self._write(file, place)
            thread = threading.Thread(target=write_again, name="launch clock", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
                self._write(file, place, ended=True)
        finally:
            os.close(file)

    def _write(self, file: int, place: int, *, ended: bool = False) -> None:
        text = json.dumps(self._line(ended=ended)).ljust(LINE_BYTES - 1) + "\n"
        with suppress(OSError):
            os.pwrite(file, text.encode(), place)

    def _line(self, *, ended: bool) -> JsonRecord:
        accounts = self.accounts()
        return {
            "launch": len(self._earlier) + 1,
            "started": round(self._started, 6),
            "seconds": round(sum(accounts.values()), 6),
            "ended": ended,
            "step": self._num_done,
            "steps": self._num_begun,
            "saves": self._num_saves,
            **self._facts,
            "accounts": accounts,
        }

    def _close(self) -> None:
        """Assign the time since the last call to the current step or category."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        if not self._inside and self._open_step is not None:
            self._steps[self._open_step].seconds += seconds
            return
        self._seconds[self._inside[-1] if self._inside else self._account] += seconds


def read_launches(run_folder: Path) -> list[JsonRecord]:
    """Return the lines of a run's `launches.jsonl`, sorted by start time.

    Damaged lines are left out. Returns an empty list if the file cannot be read.
    """
    try:
        lines = read_regular(Path(run_folder) / LAUNCHES_FILE).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            if _is_launch(record := parse_json(line)):
                found.append(record)
    return sorted(found, key=lambda record: record["started"])


def goodput_of(launches: Sequence[JsonRecord]) -> JsonRecord:
    """Return the goodput of all launches.

    The seconds of all categories add up to the wall clock from the first start to the last end. Keys: `launches`,
    `wall_seconds`, `productive_share` (of the wall clock, 0 to 1), and `accounts` (seconds by name in `ACCOUNTS`).
    """
    seconds = dict.fromkeys(ACCOUNTS, 0.0)
    for launch in launches:
        for name, value in launch["accounts"].items():
            if name in seconds:
                seconds[name] += value
    seconds["down_time"] += sum(down_times(launches))
    wall = sum(seconds.values())
    return {
        "launches": len(launches),
        "wall_seconds": round(wall, 3),
        "productive_share": round(seconds["productive_steps"] / wall, 6) if wall else 0.0,
        "accounts": {name: round(value, 3) for name, value in seconds.items() if value},
    }


def down_times(launches: Sequence[JsonRecord]) -> list[float]:
    """Return the seconds between each launch and the next one."""
    ends = [launch["started"] + launch["seconds"] for launch in launches]
    return [max(0.0, after["started"] - end) for end, after in zip(ends, launches[1:], strict=False)]


def _is_launch(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(accounts := record.get("accounts"), dict):
        return False
    numbers = [record.get("started"), record.get("seconds"), *accounts.values()]
    counts = map(record.get, ("step", "steps", "saves"))
    is_timed = all(type(each) in (int, float) and math.isfinite(each) for each in numbers)
    return is_timed and all(type(each) is int for each in counts)
