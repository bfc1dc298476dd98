"""Text for people: memory, counts, durations, plurals, and the names that a mistyped word may mean."""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from accel_train.core.terminal import paint

LARGEST_COUNT = 2**31 - 1
"""Upper bound of integers that a user sets, so that the product of two of them (steps and batch size) fits 64 bits."""


def did_you_mean(
    word: str,
    names: Iterable[str],
    otherwise: str = "",
    *,
    at_most: int = 1,
    least: float = 0.6,
    show: Callable[[str], str] = str,
) -> str:
    """Return `did you mean NAME?` with the nearest names, or `otherwise` where none reaches a likeness of `least` (0 to 1)."""
    near = get_close_matches(word, list(names), n=at_most, cutoff=least)
    return f"did you mean {' or '.join(map(show, near))}?" if near else otherwise


def format_bytes(num_bytes: float) -> str:
    """Return `1,024.5 GiB`, or `1.5 MiB` below 1 GiB."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:,.1f} {name}"


def format_count(number: float, one: str = "", many: str = "") -> str:
    """Return `1,234`; with a unit `1 run`, `1,234 runs`, for which `many` is given where it is not `one` with an s."""
    count = f"{round(number):,}"
    return count if not one else f"{count} {one if number == 1 else many or f'{one}s'}"


def format_seconds(seconds: float) -> str:
    """Return `42s`, `3m 07s`, `2h 05m` or `3d 04h`."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    for unit, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name} {whole % unit // part:02}{part_name}"
    return f"{whole}s"


def wrap(line: str, width: int) -> str:
    """Return a line broken between words at `width` columns; the rest stands below its last column that begins in the first half."""
    if not 20 < width < len(line):
        return line
    columns = [found.end() for found in re.finditer(r"\S {2,}(?=\S)", line) if found.end() <= width // 2]
    hang = columns[-1] if columns else len(line) - len(line.lstrip()) + 2
    return textwrap.fill(
        line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )


def format_blocks(blocks: Iterable[tuple[str, Sequence[tuple[str, str]]]], *, colour: bool) -> list[str]:
    """Return the lines of titled blocks: rows of a name and a text, aligned; with `colour` the titles are bold."""
    lines = []
    for title, rows in blocks:
        width = max((len(name) for name, _ in rows), default=0)
        lines += ["", paint(title, "bold", on=colour)]
        lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    return lines
