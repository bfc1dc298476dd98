"""Decode text files and split lines; errors name file, byte and line."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from string import ascii_letters
from typing import BinaryIO

from accel_train.core.format import format_count
from accel_train.recipe.data import Data

BOM = codecs.BOM_UTF8
_LINE_WITHIN_BYTES = 1 << 16
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_GUESSED_FROM_BYTES = 50_000_000
_LOOKED_AT_FOR_NULS = 4_000
_ONE_BYTE_ENCODINGS = ("cp1252", "iso8859-1", "iso8859-15")
"""Encodings that can decode nearly every file, even a file in another encoding."""


def encoding_of(path: Path, data: Data) -> str:
    """Return Python's name of a file's encoding: `data.encoding`, or for auto UTF-8, or UTF-16 if it has its mark."""
    if data.encoding != "auto":
        name = codecs.lookup(data.encoding).name
        # Both skip a byte order mark.
        return "utf-8" if name == "utf-8-sig" else name
    with path.open("rb", buffering=0) as file:
        return "utf-16" if file.read(2) in _UTF16_MARKS else "utf-8"


def guess_encoding(path: Path, errors: str = "strict") -> tuple[str, str] | None:
    """Return (encoding, reason) for a file that is not UTF-8, or None for UTF-8 and for UTF-16 with a byte order mark.

    With `errors="replace"`, a file that is mostly UTF-8 counts as UTF-8.

    Raises:
        ValueError: the file is UTF-8 except for some bytes; the message names the line of the first wrong byte.
    """
    raw = _beginning_of(path)
    if raw[:2] in _UTF16_MARKS:
        return None
    for start, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if (part := raw[start:_LOOKED_AT_FOR_NULS:2]) and part.count(0) > len(part) / 3:
            return name, "every second byte is 0, as in UTF-16, and it has no byte order mark"
    try:
        # Incremental, because the read part may end within a character.
        codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError as error:
        num_valid, num_wrong = _count_utf8(raw)
        where = f"byte 0x{raw[error.start]:02x} at position {error.start} is not UTF-8"
        if num_valid >= num_wrong:
            if errors == "replace":
                return None
            line = raw.count(b"\n", 0, error.start) + 1
            raise ValueError(
                f"{path}:{line}: {where}, unlike {format_count(num_valid, 'other character')} (bytes like this "
                f"one: {num_wrong:,}). Repair the line, set data.encoding_errors: replace to read U+FFFD there, or "
                "name the encoding in data.encoding"
            ) from None
        try:
            raw.decode("cp1252")
        except UnicodeDecodeError:
            return "latin-1", f"{where}; in Latin-1 every byte is a character"
        return "cp1252", f"{where}; Windows' Latin-1 can read all of it"
    return None


def check_western(path: Path) -> None:
    """Check that a file looks like a Western European language in a single-byte encoding.

    Raises:
        ValueError: over a third of its letters are not ASCII.
    """
    raw = _beginning_of(path)
    num_ascii = len(raw) - len(raw.translate(None, ascii_letters.encode()))
    num_others = len(raw.translate(None, bytes(range(128))))
    if 2 * num_others > num_ascii:
        raise ValueError(
            f"{path} is not UTF-8, and {num_others / (num_ascii + num_others):.0%} of its letters are not ASCII: too "
            "many for Windows' Latin-1. Name the encoding: --data.encoding cp1251 (Cyrillic), gbk, big5, shift_jis or "
            "euc_kr"
        )


def check_encoding(path: Path, data: Data) -> None:
    """Check that a file is not UTF-8 if `data.encoding` is a single-byte encoding.

    A single-byte encoding would decode UTF-8 to wrong letters without an error.

    Raises:
        ValueError: the file is UTF-8; the message names file and setting.
    """
    if data.encoding == "auto" or codecs.lookup(data.encoding).name not in _ONE_BYTE_ENCODINGS:
        return
    num_valid, num_wrong = _count_utf8(_beginning_of(path))
    if num_valid and num_valid >= num_wrong:
        raise ValueError(
            f"{path} is UTF-8, and data.encoding={data.encoding} would read {num_valid:,} of its characters as other "
            f"letters. Set data.encoding: auto{'' if not num_wrong else ' and data.encoding_errors: replace'}"
        )


def _beginning_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_GUESSED_FROM_BYTES)


def _count_utf8(raw: bytes) -> tuple[int, int]:
    """Return the number of valid UTF-8 characters outside ASCII and the number of places with invalid bytes."""
    valid = raw.decode("utf-8", "ignore")
    num_wrong = raw.decode("utf-8", "replace").count("\ufffd") - valid.count("\ufffd")
    return len(valid) - len(valid.encode("ascii", "ignore")), num_wrong


def in_its_encoding(data: Data) -> tuple[Data, list[str]]:
    """Return data settings that read a UTF-8 file as UTF-8 although the trained run had another encoding, and a note.

    In Latin-1 and Windows' Latin-1 every byte is a letter, so reading would not fail.
    """
    path = Path(str(data.train)).expanduser()
    if data.encoding == "auto" or not path.is_file() or guess_encoding(path, data.encoding_errors) is not None:
        return data, []
    note = f"{path} is read as UTF-8, because it is UTF-8, and not as {data.encoding}, as the run's own data"
    return data.model_copy(update={"encoding": "auto"}), [note]


def decode(raw: bytes, data: Data, where: object, *, offset: int = 0, line: int = 0, encoding: str = "utf-8") -> str:
    """Return bytes as text. `offset` bytes and `line` lines of the source precede `raw`.

    Raises:
        ValueError: a byte is invalid or a character is NUL, and `data.encoding_errors` is strict; the message names
            the position.
    """
    try:
        text = raw.decode(encoding, data.encoding_errors)
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start) + 1
        at = f"{where}: byte 0x{raw[error.start]:02x} at position {offset + error.start} (line {line})"
        raise ValueError(_fault(at, encoding)) from None
    if data.encoding_errors == "strict" and (nul := text.find("\0")) >= 0:
        line += text.count("\n", 0, nul) + 1
        position = offset + len(text[:nul].encode(encoding))
        raise ValueError(
            f"{where}: byte 0x00 at position {position} (line {line}) does not occur in text; is this a binary file? "
            "data.encoding_errors: replace reads it anyway"
        )
    return text


Span = tuple[int, int]
"""First byte of a part of a UTF-8 file, and the byte after it. The lines that begin there belong to it."""


def place(path: Path, span: Span | None) -> str:
    """Return the name of a part of a file, for messages that count its lines."""
    return f"{path} from byte {span[0]:,}" if span and span[0] else str(path)


def read_text(path: Path, data: Data, span: Span | None = None) -> str:
    """Return the text of a file or of a part without its byte order mark. Line ends are unchanged."""
    if span is not None:
        with path.open("rb") as file:
            start, stop = (_line_at(file, at) for at in span)
            file.seek(start)
            return decode(file.read(stop - start), data, place(path, span), offset=start).removeprefix("\ufeff")
    raw, encoding = path.read_bytes(), encoding_of(path, data)
    body = raw.removeprefix(BOM) if encoding == "utf-8" else raw
    text = decode(body, data, path, offset=len(raw) - len(body), encoding=encoding)
    return text.removeprefix("\ufeff") if encoding != "utf-8" else text


def _line_at(file: BinaryIO, at: int) -> int:
    """Return the first byte from `at` on that begins a line. A text without lines is cut at words or characters."""
    file.seek(max(0, at - 1))
    # Also from 0 on: a remote file then reads all of the part ahead.
    near = file.read(_LINE_WITHIN_BYTES)
    if not at:
        return 0
    ends = (re.search(pattern, near) for pattern in (rb"\n", rb" ", rb"(?s).(?![\x80-\xbf])"))
    return at - 1 + next((found.end() for found in ends if found), 0)


def read_lines(path: Path, data: Data, span: Span | None = None) -> Iterator[tuple[str, int]]:
    """Yield (line with its end, bytes). Splits only at LF, because JSON and csv may contain other line ends."""
    # Files in other encodings have no parts.
    encoding = "utf-8" if span else encoding_of(path, data)
    if encoding != "utf-8":
        yield from _decoded_lines(path, data, encoding)
        return
    offset, stop = span or (0, None)
    where = place(path, span)
    with path.open("rb") as file:
        if offset:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        for number, raw in enumerate(file, start=1):
            if stop is not None and offset >= stop:
                return
            start = len(BOM) if offset == 0 and raw.startswith(BOM) else 0
            yield decode(raw[start:], data, where, offset=offset + start, line=number - 1), len(raw)
            offset += len(raw)


def _decoded_lines(path: Path, data: Data, encoding: str) -> Iterator[tuple[str, int]]:
    """Yield (line, bytes) of a file in an encoding whose line end may take several bytes."""
    # The encoder writes a byte order mark in front of each text (UTF-16).
    mark = len("".encode(encoding))
    number = 0
    try:
        with path.open(encoding=encoding, errors=data.encoding_errors, newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if "\0" in line and data.encoding_errors == "strict":
                    raise ValueError(
                        f"{path}: line {number} has a NUL character, which text never has; is it {encoding}?"
                    )
                yield line.removeprefix("\ufeff") if number == 1 else line, len(line.encode(encoding, "replace")) - mark
    # Includes UTF-16 without a byte order mark.
    except UnicodeError as error:
        raise ValueError(_fault(f"{path}: the text after line {number} ({error})", encoding)) from None


def _fault(at: str, encoding: str) -> str:
    if encoding == "utf-8":
        return (
            f"{at} is not UTF-8; convert the file, set data.encoding (latin-1, say), or set data.encoding_errors: "
            "replace"
        )
    return f"{at} is not {encoding}; name another data.encoding, or set data.encoding_errors: replace"
