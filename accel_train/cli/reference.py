"""The reference pages of settings, commands, and recipes in Markdown, generated from schema, parser, and recipes."""

import os
import re
from collections.abc import Iterator
from unittest.mock import patch

from accel_train.cli.commands import COMMANDS
from accel_train.cli.main import build_parser
from accel_train.recipe.explain import explain
from accel_train.recipe.names import recipe_names
from accel_train.recipe.shipped import shipped_recipes

_UNWRAPPED = 100_000
"""Width that lines of `explain` never reach."""


def settings_page() -> str:
    """Return a page with every setting of a recipe: type, default, meaning, and an example."""
    return "\n".join(_settings_lines()) + "\n"


def _settings_lines() -> Iterator[str]:
    yield "# Settings\n"
    yield (
        "Every setting of a recipe. `accel-train explain SETTING` prints the same in a terminal, and any setting can "
        "be given on the"
    )
    yield "command line: `--optimizer.learning_rate 1e-3`."
    sections = {name.partition(".")[0] for name in recipe_names() if "." in name}
    heading = ""
    for name in recipe_names():
        top = name.partition(".")[0]
        wanted = top if top in sections or heading not in ("", "The recipe") else "The recipe"
        if wanted != heading:
            yield f"\n## {wanted}"
            heading = wanted
        said = _parts_of(explain(name, _UNWRAPPED).split("\n\n")[0])
        # A section has no type. Its settings follow.
        if "takes" in said:
            yield from _lines_of_setting(name, said)


def _parts_of(explanation: str) -> dict[str, str]:
    """Return the parts of an explanation by the word at the start of their lines; `""` is the flag."""
    lines = explanation.splitlines()[1:]
    return {line[:10].strip(): line[10:] for line in lines if line.startswith("  ") and line[10:]}


def _lines_of_setting(name: str, said: dict[str, str]) -> Iterator[str]:
    yield f"\n### `{name}` {{#{name if '.' in name else name + '-setting'}}}\n"
    if "meaning" in said:
        yield f"{_plain(said['meaning'])}\n"
    default = said["default"]
    yield f"- takes {_plain(said['takes'])}; " + (
        "no default" if default.startswith("none: ") else f"default `{default}`"
    )
    if "example" in said:
        yield f"- `{said['example']}`" + (f", or `{said['']}`" if "" in said else "")


def _plain(text: str) -> str:
    """Return a text with Markdown's special characters escaped, except within backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[\]#|])", r"\\\1", part) for part in parts)


def commands_page() -> str:
    """Return a page with every command and its help text, as `accel-train COMMAND --help` prints it."""
    texts: list[str] = []
    with patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}):
        build_parser(extend=lambda own, command: texts.append(own.format_help().rstrip()))
    lines = [
        "# Commands",
        "",
        "What `accel-train COMMAND --help` prints. `python -m accel_train` is the same program.",
        "",
    ]
    for (name, command), text in zip(COMMANDS.items(), texts, strict=True):
        lines += [f"## {name}", "", f"{command.about[0].upper()}{command.about[1:]}.", "", "```text", text, "```", ""]
    return "\n".join(lines)


def recipes_page() -> str:
    """Return a page with the full text of every shipped recipe."""
    lines = [
        "# Recipes",
        "",
        "Each runs by its name, `accel-train run NAME`; `accel-train init NAME` copies it to be edited.",
        "",
    ]
    for name, recipe in shipped_recipes().items():
        lines += [f"## {name}", "", "```yaml", recipe.path.read_text().rstrip(), "```", ""]
    return "\n".join(lines)
