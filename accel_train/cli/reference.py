"""The reference pages of settings, commands, and recipes in Markdown, generated from what they describe."""

import re
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Iterator
from functools import partial

from accel_train.cli.command import Command
from accel_train.cli.commands import COMMANDS
from accel_train.cli.main import build_parser
from accel_train.recipe.explain import Explained, explained, written_example
from accel_train.recipe.loader import shipped_recipes
from accel_train.recipe.names import is_section, recipe_names


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
        if not is_section(recipe_names()[name]):
            yield from _lines_of_setting(explained(name)[0])


def _lines_of_setting(setting: Explained) -> Iterator[str]:
    name, (as_yaml, as_flag) = setting.name, written_example(setting.name)
    yield f"\n### `{name}` {{#{name if '.' in name else name + '-setting'}}}\n"
    if setting.meaning:
        yield f"{_plain(setting.meaning)}\n"
    default = "no default" if setting.default is None else f"default `{setting.default}`"
    yield f"- takes {_plain(setting.takes)}; {default}"
    if setting.tasks:
        yield f"- for {', '.join(setting.tasks)}"
    if as_yaml:
        yield f"- `{as_yaml}`" + (f", or `{as_flag}`" if as_flag else "")


def _plain(text: str) -> str:
    """Return a text with Markdown's special characters escaped, except within backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[\]#|])", r"\\\1", part) for part in parts)


def commands_page() -> str:
    """Return a page with every command and its help text, as `accel-train COMMAND --help` prints it."""
    texts: list[str] = []

    def keep_help(own: ArgumentParser, _: Command) -> None:
        own.formatter_class = partial(HelpFormatter, width=98)
        vars(own)["color"] = False  # from Python 3.14 on
        texts.append(own.format_help().rstrip())

    build_parser(extend=keep_help)
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
