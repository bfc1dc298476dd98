"""Format text for users: memory, counts, durations, plurals, and suggestions for mistyped words."""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from accel_train.core.terminal import paint

LARGEST_COUNT = 2**31 - 1
"""Upper bound of integer settings. The product of two (such as steps and batch size) then fits 64 bits."""


def is_whole(text: str) -> bool:
    """Return whether a text is a whole number of up to 18 ASCII digits, which fits 64 bits."""
    return re.fullmatch(r"-?[0-9]{1,18}", text) is not None


def did_you_mean(
    word: str,
    names: Iterable[str],
    otherwise: str = "",
    *,
    at_most: int = 1,
    least: float = 0.6,
    show: Callable[[str], str] = str,
) -> str:
    """Return `did you mean NAME?` with the nearest names, or `otherwise` if no name is similar.

    Names that begin with the word are nearest. `least` is the lowest similarity that counts, from 0 to 1.
    """
    known = list(names)
    longer = [name for name in known if len(word) > 2 and re.match(rf"{re.escape(word)}[\w .-]*$", name)]
    small = {name.lower(): name for name in known}
    near = longer[:at_most] or [small[name] for name in get_close_matches(word.lower(), small, at_most, least)]
    return f"did you mean {' or '.join(map(show, near))}?" if near else otherwise


def format_bytes(num_bytes: float) -> str:
    """Return `1,024.5 GiB`, or `1.5 MiB` below 1 GiB."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:,.1f} {name}"


def format_count(number: float, one: str = "", many: str = "") -> str:
    """Return `1,234`, or with a unit `1 run`, `1,234 runs`. Give `many` if the plural is not `one` with an s."""
    count = f"{round(number):,}" if math.isfinite(number) else str(number)
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
    """Return a line wrapped between words at `width` columns.

    Continuation lines are indented to the last table column that begins in the first half of the line.
    """
    if not 20 < width < len(line):
        return line
    columns = [found.end() for found in re.finditer(r"\S {2,}(?=\S)", line) if found.end() <= width // 2]
    hang = columns[-1] if columns else len(line) - len(line.lstrip()) + 2
    return textwrap.fill(
        line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )


def format_blocks(blocks: Iterable[tuple[str, Sequence[tuple[str, str]]]], *, colour: bool) -> list[str]:
    """Return the lines of titled blocks with aligned rows of name and text. With `colour`, titles are bold."""
    lines = []
    for title, rows in blocks:
        width = max((len(name) for name, _ in rows), default=0)
        lines += ["", paint(title, "bold", on=colour)]
        lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    return lines
