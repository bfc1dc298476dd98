"""Terminal output other than results: colors and progress of a command."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TextIO, cast

_COLOURS = r"(?:[0-4]|22|39|[39][1-7])"
_CONTROLS = re.compile(
    rf"(\A\r|\x1b\[{_COLOURS}(?:;{_COLOURS})*m)|\r(?=\n)|([\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff])"
)
_MOVES = re.compile(r"\n*(?:\x1b\[A)*|\x1b\[H\x1b\[J")
"""Cursor moves that progress bars and `watch` make, each in a separate write."""
Colour = Literal["bold", "dim", "red", "green", "yellow"]
_CODES: dict[Colour, int] = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def printable(text: str) -> str:
    """Return a text on one line, with a space for each character that is not printable."""
    return "".join(c if c.isprintable() else " " for c in text)


def without_controls(text: str) -> str:
    """Return a text with `?` for control sequences (title, clipboard, cursor). Colors stay."""
    if _MOVES.fullmatch(text):
        return text
    return _CONTROLS.sub(lambda found: found[1] or ("?" if found[2] else ""), text)


def shown_on(stream: TextIO | None, text: str) -> str:
    """Return a text without controls, with an escape for each character that the stream's encoding lacks."""
    text, encoding = without_controls(text), getattr(stream, "encoding", None)
    if text.isascii() or not encoding:
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a text as `shown_on` returns it, on standard output by default."""
    stream = sys.stdout if stream is None else stream
    print(shown_on(stream, text), file=stream, flush=True)


class _Filtered:
    """A stream that filters its text with `shown_on`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(shown_on(self._stream, text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def controls_kept_out() -> Iterator[None]:
    """Filter printed text with `shown_on` inside the block.

    Names and messages may come from another person's run or data, in letters that a file of Windows cannot hold.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, stream and _Filtered(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal with a movable cursor. With TERM=dumb, it is not."""
    return stream is not None and not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"


def width_of(stream: TextIO | None) -> int:
    """Return the columns of a terminal, or 0 if the stream is not a usable terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
    except (OSError, ValueError):
        return 0


def columns_of(stream: TextIO | None) -> int:
    """Return the width for wrapped text: COLUMNS if it is set, otherwise the terminal's; 0 for no wrapping."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() and int(asked) else width_of(stream)


def use_colour(stream: TextIO | None) -> bool:
    """Return whether to color text for a stream: on a terminal, never with NO_COLOR, always with FORCE_COLOR.

    Empty variables do not count: https://no-color.org, https://force-color.org.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)


def paint(text: str, *colours: Colour, on: bool = True) -> str:
    """Return the text in these colors, or unchanged if `on` is false."""
    return f"\x1b[{';'.join(str(_CODES[colour]) for colour in colours)}m{text}\x1b[0m" if on else text


def is_main() -> bool:
    """Return whether this is the process of a launch that prints: rank 0."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def busy(text: str, *, every_seconds: float = 1.0) -> Iterator[None]:
    """Print a message on stderr on rank 0 before a slow operation. A terminal also shows the elapsed seconds.

    A thread counts the seconds. Inside the block, print nothing else and do not fork.
    """
    stream = sys.stderr
    if stream is None or not is_main():
        yield
        return
    is_over, counts, began = threading.Event(), is_terminal(stream), time.monotonic()

    def count() -> None:
        # The reader has closed the stream.
        with suppress(OSError, ValueError):
            while not is_over.wait(every_seconds):
                print(f"\r{text} ... {time.monotonic() - began:.0f} s", end="", file=stream, flush=True)

    with suppress(OSError, ValueError):
        print(f"{text} ...", end="" if counts else "\n", file=stream, flush=True)
    thread = threading.Thread(target=count, daemon=True)
    if counts:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if counts:
            thread.join()
            with suppress(OSError, ValueError):
                print(file=stream, flush=True)
