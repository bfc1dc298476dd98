"""The run folder: its lock, and the files that a run writes into it."""

import errno
import json
import math
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from accel_train.core.files import (
    TAIL_BYTES,
    cut_incomplete_line,
    existing_part,
    make_folders,
    read_regular,
    sync,
    write_atomically,
)
from accel_train.core.format import format_count
from accel_train.core.json_io import from_json, json_line, json_text, parse_json, read_json, utc_now
from accel_train.core.ownership import RECIPE_FILE as RECIPE_FILE
from accel_train.core.ownership import check_claim, claim, write_file
from accel_train.core.state import Choice, JsonRecord

Record = Mapping[str, Any]
"""Metrics, an event, or other facts of a run, by name."""

Damage = list[str] | None
"""Receives messages about damaged files, which are also printed."""

EXAMPLES_FILE = "examples.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
SUMMARY_FILE = "summary.json"
PROFILE_FOLDER = "profile"
TOO_LARGE = "it has a number of more than 64 bits"
"""Folder of step traces and of memory snapshots from GPUs that ran out of memory."""


_VALUE = rb"-?\d{1,18}(?:\.\d{1,20})?(?:e[-+]?\d\d)?|true|false|null"
_TRAIN_LINE = re.compile(rb'\{"step": (\d{1,18}), "split": "train"(?:, "[\w/]+": (?:' + _VALUE + rb"))*\}\n")
"""Pattern of a valid training line. Its group is the step, so such a line need not be parsed."""
_SECONDS_OF_THE_DEAD = 20.0
"""Seconds to wait for the lock of a killed process.

Its threads and children may still hold its files, for example during a write to a slow disk.
"""


class RunFolder:
    """The folder of one run, locked by one process at a time: `with RunFolder(path) as folder:`.

    Only the main process opens it. The modes of created files follow the umask.

    Raises:
        ValueError: the path is a file or not writable, another run holds it, or it has files from outside a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.lock = Choice(False, "not opened")
        """Whether a lock keeps out a second run, with the reason."""
        self._filelock: FileLock | None = None
        self._holder_path = self.path / ".lock.holder"
        self._open_files: dict[str, int] = {}

    def open(self) -> Self:
        """Create the folder, lock and claim it, and cut off lines torn by a kill."""
        _create_writable_folder(self.path)
        try:
            check_claim(self.path)
            self._take_lock()
            claim(self.path)
            if self._filelock is not None:
                holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": utc_now()}
                write_atomically(self._holder_path, json.dumps(holder).encode())
            self._reopen_files()
        except BaseException:
            self.close()
            raise
        return self

    def check(self) -> None:
        """Check that the folder can be used, without creating anything.

        Raises:
            ValueError: as for the class.
        """
        try:
            str(self.path).encode()
            above = existing_part(self.path)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "not a UTF-8 name"
            raise ValueError(f"output_dir={str(self.path)!a:.80}: {reason}; give a folder with another name") from error
        if not above.is_dir():
            parent = "" if above == self.path else f": {above}"
            raise ValueError(f"output_dir={self.path}{parent} is a file; give a folder")
        # These two look writable to root, and hold no files.
        if not os.access(above, os.W_OK) or self.path.absolute().parts[1:2] in (("proc",), ("sys",)):
            raise ValueError(f"output_dir={self.path}: {above} cannot be written; give a folder you can write")
        check_claim(self.path)
        if (self.path / ".lock").exists():
            try:
                self._take_lock()
            finally:
                self._release_lock()

    def append_metrics(self, record: Record) -> None:
        """Append one line to metrics.jsonl. It survives a kill of this process once this method returns.

        Raises:
            OSError: the line could not be written (disk full). The file then ends with the previous line.
        """
        _append_line(self._open_files[METRICS_FILE], record)

    def append_event(self, record: Record) -> None:
        """Append one line to events.jsonl. Guarantees and errors are as for `append_metrics`."""
        _append_line(self._open_files[EVENTS_FILE], record)

    def write_summary(self, summary: Record) -> None:
        self.write_text(SUMMARY_FILE, json_text(summary))

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of this folder (for example summary.json) atomically, and return its path."""
        return write_file(self.path / name, text.encode(errors="backslashreplace"), self.path)

    def rewind(self, step: int, *, evaluated: bool = True) -> None:
        """Remove the metrics after `step`, because a resume computes them again. Events stay.

        If not `evaluated`, the evaluation of that step is also removed and repeated. Files that were moved away since
        `open` start empty.
        """

        def is_kept(record: JsonRecord) -> bool:
            again = ("eval_final",) if evaluated else ("eval", "eval_final")
            # A run that begins again also evaluates its initial weights again.
            is_here = record["step"] == step > 0 and record.get("split") not in again
            return record["step"] < step or is_here

        path = self.path / METRICS_FILE
        if path.is_file():
            _remove_from_end(path, is_kept, step)
        self._reopen_files()

    def close(self) -> None:
        """Close the files and release the lock. Closing twice is allowed."""
        self._close_files()
        if self._filelock is not None:
            self._holder_path.unlink(missing_ok=True)
        self._release_lock()

    def _release_lock(self) -> None:
        if self._filelock is not None:
            self._filelock.release()
            self._filelock = None
        self.lock = Choice(False, "closed")

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reopen_files(self) -> None:
        self._close_files()
        self._open_files = {name: _open_mended(self.path / name) for name in (METRICS_FILE, EVENTS_FILE)}

    def _close_files(self) -> None:
        while self._open_files:
            os.close(self._open_files.popitem()[1])

    def _take_lock(self) -> None:
        """Take the kernel's lock without waiting, unless its holder is dead.

        The threads and children of a dead holder may still be ending, so its lock is worth waiting for.
        """
        # A fallback to an existence lock would outlive a SIGKILL, and the run could not resume without manual cleanup.
        lock = FileLock(self.path / ".lock", thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if _is_dead(self._holder_path):
                with suppress(Timeout):
                    lock.acquire(timeout=_SECONDS_OF_THE_DEAD)
        except OSError as error:
            # ENOSYS: the file system has no locks, for example Lustre mounted without `flock` and some FUSE systems.
            if error.errno != errno.ENOSYS:
                raise ValueError(f"output_dir={self.path} cannot be locked: {error.strerror}") from error
            self.lock = Choice(False, "this file system has no locks: a second run in this folder is not kept out")
            return
        if not lock.is_locked:
            raise ValueError(
                f"output_dir={self.path} is in use by {_describe_holder(self._holder_path)}; wait for that run, "
                "stop it, or give this one another output_dir"
            )
        self._filelock = lock
        self.lock = Choice(True, "held by the kernel, freed when this process ends")


def read_metrics(run_folder: Path, damage: Damage = None) -> list[JsonRecord]:
    """Return all lines of a run's metrics.jsonl, with NaN and Infinity as floats.

    A line torn by a kill is left out. Damaged lines are skipped and reported once on stderr. The report is also added
    to `damage`.

    Raises:
        FileNotFoundError: the run folder has no metrics.jsonl.
    """
    return _sound_lines(Path(run_folder) / METRICS_FILE, damage)


def read_events(run_folder: Path, damage: Damage = None) -> list[JsonRecord]:
    """Return all lines of a run's events.jsonl. Handles damage and errors like `read_metrics`."""
    return _sound_lines(Path(run_folder) / EVENTS_FILE, damage)


def read_record(path: Path, damage: Damage = None) -> JsonRecord:
    """Return a JSON object that a run wrote, for example summary.json.

    Returns an empty dict if the file is missing or damaged. Damage is reported on stderr and in `damage`.
    """
    try:
        record = read_json(path)
        if not isinstance(record, dict):
            raise ValueError(f"it holds a {type(record).__name__}, not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        note_damage(f"{path} is damaged ({error}) and not used", damage)
        return {}
    return record


def _sound_lines(path: Path, damage: Damage) -> list[JsonRecord]:
    kind = "split" if path.name == METRICS_FILE else "event"
    records: list[JsonRecord] = []
    faults: dict[int, str] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                # Torn by a kill: does not count as a line.
                break
            record, fault = parse_line(line, kind)
            if record is None:
                faults[number] = fault
            else:
                records.append(record)
    note_damaged_lines(path, faults, damage)
    return records


def note_damaged_lines(path: Path, faults: Mapping[int, str], damage: Damage) -> None:
    """Report damaged lines of a file in one message, as `note_damage` does. `faults` has the reasons by line number."""
    if faults:
        first = min(faults)
        more = f", like {format_count(len(faults) - 1, 'other line')}" if len(faults) > 1 else ""
        note_damage(f"{path}:{first} is damaged ({faults[first]}) and is skipped{more}", damage)


def note_damage(message: str, damage: Damage) -> None:
    """Print a message about a damaged file once, and add it to `damage`."""
    _print_once(message)
    if damage is not None:
        damage.append(message)


@cache
def _print_once(message: str) -> None:
    print(message, file=sys.stderr)


def read_summary(run_folder: Path) -> JsonRecord:
    """Return a run's summary.json, with NaN and Infinity as floats.

    Raises:
        FileNotFoundError: the run has not ended.
    """
    return read_json(Path(run_folder) / SUMMARY_FILE)


def _create_writable_folder(path: Path) -> None:
    """Create the folder and its parents, and check that a file can be written and renamed in it."""
    try:
        make_folders(path)
        if not path.is_dir():
            raise ValueError(f"output_dir={path} is a file; give a folder")
        write_atomically(path / f".probe-{secrets.token_hex(4)}", b"can be written\n").unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir={path} cannot be written: {error.strerror}; give a folder you can write"
        ) from error


def _is_dead(holder_path: Path) -> bool:
    """Return whether the process that took the lock ran on this machine and has ended."""
    import psutil

    try:
        holder = parse_json(read_regular(holder_path))
        if holder["host"] != socket.gethostname():
            return False
        return bool(psutil.Process(holder["pid"]).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def _describe_holder(holder_path: Path) -> str:
    try:
        holder = parse_json(read_regular(holder_path))
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    # The lock was taken a moment ago, and its holder file is not written yet.
    except (OSError, ValueError, KeyError):
        return "another process"


def _open_mended(path: Path) -> int:
    """Open a file for appending, after cutting off an incomplete last line, and return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    cut_incomplete_line(descriptor)
    return descriptor


def _remove_from_end(path: Path, is_kept: Callable[[JsonRecord], bool], step: int) -> None:
    """Remove the lines of a file that are not kept, all of them at its end.

    A binary search finds the first one, so most of the file is not read. Damaged lines stay, because they may be the
    user's.
    """
    low, high = 0, path.stat().st_size
    kept, is_prefix, has_removed = [], True, False
    with path.open("rb") as file:
        while high - low > TAIL_BYTES:
            file.seek(middle := (low + high) // 2)
            # Skip to the next line start.
            file.readline()
            records = (parse_line(line, "split")[0] for line in file)
            found = next((record["step"] for record in records if record is not None), step)
            low, high = (middle, high) if found < step else (low, middle)
        file.seek(low)
        begin = low + (len(file.readline()) if low else 0)
        for line in file:
            later = _TRAIN_LINE.fullmatch(line)
            # True for most lines, so they need not be parsed.
            is_later = later is not None and int(later[1]) > step
            record = None if is_later else parse_line(line, "split")[0]
            # A last line without a newline was torn by a kill and does not count.
            if is_later or not line.endswith(b"\n") or (record is not None and not is_kept(record)):
                has_removed = True
            else:
                kept.append(line)
                is_prefix = is_prefix and not has_removed
    content = b"".join(kept)
    if is_prefix:
        os.truncate(path, begin + len(content))
        sync(path)
        return
    with path.open("rb") as file:
        write_atomically(path, file.read(begin) + content)


def _append_line(fd: int, record: Record) -> None:
    """Append one line with a single write(), so a kill tears at most this line."""
    line = json_line(record)
    size_before, written = os.fstat(fd).st_size, 0
    try:
        # A full disk first accepts a part of the line and then raises.
        while written < len(line):
            written += os.write(fd, line[written:])
    except OSError:
        if written:
            os.ftruncate(fd, size_before)
        raise


def parse_line(line: bytes, kind: str) -> tuple[JsonRecord | None, str]:
    """Parse a line into a record, and return the record or None and the reason why the line is damaged.

    `kind` is the key that holds the split or event.
    """
    try:
        written = parse_json(line)
    except ValueError as error:
        return None, str(error)
    record = from_json(written)
    fault = _fault_of(record, kind)
    # Infinity is written as a string, so an infinite number had too many digits.
    if not fault and any(value in (math.inf, -math.inf) for value in written.values()):
        fault = TOO_LARGE
    return (None, fault) if fault else (record, "")


def _fault_of(record: Any, kind: str) -> str:
    """Return why a line lacks the fields that every reader needs, or an empty string if it is valid."""
    if not isinstance(record, dict):
        return f"it holds a {type(record).__name__}, not an object"
    step, loss = record.get("step"), record.get("loss")
    if type(step) is not int or not 0 <= step < 2**63:
        return "it has no step" if step is None else f"its step is {step!r:.40}"
    if not isinstance(record.get(kind), str):
        return f"it has no {kind}"
    if any(type(value) is int and abs(value) >= 2**63 for value in record.values()):
        return TOO_LARGE
    return "" if loss is None or type(loss) in (int, float) else f"its loss is {loss!r:.40}"
