"""The recipes that come with the package: found by name, listed with what they need, copied to be edited."""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

RECIPES = Path(__file__).parents[1] / "recipes"


class ShippedRecipe(NamedTuple):
    """A recipe of the package: its file, and what the comment at its top says of it."""

    path: Path
    about: str
    """The first sentence."""
    notes: Mapping[str, str]
    """Hardware, Time, Expected, Data, Needs."""


@cache
def shipped_recipes() -> Mapping[str, ShippedRecipe]:
    """Return the package's recipes by name, sorted."""
    return {path.stem: _read(path) for path in sorted(RECIPES.glob("*.yaml"))}


def shipped_or(path: str | Path) -> str | Path:
    """Return the file of the package's recipe of this name where no such file exists here, else the path as it is."""
    name = str(path)
    is_name = re.fullmatch(r"\w+", name) and not os.path.lexists(name)
    return shipped_recipes()[name].path if is_name and name in shipped_recipes() else path


def copy_text(name: str, target: Path) -> str:
    """Return a recipe's text for a copy at `target`, whose path its comments name in place of the package's."""
    return shipped_recipes()[name].path.read_text().replace(f"recipes/{name}.yaml", str(target))


def _read(path: Path) -> ShippedRecipe:
    with path.open(encoding="utf-8") as file:
        header = []
        for line in file:
            if not line.startswith("#"):
                break
            header.append(line[1:].rstrip("\n"))
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
