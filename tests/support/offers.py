"""The flags that messages offer, and whether following them ends well."""

import re
import shlex
from collections.abc import Callable, Sequence

_VALUE = r"(?:'[^']*'|[^\s;,()'?]+(?:,[^\s;,()'?]+)*)"
_FLAGS = re.compile(rf"--[a-z_]+(?:\.[a-z_]+)? {_VALUE}(?: --[a-z_]+(?:\.[a-z_]+)? {_VALUE})*")
_PROSE = {"and", "name"}


def offers(message: str) -> list[tuple[str, ...]]:
    """Return the flags that a message offers with their values. Flags with a placeholder (COLUMN) are left out."""
    found = []
    for match in _FLAGS.finditer(message):
        # A flag of the user's own is followed by what is wrong with it.
        is_own = match[0].endswith(":") or message[match.end() :].startswith((":", " needs"))
        words = tuple(shlex.split(match[0].rstrip(".:")))
        values = words[1::2]
        if not is_own and _PROSE.isdisjoint(values) and not any(re.fullmatch("[A-Z,]{3,}", each) for each in values):
            found.append(words)
    return found


def dead_ends(call: Callable[[Sequence[str]], str | None], flags: Sequence[str] = (), depth: int = 3) -> list[str]:
    """Follow all offers of a refused call, and return those that end in a message without a further offer.

    `call` takes flags and returns the message, or None for success.
    """
    message = call(flags)
    if message is None:
        return []
    found = offers(message) if depth else []
    ends = [end for offered in found for end in dead_ends(call, [*flags, *offered], depth - 1)]
    return ends if found else [f"{' '.join(flags)}: {message}"]
