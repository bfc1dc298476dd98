"""Read a metrics.jsonl that grows, in bounded time and memory: each line once, and of a long file a sample."""

import os
from collections import deque
from itertools import count
from pathlib import Path

from accel_train.core.state import JsonRecord
from accel_train.observe.run_folder import note_damage, parse_line

WHOLE_BYTES = 2**24
"""A smaller file is kept whole: about 40,000 lines."""
GROUPS = 4_000
"""A longer file is cut into as many groups of lines, of which a few are kept."""
LAST_LINES = 100
"""Lines at the end, which are all kept."""
_PRINT_BYTES = 512


class MetricsReader:
    """The lines of one metrics.jsonl. Each `read` takes up where the one before has ended.

    Of a file above `WHOLE_BYTES` it keeps every evaluation, the last lines, and of each group of lines those with the least
    and the greatest loss, the greatest gradient norm, and a number that is not finite.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_over(0)

    def _start_over(self, num_bytes: int) -> None:
        self._offset, self._read_at, self._inode, self._print = 0, num_bytes, 0, b""
        self._group_bytes = num_bytes // GROUPS if num_bytes > WHOLE_BYTES else 0
        self._kept: dict[int, JsonRecord] = {}
        self._last: deque[tuple[int, bytes]] = deque(maxlen=LAST_LINES)
        self._group: dict[str, tuple[float, int, bytes]] = {}
        self._numbers = count(1)
        self._faults: dict[int, str] = {}

    def read(self, damage: list[str] | None = None) -> list[JsonRecord]:
        """Return the kept lines in their order; `damage` gets a sentence on damaged ones.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with self._path.open("rb") as file:
            facts = os.fstat(file.fileno())
            file.seek(max(0, self._offset - _PRINT_BYTES))
            is_same = facts.st_ino == self._inode and file.read(self._offset - file.tell()) == self._print
            if not is_same or facts.st_size > 2 * max(self._read_at, WHOLE_BYTES):
                self._start_over(facts.st_size)
                self._inode = facts.st_ino
            file.seek(self._offset)
            end = self._offset + self._group_bytes
            for line in file:
                if not line.endswith(b"\n"):
                    break  # torn by a kill, or not written to its end yet
                self._offset += len(line)
                self._take(line)
                if self._offset >= end:
                    self._close_group()
                    end = self._offset + self._group_bytes
            file.seek(max(0, self._offset - _PRINT_BYTES))
            self._print = file.read(self._offset - file.tell())
        found = dict(self._kept)
        for number, line in (*((number, line) for _, number, line in self._group.values()), *self._last):
            if number not in found and (record := self._parsed(number, line)) is not None:
                found[number] = record
        if self._faults:
            first = min(self._faults)
            more = f"; so are {len(self._faults) - 1} other lines" if len(self._faults) > 1 else ""
            note_damage(f"{self._path}:{first} is damaged ({self._faults[first]}) and is skipped{more}", damage)
        return [found[number] for number in sorted(found)]

    def _take(self, line: bytes) -> None:
        """Keep a line for good, or as the most telling one of its group."""
        number = next(self._numbers)
        is_train = b'"split": "train"' in line
        is_sound = line.startswith(b"{") and line.endswith(b"}\n")
        if not self._group_bytes or not is_sound or not (is_train or b'"split": "system"' in line):
            if (record := self._parsed(number, line)) is not None:
                self._kept[number] = record
            return
        if not is_train:
            self._group.setdefault("system", (0.0, number, line))
            return
        self._last.append((number, line))
        if b'NaN"' in line or b'Infinity"' in line:
            self._group.setdefault("not finite", (0.0, number, line))
        for name, keys in ((b'"loss": ', (("least", -1), ("greatest", 1))), (b'"grad_norm": ', (("norm", 1),))):
            at = line.find(name)
            if at < 0:
                continue
            try:
                value = float(line[at + len(name) :].partition(b",")[0].rstrip(b"}\n"))
            except ValueError:  # not finite
                continue
            for key, sign in keys:
                if key not in self._group or sign * value > self._group[key][0]:
                    self._group[key] = (sign * value, number, line)

    def _close_group(self) -> None:
        for _, number, line in self._group.values():
            if number not in self._kept and (record := self._parsed(number, line)) is not None:
                self._kept[number] = record
        self._group.clear()

    def _parsed(self, number: int, line: bytes) -> JsonRecord | None:
        record, fault = parse_line(line, "split")
        if fault:
            self._faults[number] = fault
        return record
