"""Read a growing metrics.jsonl in bounded time and memory: each line once, and only a sample of a long file."""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from accel_train.core.state import JsonRecord
from accel_train.observe.run_folder import Damage, note_damaged_lines, parse_line

WHOLE_BYTES = 2**24
"""Size up to which all lines of a file are kept, in bytes: about 40,000 lines."""
GROUPS = 2_000
"""Number of groups of lines in a longer file. A few lines of each group are kept."""
LAST_LINES = 100
"""Number of lines at the end that are always kept."""
_PRINT_BYTES = 512
_NUMBERS = {
    name: re.compile(rb'"%s": (-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)[,}]' % name.encode()) for name in ("loss", "grad_norm")
}


class MetricsReader:
    """A reader of one metrics.jsonl. Each `read` continues where the previous one ended.

    From a file above `WHOLE_BYTES` it keeps every evaluation and the last lines. From each group of lines it keeps the
    extremes: smallest and largest loss, largest gradient norm, and one value that is not finite.
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
        self._num_lines = 0
        self._faults: dict[int, str] = {}

    def read(self, damage: Damage = None) -> list[JsonRecord]:
        """Return the kept lines in file order. `damage` receives a message about damaged lines.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        with self._path.open("rb") as file:
            facts = os.fstat(file.fileno())
            file.seek(max(0, self._offset - _PRINT_BYTES))
            is_same = facts.st_ino == self._inode and file.read(self._offset - file.tell()) == self._print
            if not is_same or facts.st_size > 2 * max(self._read_at, WHOLE_BYTES):
                self._start_over(facts.st_size)
                self._inode = facts.st_ino
            file.seek(self._offset)
            while lines := file.readlines(self._group_bytes or WHOLE_BYTES):
                if not lines[-1].endswith(b"\n"):
                    # The last line was torn by a kill or is still being written.
                    lines.pop()
                num_bytes = sum(map(len, lines))
                self._offset += num_bytes
                self._take(lines)
                if num_bytes < (self._group_bytes or 1):
                    break
                self._parse(self._kept, self._extremes())
                self._group.clear()
            file.seek(max(0, self._offset - _PRINT_BYTES))
            self._print = file.read(self._offset - file.tell())
        found = dict(self._kept)
        self._parse(found, (*self._extremes(), *self._last))
        note_damaged_lines(self._path, self._faults, damage)
        return [found[number] for number in sorted(found)]

    def _take(self, lines: list[bytes]) -> None:
        """Keep all lines of a short file, or the extremes of a group of lines."""
        first = self._num_lines + 1
        self._num_lines += len(lines)
        train = [at for at, line in enumerate(lines) if b'"split": "train"' in line] if self._group_bytes else []
        text = b"".join([lines[at] for at in train])
        if not (text.startswith(b"{") and text.endswith(b"}\n") and text.count(b"}\n{") == len(train) - 1):
            train = [at for at in train if _is_whole(lines[at])]
            text = b"".join([lines[at] for at in train])
        for at in sorted({*range(len(lines))}.difference(train)):
            number, line = first + at, lines[at]
            if self._group_bytes and b'"split": "system"' in line and _is_whole(line):
                self._group.setdefault("system", (0.0, number, line))
            else:
                self._parse(self._kept, ((number, line),))
        self._last.extend((first + at, lines[at]) for at in train[-LAST_LINES:])
        # Searching for one character is ten times as fast as searching for a word.
        if b"N" in text or b"I" in text:
            odd = (at for at in train if b'NaN"' in lines[at] or b'Infinity"' in lines[at])
            for at in islice(odd, 1):
                self._group.setdefault("not finite", (0.0, first + at, lines[at]))
        for name, pattern in _NUMBERS.items():
            # One search over all lines takes a third of the time of separate searches.
            values, places = pattern.findall(text), train
            if len(values) != len(train):
                places = [at for at in train if pattern.search(lines[at])]
                values = [pattern.findall(lines[at])[0] for at in places]
            numbers = list(map(float, values))
            for sign in ((1, -1) if name == "loss" else (1,)) if numbers else ():
                extreme, key = max(numbers) if sign > 0 else min(numbers), f"{name} {sign}"
                if key not in self._group or sign * extreme > sign * self._group[key][0]:
                    at = places[numbers.index(extreme)]
                    self._group[key] = (extreme, first + at, lines[at])

    def _extremes(self) -> Iterator[tuple[int, bytes]]:
        return ((number, line) for _, number, line in self._group.values())

    def _parse(self, kept: dict[int, JsonRecord], lines: Iterable[tuple[int, bytes]]) -> None:
        """Add the records of numbered lines to `kept`, or note why they are damaged."""
        for number, line in lines:
            if number not in kept:
                record, fault = parse_line(line, "split")
                if record is None:
                    self._faults[number] = fault
                else:
                    kept[number] = record


def _is_whole(line: bytes) -> bool:
    return line.startswith(b"{") and line.endswith(b"}\n")
