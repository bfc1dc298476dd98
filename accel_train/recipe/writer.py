"""Write a recipe as YAML that can be run again, with who set each value and without secrets."""

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo

from accel_train.core.redaction import redact
from accel_train.core.state import Choice
from accel_train.core.terminal import paint, printable
from accel_train.recipe.names import recipe_names
from accel_train.recipe.schema import Recipe
from accel_train.recipe.values import Section, value_of
from accel_train.recipe.yaml_core import one_line

SettingLine = tuple[int, str, str, str]


def format_recipe(recipe: Recipe, choices: Mapping[str, Choice[Any]] = MappingProxyType({})) -> str:
    """Return the recipe as YAML that can be run again. Each line ends with who set its value and the value of auto.

    `choices` are by dotted name. `auto` stays in the recipe, because it may resolve differently elsewhere. Secrets are
    redacted.

    Raises:
        ValueError: the recipe holds a Python object that has no YAML form.
    """
    lines = ["# A resolved recipe: `accel-train run` trains it again as it is. Behind each value: who set it."]
    for depth, field, value, who in setting_lines(recipe, choices):
        lines.append("  " * depth + f"{field}: {value}".rstrip() + (f"  # {who}" if who else ""))
    return "\n".join(lines) + "\n"


def who_set(recipe: Recipe, name: str) -> str:
    """Return who set a field, by its dotted name; `python` if a recipe built in Python changed the default."""
    origin, info = recipe.origin(name), recipe_names().get(name)
    is_default = info is None or (isinstance(info, FieldInfo) and info.default == value_of(recipe, name))
    return "python" if origin.kind == "default" and not is_default else str(origin)


def format_settings(recipe: Recipe, *, colour: bool) -> Iterator[str]:
    """Yield a title and aligned lines: all settings, and who set them. The title names the file that set the most."""
    width = max(len(name.rpartition(".")[2]) + 2 * name.count(".") for name in recipe_names()) + 2
    shown = list(setting_lines(recipe))
    files = Counter(who.rpartition(":")[0] for *_, who in shown if who.rpartition(":")[2].isdigit())
    file = files.most_common(1)[0][0] if files else ""
    title = "Settings, and who set them"
    yield paint(f"{title}: line numbers refer to {file}" if file else title, "bold", on=colour)
    for depth, name, value, who in shown:
        by = who.replace(f"{file}:", "line ") if file else who
        left = f"{'  ' * (depth + 1)}{name}".ljust(width + 2)
        line = f"{left}{value}".ljust(width + 26) + f"  <- {by}" if by else left.rstrip()
        yield paint(line, "dim", on=colour and who == "default")


def setting_lines(
    recipe: Recipe,
    choices: Mapping[str, Choice[Any]] = MappingProxyType({}),
    section: Section | None = None,
    prefix: str = "",
) -> Iterator[SettingLine]:
    """Yield depth, name, value, and who set it for every section and setting, in schema order, with secrets redacted.

    A section has no value.
    """
    section, depth = section or recipe, prefix.count(".")
    for field in (*type(section).model_fields, *(section.model_extra or ())):
        name, value = prefix + field, getattr(section, field)
        if isinstance(value, Section):
            yield depth, field, "", _comment(choices[name]) if name in choices else ""
            yield from setting_lines(recipe, choices, value, f"{name}.")
            continue
        who = who_set(recipe, name)
        if name in choices and choices[name].value != value:
            who += f"; {'auto chose' if value == 'auto' else 'becomes'} {choices[name]}"
        if not (isinstance(value, Mapping) and value):
            yield _setting_line(depth, field, value, who)
            continue
        yield depth, field, "", _comment(who)
        for key, item in value.items():
            origin = recipe.origin(f"{name}.{key}")
            yield _setting_line(depth + 1, key, item, who if origin.kind == "default" else str(origin))


def _setting_line(depth: int, key: Any, value: Any, who: str) -> SettingLine:
    shown = redact(value, str(key))
    who += "; redacted" if shown != value else ""
    return depth, one_line(key), one_line(shown), _comment(who)


def _comment(text: object) -> str:
    return printable(redact(str(text)))
