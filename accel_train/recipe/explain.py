"""Explain a setting (type, default, meaning, example), or list the settings of a section."""

import re
import shlex
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from accel_train.core.errors import SettingError
from accel_train.recipe.loader import shipped_recipes
from accel_train.recipe.names import (
    REQUIRED_EXAMPLES,
    choices_of,
    fields_of,
    free_names,
    kinds_of,
    look_up,
    names_in,
    recipe_names,
    remedy_for_unknown,
    rule_of,
)
from accel_train.recipe.tasks import TASKS, describe_tasks, tasks_with
from accel_train.recipe.yaml_core import parse_yaml, show

_FEW = 3
"""Largest number of settings at which a section is shown completely."""


class Explained(NamedTuple):
    """A setting or a section of the recipe."""

    name: str
    takes: str
    default: str | None
    """Default as a recipe writes it; None for a required setting and for a section."""
    meaning: str
    example: Any
    tasks: tuple[str, ...]
    """Tasks that the setting belongs to. Empty if it does not depend on the task."""


def explained(name: str) -> list[Explained]:
    """Return a setting or section, and all settings below it. The empty name stands for the whole recipe.

    Raises:
        ValueError: the setting does not exist. The message names the nearest one.
    """
    name = _known(name)
    return [_explained(other) for other in recipe_names() if name in ("", other) or other.startswith(f"{name}.")]


def _explained(name: str) -> Explained:
    example = None
    if not isinstance(recipe_names()[name], type) and (example := example_of(name)) is None:
        example = REQUIRED_EXAMPLES.get(name)
    return Explained(name, rule_of(name), *_default_and_meaning(name), example, tasks_with(name))


def _default_and_meaning(name: str) -> tuple[str | None, str]:
    info = recipe_names()[name]
    if isinstance(info, type):
        return None, ""
    return None if info.is_required() else show(info.default), " ".join((info.description or "").split())


def _known(name: str) -> str:
    """Return the name of a setting or section. A name below a free mapping becomes the mapping's name."""
    name = next((free for free in free_names() if name.startswith(f"{free}.")), name)
    if name and name not in recipe_names():
        raise SettingError(f"unknown setting {name}", remedy_for_unknown(name))
    return name


def explain(name: str, width: int = 80) -> str:
    """Return the description of a setting or section by its dotted name, in lines of at most `width` characters.

    The empty name lists the sections.

    Raises:
        ValueError: the setting does not exist. The message names the nearest one.
    """
    name = _known(name)
    info = recipe_names().get(name)
    below = names_in(name)
    lines = _lines_of_setting(name, width) if isinstance(info, FieldInfo) else []
    if name == "task":
        lines += ["", "Built-in tasks, and what a model learns:", *describe_tasks(TASKS, width)]
    if 0 < len(below) <= _FEW:
        for other in below:
            lines += ["", explain(other, width)]
    elif below:
        lines += ["", f"{name} has, with defaults:" if name else "A recipe has:"]
        tasks: tuple[str, ...] = ()
        for other in below:
            if tasks_with(other) != tasks:
                tasks = tasks_with(other)
                lines += ["", *textwrap.wrap(f"for {', '.join(tasks)}:", width)]
            lines += _summary(other, width)
        lines += ["", *textwrap.wrap(f"`accel-train explain {below[-1]}` says more of one.", width)]
    return "\n".join(lines).lstrip("\n")


def example_of(name: str) -> Any:
    """Return an example value of a setting.

    The first that exists is used: the field's example, a value in a shipped recipe, a choice of its type, its default.
    """
    info = recipe_names()[name]
    if isinstance(info, FieldInfo) and info.examples:
        return info.examples[0]
    default = None if isinstance(info, type) or info.is_required() else info.default
    for tree in _shipped_trees():
        value = look_up(tree, name)
        if value is not None and value != default and not isinstance(value, Mapping):
            return value
    choices = [choice for choice in choices_of(name) if choice not in (default, "auto")]
    if not choices:
        return True if default is False else default
    return choices[:1] if isinstance(default, tuple) else choices[0]


@cache
def _shipped_trees() -> list[Any]:
    return [parse_yaml(recipe.path.read_text(), name)[0] for name, recipe in shipped_recipes().items()]


def _lines_of_setting(name: str, width: int) -> list[str]:
    found, (as_yaml, as_flag) = _explained(name), written_example(name)
    facts = {"takes": found.takes, "default": found.default or "required", "meaning": found.meaning}
    facts |= {"tasks": ", ".join(found.tasks), "example": as_yaml, "": as_flag}
    lines = [name]
    for what, text in facts.items():
        # A fact without a text takes no line.
        lines += textwrap.wrap(
            text, width, initial_indent=f"  {what:8}", subsequent_indent=" " * 10, break_long_words=False
        )
    return lines


def written_example(name: str) -> tuple[str, str]:
    """Return a setting's example as a line of YAML and as a flag. Empty without an example, or if list items have no
    flags.
    """
    value = example_of(name)
    if value is None:
        return REQUIRED_EXAMPLES.get(name, ""), ""
    written = show(value)
    as_yaml, path = written, name.split(".")
    for depth in range(len(path), 0, -1):
        as_yaml = f"{path[depth - 1]}: {as_yaml}" if depth == 1 else f"{{{path[depth - 1]}: {as_yaml}}}"
        if depth > 1 and tuple in kinds_of(".".join(path[: depth - 1])):
            as_yaml, path = f"[{as_yaml}]", [*path[: depth - 1], ""]
    # Items of a list have no separate flags.
    return as_yaml, f"--{name} {_quoted(written)}" if path[-1] else ""


def _quoted(text: str) -> str:
    """Return a text quoted for a shell, as one word."""
    if not set(text) & set(" []{}*'\"$"):
        return text
    return f'"{text}"' if "'" in text and not set(text) & set('"$`') else shlex.quote(text)


def _summary(name: str, width: int) -> list[str]:
    fields, (default, meaning) = fields_of(name), _default_and_meaning(name)
    first = f"has {fields}" if fields else re.split(r"(?<=\w)[.;](?: |$)", meaning)[0]
    lines = [f"  {name}" if fields else f"  {name}: {default or 'required'}"]
    return [*lines, *textwrap.wrap(first, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
