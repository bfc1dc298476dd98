"""Goodput: the time of all launches of a run, each second in one account, and the file that keeps it through a kill.

`launches.jsonl` has a line for each launch. A thread writes the line of the launch that runs again every second, so a launch that
was killed ends with its last line; what comes after that, up to the next launch, is down time.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accel_train.core.files import read_regular
from accel_train.core.state import JsonRecord

LAUNCHES_FILE = "launches.jsonl"
WRITE_SECONDS = 1.0
LINE_BYTES = 1024
"""Each line is filled up with spaces, so that it can be written again in its place."""
ACCOUNTS = {
    "imports": "imports",
    "start_up": "starting up",
    "data_preparation": "preparing data",
    "compile": "compiling",
    "first_step": "first steps",
    "productive_steps": "productive steps",
    "repeated_steps": "steps done again",
    "skipped_steps": "skipped steps",
    "waiting_for_data": "waiting for data",
    "evaluation": "evaluation",
    "saving": "saving",
    "recovery": "diagnosis and rollbacks",
    "profiling": "writing profiles",
    "stopping": "stopping",
    "down_time": "between launches",
}
"""All accounts, and what a reader sees for them."""
T = TypeVar("T")


@dataclass
class _Step:
    """The time of a step whose outcome the host may not know yet."""

    account: str
    seconds: float = 0.0
    is_settled: bool = False

    @property
    def account_now(self) -> str:
        """The account if the launch ended now: a step without an outcome is cut off."""
        return self.account if self.is_settled or self.account == "first_step" else "repeated_steps"


class LaunchClock:
    """Puts each second of a launch into one account; on the main process, whose time counts for the run.

    Args:
        age_seconds: time that the process has lived for this launch already: its start, and imports.
        clock: seconds, rising.
        wall: seconds since 1970.
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
        self._seconds = {"imports": age_seconds}
        self._account, self._inside = "start_up", list[str]()
        self._steps: dict[int, _Step] = {}
        self._open_step: int | None = None
        self._num_begun = self._num_saves = self._num_done = 0
        self._earlier: list[JsonRecord] = []
        self._facts: JsonRecord = {}

    def switch(self, account: str) -> None:
        """Put the time from now on into another account; inside of `inside`, the time after that."""
        with self._lock:
            self._close()
            self._account, self._open_step = account, None

    @contextmanager
    def inside(self, account: str) -> Iterator[None]:
        """Return a context whose time goes into an account; such contexts may be nested."""
        self.enter(account)
        try:
            yield
        finally:
            self.leave()

    def enter(self, account: str) -> None:
        """Begin what `inside` does."""
        with self._lock:
            self._close()
            self._inside.append(account)
            self._num_saves += account == "saving"

    def leave(self) -> None:
        """End what `enter` began last."""
        with self._lock:
            self._close()
            self._inside.pop()

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Return the same batches: the time until each is there is waiting for data, and after the last one the launch stops."""
        while True:
            self.enter("waiting_for_data")  # without `inside`: a context manager in each step costs 3 us
            try:
                batch = next(batches)
            except StopIteration:
                break
            finally:
                self.leave()
            yield batch
        self.switch("stopping")

    def begin_step(self, step: int) -> None:
        """Begin a 0-based step; steps that were begun and not done, and come again, were in vain."""
        with self._lock:
            self._close()
            for number, each in list(self._steps.items()):
                if each.is_settled or number >= step:
                    self._seconds[each.account_now] = self._seconds.get(each.account_now, 0.0) + each.seconds
                    del self._steps[number]
            is_again = step < self._num_done
            account = "repeated_steps" if is_again else "productive_steps"
            self._steps[step] = _Step(account if self._num_begun else "first_step")
            self._open_step = step
            self._num_begun += 1

    def end_step(self, step: int, *, skipped: bool) -> None:
        """Note the outcome of a 0-based step, which may be known when the next one has begun."""
        with self._lock:
            self._num_done = max(self._num_done, step + 1)
            if (done := self._steps.get(step)) is not None:
                done.is_settled = True
                if skipped:
                    done.account = "skipped_steps"

    def accounts(self) -> dict[str, float]:
        """Return the seconds of each account up to now, in the order of `ACCOUNTS`; those without time are left out."""
        with self._lock:
            self._close()
            seconds = dict(self._seconds)
            for each in self._steps.values():
                seconds[each.account_now] = seconds.get(each.account_now, 0.0) + each.seconds
        return {name: round(seconds[name], 6) for name in ACCOUNTS if seconds.get(name)}

    def goodput(self) -> JsonRecord:
        """Return what `goodput_of` does, for the launches before this one and this one up to now."""
        return goodput_of([*self._earlier, self._line(ended=False)])

    @contextmanager
    def recorded(self, run_folder: Path, **facts: Any) -> Iterator[None]:
        """Return a context in which the line of this launch is in `launches.jsonl`; `facts` are in it. A full disk changes nothing."""
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
            place = _end_of_lines(file)
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
        """Put the time since the last call where it belongs."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        if not self._inside and self._open_step is not None:
            self._steps[self._open_step].seconds += seconds
            return
        account = self._inside[-1] if self._inside else self._account
        self._seconds[account] = self._seconds.get(account, 0.0) + seconds


def read_launches(run_folder: Path) -> list[JsonRecord]:
    """Return the lines of a run's `launches.jsonl`, by their start; damaged ones are left out, and all where there is no such file."""
    try:
        lines = read_regular(Path(run_folder) / LAUNCHES_FILE).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            if _is_launch(record := json.loads(line)):
                found.append(record)
    return sorted(found, key=lambda record: record["started"])


def goodput_of(launches: Sequence[JsonRecord]) -> JsonRecord:
    """Return the accounts of all launches in seconds, which add up to the wall clock from the first start to the last end.

    Keys: `launches`, `wall_seconds`, `productive_share` (of the wall clock, 0 to 1), `accounts` (names of `ACCOUNTS`).
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
    """Return the seconds before each launch but the first in which none ran."""
    ends = [launch["started"] + launch["seconds"] for launch in launches]
    return [max(0.0, after["started"] - end) for end, after in zip(ends, launches[1:], strict=False)]


def _is_launch(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(accounts := record.get("accounts"), dict):
        return False
    numbers = [record.get("started"), record.get("seconds"), *accounts.values()]
    counts = [record.get(name) for name in ("step", "steps", "saves")]
    is_timed = all(type(each) in (int, float) and math.isfinite(each) for each in numbers)
    return is_timed and all(type(each) is int for each in counts)


def _end_of_lines(file: int) -> int:
    """Return where the next line begins, after cutting off a last one without an end."""
    size = os.fstat(file).st_size
    tail = os.pread(file, 2 * LINE_BYTES, max(0, size - 2 * LINE_BYTES))
    end = size - len(tail) + tail.rfind(b"\n") + 1
    os.ftruncate(file, end)
    return end
