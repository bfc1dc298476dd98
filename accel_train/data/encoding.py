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
_UTF16_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_GUESSED_FROM_BYTES = 50_000_000
_LOOKED_AT_FOR_NULS = 4_000
_ONE_BYTE_ENCODINGS = ("cp1252", "iso8859-1", "iso8859-15")
"""Encodings that can decode nearly every file, even a file in another encoding."""
_WITH_PARTS = re.compile(r"utf-8|utf-(16|32)-[bl]e|ascii|cp(125\d|437|850|866)|(iso8859|koi8|mac)-.+")
"""Encodings whose files can be cut: the bytes of a line end occur as a line end alone."""


def encoding_of(path: Path, data: Data) -> str:
    """Return Python's name of a file's encoding: `data.encoding`, or for auto UTF-8, or UTF-16 if it has its mark.

    A mark gives the order of bytes. Reading skips it.
    """
    name = "utf-8" if data.encoding == "auto" else codecs.lookup(data.encoding).name
    if data.encoding != "auto" and name != "utf-16":
        return name.removesuffix("-sig")
    with path.open("rb", buffering=0) as file:
        return _UTF16_MARKS.get(file.read(2), name)


def has_parts(encoding: str) -> bool:
    """Return whether a part of a file in an encoding can be read alone."""
    return _WITH_PARTS.fullmatch(encoding) is not None


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
        line += raw[: error.start].decode(encoding, "replace").count("\n") + 1
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
"""First byte of a part of a file, and the byte after it. The lines that begin there belong to it."""


def place(path: Path, span: Span | None) -> str:
    """Return the name of a part of a file, for messages that count its lines."""
    return f"{path} from byte {span[0]:,}" if span and span[0] else str(path)


def read_text(path: Path, data: Data, span: Span | None = None) -> str:
    """Return the text of a file or of a part without its byte order mark. Line ends are unchanged."""
    encoding = encoding_of(path, data)
    with path.open("rb") as file:
        start, stop = (_line_at(file, at, encoding) for at in span) if span else (0, -1)
        file.seek(start)
        raw = file.read(stop - start)
    body = raw if start else raw.removeprefix(_mark(encoding))
    return decode(body, data, place(path, span), offset=start + len(raw) - len(body), encoding=encoding)


def _mark(encoding: str) -> bytes:
    """Return the byte order mark of an encoding. Empty: it has none."""
    return "\ufeff".encode(encoding, "ignore")


def _line_at(file: BinaryIO, at: int, encoding: str) -> int:
    """Return the first byte from `at` on that begins a line. A text without lines is cut at words or characters."""
    width = len("\n".encode(encoding))
    file.seek(max(0, at - width))
    # Also from 0 on: a remote file then reads all of the part ahead.
    near = file.read(_LINE_WITHIN_BYTES)
    if not at:
        return 0
    # Bytes that continue a character of UTF-8, or a pair of UTF-16.
    goes_on = rb"[\x80-\xbf]" if width == 1 else rb"[\xdc-\xdf]|.[\xdc-\xdf]"
    signs = (*(re.escape(sign.encode(encoding)) for sign in "\n "), rb".{%d}(?!%b)" % (width, goes_on))
    ends = (re.match(rb"(?s)(?:.{%d})*?" % width + sign, near) for sign in signs)
    return at - width + next((found.end() for found in ends if found), 0)


def raw_lines(file: BinaryIO, encoding: str) -> Iterator[bytes]:
    """Yield the lines of an opened file from a line on. It may be read from in between."""
    newline = "\n".encode(encoding)
    while line := file.readline():
        line += file.read(-len(line) % len(newline))
        while not line.endswith(newline) and (more := file.readline()):
            line += more + file.read(-len(line + more) % len(newline))
        yield line


def read_lines(path: Path, data: Data, span: Span | None = None) -> Iterator[tuple[str, int]]:
    """Yield (line with its end, bytes). Splits only at LF, because JSON and csv may contain other line ends."""
    encoding = encoding_of(path, data)
    if not has_parts(encoding):
        yield from _decoded_lines(path, data, encoding)
        return
    offset, stop = span or (0, None)
    where, mark, width = place(path, span), _mark(encoding), len("\n".encode(encoding))
    with path.open("rb") as file:
        lines: Iterator[bytes] = file if width == 1 else raw_lines(file, encoding)
        if offset:
            file.seek(offset - width)
            offset += len(next(lines, b"")) - width
        for number, raw in enumerate(lines, start=1):
            if stop is not None and offset >= stop:
                return
            start = len(mark) if offset == 0 and raw.startswith(mark) else 0
            text = decode(raw[start:], data, where, offset=offset + start, line=number - 1, encoding=encoding)
            yield text, len(raw)
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
