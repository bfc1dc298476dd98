"""The run folder: who holds it, and the lines a run leaves behind in it."""

import errno
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from accel_train.core.files import make_folders, read_regular, sync, write_atomically
from accel_train.core.json_io import from_json, json_text, read_json, to_json, utc_now
from accel_train.core.ownership import RESOLVED_RECIPE, check_claim, claim, write_file
from accel_train.core.state import Choice, JsonRecord

EXAMPLES_FILE = "examples.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
SUMMARY_FILE = "summary.json"
RECIPE_FILE = RESOLVED_RECIPE
PROFILE_FOLDER = "profile"
"""Traces of steps, and what a GPU's memory held when it ran out."""


_TAIL_BYTES = 2**16
_VALUE = rb"-?\d{1,18}(?:\.\d{1,20})?(?:e[-+]?\d\d)?|true|false|null"
_TRAIN_LINE = re.compile(rb'\{"step": (\d{1,18}), "split": "train"(?:, "\w+": (?:' + _VALUE + rb"))*\}\n")
"""A line that is not damaged, whose step is known without parsing it."""
_SECONDS_OF_THE_DEAD = 20.0
"""A killed process's threads and children may hold its files for a moment: in a write to a slow disk, before they begin."""


class RunFolder:
    """One run's folder, held by one process at a time: `with RunFolder(path) as folder:`.

    Only the main process opens it. The modes of what it creates follow the umask.

    Raises:
        ValueError: the path is a file, cannot be written, another run holds it, or it holds what no run wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.lock = Choice(False, "not opened")
        """A second run in this folder is kept out; the reason says why not."""
        self._filelock: FileLock | None = None
        self._holder_path = self.path / ".lock.holder"
        self._open_files: dict[str, int] = {}

    def open(self) -> Self:
        """Create the folder, take its lock, claim it, and cut off lines that a kill has torn."""
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
        """Find what is wrong with the folder before anything is created.

        Raises:
            ValueError: as for the class.
        """
        try:
            str(self.path).encode()
            above = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "not a UTF-8 name"
            raise ValueError(f"output_dir={str(self.path)!a:.80}: {reason}; give a folder with another name") from error
        if not above.is_dir():
            parent = "" if above == self.path else f": {above}"
            raise ValueError(f"output_dir={self.path}{parent} is a file; give a folder")
        if not os.access(above, os.W_OK):
            raise ValueError(f"output_dir={self.path}: {above} cannot be written; give a folder you can write")
        check_claim(self.path)
        if (self.path / ".lock").exists():
            try:
                self._take_lock()
            finally:
                self._release_lock()

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl; it survives a kill of this process from the moment this returns.

        Raises:
            OSError: the line could not be written (disk full); the file ends with the line before it.
        """
        _append_line(self._open_files[METRICS_FILE], record)

    def append_event(self, record: Mapping[str, Any]) -> None:
        """Add one line to events.jsonl; as `append_metrics`."""
        _append_line(self._open_files[EVENTS_FILE], record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self.write_text(SUMMARY_FILE, json_text(summary))

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of this folder (summary.json, say), whole or not at all, and return its path."""
        return write_file(self.path / name, text.encode(), self.path)

    def rewind(self, step: int, *, evaluated: bool = True) -> None:
        """Remove the metrics after `step`, because a resume computes them again; events stay.

        Not `evaluated`: the evaluation of that step is made again as well. Files that were moved away since `open` begin anew.
        """

        def is_kept(record: JsonRecord) -> bool:
            again = ("eval_final",) if evaluated else ("eval", "eval_final")
            return record["step"] < step or (record["step"] == step and record.get("split") not in again)

        path = self.path / METRICS_FILE
        if path.is_file():
            _remove_from_end(path, is_kept, step)
        self._reopen_files()

    def close(self) -> None:
        """Close the files and release the lock; closing twice is fine."""
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
        """Take the kernel's lock without waiting, unless its holder is dead: then what it left behind is still ending."""
        # A fallback to an existence lock would outlive a SIGKILL, and the run could not resume by itself.
        lock = FileLock(self.path / ".lock", thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if _is_dead(self._holder_path):
                with suppress(Timeout):
                    lock.acquire(timeout=_SECONDS_OF_THE_DEAD)
        except OSError as error:
            if error.errno != errno.ENOSYS:  # which is: Lustre mounted without `flock`, some FUSE file systems
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


def read_metrics(run_folder: Path, damage: list[str] | None = None) -> list[JsonRecord]:
    """Return all lines of a run's metrics.jsonl, NaN and Infinity as floats; a line torn by a kill is left out.

    A damaged line is skipped, which a line on stderr says once; `damage` gets the same sentence.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return _sound_lines(Path(run_folder) / METRICS_FILE, damage)


def read_events(run_folder: Path, damage: list[str] | None = None) -> list[JsonRecord]:
    """Return all lines of a run's events.jsonl; as `read_metrics`."""
    return _sound_lines(Path(run_folder) / EVENTS_FILE, damage)


def read_record(path: Path, damage: list[str] | None = None) -> JsonRecord:
    """Return a JSON object that a run wrote (summary.json, say); empty where there is none, or where damage is reported."""
    try:
        record = read_json(path)
        if not isinstance(record, dict):
            raise ValueError(f"it holds a {type(record).__name__}, not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        note_damage(f"{path} is damaged ({error}) and not used", damage)
        return {}
    return record


def _sound_lines(path: Path, damage: list[str] | None) -> list[JsonRecord]:
    faults: list[str] = []
    records = [record for _, record in _complete_lines(path, faults) if record is not None]
    if faults:
        more = f"; so are {len(faults) - 1} other lines" if len(faults) > 1 else ""
        note_damage(f"{path}:{faults[0]} and is skipped{more}", damage)
    return records


def note_damage(message: str, damage: list[str] | None) -> None:
    """Print a sentence on a damaged file once, and add it to `damage`."""
    _print_once(message)
    if damage is not None:
        damage.append(message)


@cache
def _print_once(message: str) -> None:
    print(message, file=sys.stderr)


def read_summary(run_folder: Path) -> JsonRecord:
    """Return a run's summary.json, NaN and Infinity as floats; FileNotFoundError if the run has not ended."""
    return read_json(Path(run_folder) / SUMMARY_FILE)


def _create_writable_folder(path: Path) -> None:
    """Create the folder and its missing parents, and check that a file can be written and renamed in it."""
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
    """Return whether the process that took the lock ran on this machine, and has ended."""
    import psutil

    try:
        holder = json.loads(read_regular(holder_path))
        if holder["host"] != socket.gethostname():
            return False
        return bool(psutil.Process(holder["pid"]).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def _describe_holder(holder_path: Path) -> str:
    try:
        holder = json.loads(read_regular(holder_path))
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    except (OSError, ValueError, KeyError):  # taken a moment ago, and not signed yet
        return "another process"


def _open_mended(path: Path) -> int:
    """Open for appending, after cutting off a last line without an end: the next line must not be glued to it."""
    size = path.stat().st_size if path.is_file() else 0  # a device has no end
    end, num_bytes = 0, _TAIL_BYTES
    while size and not end:
        end = (tail := _tail(path, num_bytes)).rfind(b"\n") + 1
        if end:
            end += size - len(tail)
        elif num_bytes >= size:
            break
        num_bytes *= 2
    if end < size:
        os.truncate(path, end)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _tail(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read()


def _remove_from_end(path: Path, is_kept: Callable[[JsonRecord], bool], step: int) -> None:
    """Remove the lines that are not kept, all at the end of a file: a search finds where, and what is before is not read.

    A damaged line stays where it is: it may be the user's.
    """
    low, high = 0, path.stat().st_size
    kept, is_prefix, has_removed = [], True, False
    with path.open("rb") as file:
        while high - low > _TAIL_BYTES:
            file.seek(middle := (low + high) // 2)
            file.readline()  # its beginning is not read
            records = (parse_line(line, "split")[0] for line in file)
            found = next((record["step"] for record in records if record is not None), step)
            low, high = (middle, high) if found < step else (low, middle)
        file.seek(low)
        begin = low + (len(file.readline()) if low else 0)
        for line in file:
            later = _TRAIN_LINE.fullmatch(line)
            is_later = later is not None and int(later[1]) > step  # most of them: not parsed
            record = None if is_later else parse_line(line, "split")[0]
            # A last line without an end was torn by a kill: it was never a line.
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


def _append_line(fd: int, record: Mapping[str, Any]) -> None:
    """One write() of one line: a kill tears at most this one."""
    line = json.dumps(to_json(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"
    size_before, written = os.fstat(fd).st_size, 0
    try:
        while written < len(line):  # a full disk first takes a part of the line, and then raises
            written += os.write(fd, line[written:])
    except OSError:
        if written:
            os.ftruncate(fd, size_before)
        raise


def _complete_lines(path: Path, faults: list[str]) -> Iterator[tuple[bytes, JsonRecord | None]]:
    """Yield each line that has an end, as bytes and as a record; None where it is damaged, and then `faults` gets where and why."""
    kind = "split" if path.name == METRICS_FILE else "event"
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a kill: it was never a line
            record, fault = parse_line(line, kind)
            if fault:
                faults.append(f"{number} is damaged ({fault})")
            yield line, record


def parse_line(line: bytes, kind: str) -> tuple[JsonRecord | None, str]:
    """Return a line as a record or None, and why it is damaged. `kind` is its key that names a split or event."""
    try:
        record = from_json(json.loads(line))
    except (ValueError, RecursionError) as error:
        return None, str(error)
    fault = _fault_of(record, kind)
    return (None, fault) if fault else (record, "")


def _fault_of(record: Any, kind: str) -> str:
    """Return why a line is not what every reader needs; empty where it is sound."""
    if not isinstance(record, dict):
        return f"it holds a {type(record).__name__}, not an object"
    step, loss = record.get("step"), record.get("loss")
    if type(step) is not int or not 0 <= step < 2**63:
        return "it has no step" if step is None else f"its step is {step!r:.40}"
    if not isinstance(record.get(kind), str):
        return f"it has no {kind}"
    if any(type(value) is int and abs(value) >= 2**63 for value in record.values()):
        return "it has a number of more than 64 bits"
    return "" if loss is None or type(loss) in (int, float) else f"its loss is {loss!r:.40}"
