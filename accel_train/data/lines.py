"""Lines of a data file, the fields of csv and the objects of jsonl, with errors that name file, line and byte."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.recipe_data import Data

BOM = b"\xef\xbb\xbf"


def decode(raw: bytes, data: Data, path: Path, *, offset: int, line: int) -> str:
    """UTF-8 to text; `offset` bytes and `line` lines of the file lie before `raw`."""
    try:
        text = raw.decode("utf-8", data.encoding_errors)
    except UnicodeDecodeError as error:
        utf16 = offset + error.start == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = (
            "it looks like UTF-16, so convert it (iconv -f UTF-16 -t UTF-8)" if utf16 else "convert the file to UTF-8"
        )
        line += raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}: byte 0x{raw[error.start]:02x} at position {offset + error.start} (line {line}) is not UTF-8; {hint}, "
            f"or set data.encoding_errors: replace"
        ) from None
    if data.encoding_errors == "strict" and (nul := raw.find(0)) >= 0:
        line += raw.count(b"\n", 0, nul) + 1
        raise ValueError(
            f"{path}: byte 0x00 at position {offset + nul} (line {line}) is in no text; is it a binary file? set "
            "data.encoding_errors: replace to read it all the same"
        )
    return text


class Line(NamedTuple):
    text: str
    num_bytes: int
    number: int


def read_lines(path: Path, data: Data) -> Iterator[Line]:
    """Lines with their ends. Split at LF only: the other line ends of Unicode may stand inside JSON and csv."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            start = len(BOM) if number == 1 and raw.startswith(BOM) else 0
            yield Line(decode(raw[start:], data, path, offset=offset + start, line=number - 1), len(raw), number)
            offset += len(raw)


class CsvRow(NamedTuple):
    fields: list[str]
    number: int
    """The line on which it begins, from 1."""


def csv_rows(path: Path, lines: Iterable[str]) -> Iterator[CsvRow]:
    """The rows of a csv (or, by its name, tsv) file, its header first; blank lines are none.

    Raises:
        ValueError: a row has more or fewer fields than the header, or quotes do not close.
    """
    previous_limit = csv.field_size_limit(sys.maxsize)  # the module's own, 128 KiB, is shorter than many texts
    try:
        lines = iter(lines)
        first = next(lines, "")
        reader = csv.reader(chain([first] if first else [], lines), delimiter=delimiter_of(path, first), strict=True)
        header = next(reader, None)
        if header is None:
            return
        yield CsvRow(header, 1)
        while True:
            number = reader.line_num + 1
            row = next(reader, None)
            if row is None:
                return
            if not row:  # a blank line
                continue
            if len(row) != len(header):
                raise ValueError(
                    f"{path}:{number}: the row has {len(row)} fields, the header {len(header)} ({', '.join(header)}); "
                    f'put quotes around a text that holds a separator or line end: "a, b"'
                )
            yield CsvRow(row, number)
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: not csv ({error}); check the quotes near this line") from None
    finally:
        csv.field_size_limit(previous_limit)


def delimiter_of(path: Path, header: str) -> str:
    """What separates the fields: a tab in a .tsv, and where the header has tabs and no comma; else a comma.

    Raises:
        ValueError: the header has semicolons and no comma, as some spreadsheets write them.
    """
    if path.suffix.lower() == ".tsv" or ("\t" in header and "," not in header):
        return "\t"
    if ";" in header and "," not in header:
        raise ValueError(
            f"{path}:1: its fields look separated by semicolons ({header.strip()}); save it with commas or tabs"
        )
    return ","


def json_object(line: str, where: str, example_column: str) -> dict[str, Any]:
    """The object that a line of jsonl holds.

    Raises:
        ValueError: it holds none.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); each line must be one object; repair or drop it") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {show_cell(row)} is not an object; write {{{example_column!r}: ...}} on each line")
    return row


def show_cell(value: object) -> str:
    """A cell as a message shows it: JSON, cut short."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."
