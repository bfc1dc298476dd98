"""Read and write JSON files.

Files for users and other programs store NaN and Infinity as strings. Plain files are internal and have no such values.
"""

import ast
import hashlib
import json
import math
import numbers
import re
import stat
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel_train.core.files import read_regular, write_atomically
from accel_train.core.redaction import redact_text
from accel_train.core.state import JsonRecord

# JSON has no NaN: these strings stand for the three missing floats, in both directions.
NONFINITE_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
LARGEST_PLAIN_BYTES = 2**26
"""Largest plain file in bytes. Plain files are read whole; trainer.json is thousands of times smaller."""
DEEPEST_NESTING = 100
"""Most levels of lists and objects in JSON text. Code that walks a value may recurse this far."""
_DIGITS_OF_A_FLOAT = 309
"""Digits from which a whole number may exceed the range of a float."""
_AS_ZEROS = bytes(48 if 48 <= byte < 58 else byte for byte in range(256))
_PYTHON_LIST = re.compile(r"""\[\s*((?:'[^'\\]*'|"[^"\\]*"|-?\d+)\s*(?:,\s*(?=\S)|(?=\])))+\]""")
"""List of names or numbers as Python writes it. NumPy leaves out the commas, and Python would join the names."""
_NUMBERS = re.compile(r"\[\s+-?\d[\d.e+-]*(?:,\s+-?\d[\d.e+-]*)*\s+\]")


def write_json(path: Path, value: object) -> Path:
    """Write a value to a file as `json_text`, atomically."""
    return write_atomically(path, json_text(value).encode())


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of JSON text that another program may have written. `options` are for `json.loads`.

    A whole number beyond the range of a float becomes infinite, as 1e999 does. So `float` and `math.isfinite` accept
    every number, and a check for infinite numbers covers it.

    Raises:
        ValueError: not JSON, not text, or nested deeper than `DEEPEST_NESTING`.
    """
    if len(text) >= _DIGITS_OF_A_FLOAT:
        # A translated copy is searched at memory speed; a `parse_int` for every number would double the time. UTF-16
        # has a zero byte between two digits.
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        if b"0" * _DIGITS_OF_A_FLOAT in raw.translate(_AS_ZEROS, b"\0"):
            options["parse_int"] = _bounded_int
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST_NESTING} levels") from None
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    level, depth = [value] if brackets > DEEPEST_NESTING else [], 0
    while level:
        if depth == DEEPEST_NESTING:
            raise ValueError(f"nested deeper than {DEEPEST_NESTING} levels")
        items = (item for each in level for item in (each.values() if type(each) is dict else each))
        level, depth = [item for item in items if type(item) in (dict, list)], depth + 1
    return value


def _bounded_int(digits: str) -> int | float:
    number = float(digits)
    return int(digits) if math.isfinite(number) else number


def load_json(path: Path) -> Any:
    """Return the value of a JSON file that another program may have written.

    Raises:
        ValueError: the file cannot be read or parsed; the message begins with its path.
    """
    try:
        return parse_json(read_regular(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); is it complete?") from error


def load_object(path: Path) -> JsonRecord:
    """Return the object of a JSON file that another program may have written. Raises like `load_json`."""
    value = load_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not an object; is it the right file?")
    return value


def read_json(path: Path) -> JsonRecord:
    """Return a value written by `write_json`, with NaN and Infinity as floats."""
    value: JsonRecord = from_json(parse_json(read_regular(Path(path))))
    return value


def json_text(value: object) -> str:
    """Return a value as JSON text. NaN and Infinity become strings, as in metrics.jsonl."""
    text = json_line(value, indent=2).decode()
    # Puts each row of a matrix on one line.
    return _NUMBERS.sub(lambda row: " ".join(row.group().split()), text)


def json_line(value: object, indent: int | None = None) -> bytes:
    """Return a value as one line of metrics.jsonl. Half of a surrogate pair, as in names of files, is escaped."""
    text = json.dumps(to_json(value), indent=indent, allow_nan=False, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"


def write_plain_json(path: Path, value: object, *, durable: bool = True) -> Path:
    """Write a value without NaN as JSON, atomically."""
    return write_atomically(path, json.dumps(value, indent=1, allow_nan=False).encode(), durable=durable)


def read_plain_json(path: Path) -> Any:
    """Return the content of a small internal JSON file.

    Raises:
        ValueError: the file is not regular, too large, nested too deep, or not JSON.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("not a plain file")
    if path.stat().st_size > LARGEST_PLAIN_BYTES:
        raise ValueError(f"{path.stat().st_size} bytes exceed the limit of {LARGEST_PLAIN_BYTES}")
    return parse_json(path.read_bytes())


def json_digest(value: object) -> str:
    """Return the SHA-256 of a value in hex. The order of keys is ignored. Other objects count by their text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def to_json(value: Any) -> Any:
    """Return a value for JSON without secrets. NaN and Infinity become strings, arrays and tensors become lists."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        # json writes the names of `NONFINITE_NAMES`, but without quotes.
        return number if math.isfinite(number) else json.dumps(number)
    if callable(getattr(value, "tolist", None)):
        return to_json(value.tolist())
    # The end of a run writes the results of a task. A text is more useful there than an error.
    return redact_text(str(value))


def plain(value: Any) -> Any:
    """Return a value of numbers, strings and lists. Arrays and tensors become nested lists of Python scalars.

    Raises:
        TypeError: the value contains another type.
    """
    if value is None or isinstance(value, str | bool | int) or type(value) is float:
        return value
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str | int | float) else str(plain(key)): plain(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"a {type(value).__name__} is not a number, a text, or a list of them")


def plain_metrics(metrics: JsonRecord) -> JsonRecord:
    """Return metrics by name as `plain` values.

    Raises:
        ValueError: a metric cannot be written as JSON; the message names it.
    """
    found = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = plain(value)
        except TypeError as error:
            raise ValueError(f"the metric {name!r} cannot be saved: {error}. Return float(...) or a list.") from None
    return found


def from_json(value: Any) -> Any:
    """Return a value of `to_json` with NaN and Infinity as floats again."""
    if isinstance(value, str):
        return NONFINITE_NAMES.get(value, value)
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


def nested(cell: object) -> list[Any] | tuple[Any, ...] | JsonRecord | None:
    """Return a cell that is a list or an object, or the text of one (JSON, or as Python writes it), or None."""
    if isinstance(cell, str) and (text := cell.strip())[:1] in ("[", "{"):
        try:
            cell = parse_json(text)
        except ValueError:
            try:
                cell = ast.literal_eval(text) if "{" in text[:2] or _PYTHON_LIST.fullmatch(text) else None
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
    return cell if isinstance(cell, list | tuple | dict) else None


def utc_event(kind: str, step: int, message: str, rank: int | None, facts: JsonRecord) -> JsonRecord:
    """Return one line of events.jsonl with the current time."""
    return {"time": utc_now(), "step": step, "event": kind, "rank": rank, "message": message, **facts}


def utc_now() -> str:
    """Return the current UTC time as events and locks store it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def dotted_items(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for the values of nested mappings."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from dotted_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
