"""The recipes that come with the package: find them by name, list their requirements, and copy them for editing."""

import os
import re
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

RECIPES = Path(__file__).parents[1] / "recipes"


class ShippedRecipe(NamedTuple):
    """A shipped recipe: its file, and the parsed comment at the top of the file."""

    path: Path
    about: str
    """First sentence of the comment, or the first two if the first is a question."""
    notes: Mapping[str, str]
    """Notes by name: Hardware, Time, Expected, Data, Needs."""


@cache
def shipped_recipes() -> Mapping[str, ShippedRecipe]:
    """Return the shipped recipes by name, sorted."""
    return {path.stem: _read(path) for path in sorted(RECIPES.glob("*.yaml"))}


def shipped_or(path: str | Path) -> str | Path:
    """Return the file of the shipped recipe with this name if the path does not exist, otherwise the path."""
    name = str(path)
    is_name = re.fullmatch(r"\w+", name) and not os.path.lexists(name)
    return shipped_recipes()[name].path if is_name and name in shipped_recipes() else path


def copy_text(name: str, target: Path) -> str:
    """Return a recipe's text for a copy at `target`. Its comments name `target` in place of the original path."""
    return shipped_recipes()[name].path.read_text().replace(f"recipes/{name}.yaml", str(target))


def _read(path: Path) -> ShippedRecipe:
    with path.open(encoding="utf-8") as file:
        header = [line[1:].rstrip("\n") for line in takewhile(lambda line: line.startswith("#"), file)]
    about = re.split(r"(?<=[.?])\s", " ".join(header[: header.index("")]).strip())
    sentences = about[:2] if about[0].endswith("?") else about[:1]
    notes: dict[str, str] = {}
    name = None
    for line in header:
        if found := re.match(r" ([A-Z][a-z]+)  +(\S.*)", line):
            name, notes[found[1]] = found[1], found[2]
        elif name and re.match(r" {8,}\S", line):
            notes[name] += f" {line.strip()}"
        else:
            name = None
    return ShippedRecipe(path, " ".join(sentences), notes)
