"""A recipe as YAML that can be run again: each value with who set it, and no secrets."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from accel_train.recipe import Recipe
from accel_train.recipe_names import recipe_names, value_of
from accel_train.recipe_values import Section
from accel_train.recipe_yaml import one_line
from accel_train.redaction import redact
from accel_train.state import Choice


def format_recipe(recipe: Recipe, choices: Mapping[str, Choice[Any]] = MappingProxyType({})) -> str:
    """The recipe as YAML that can be run again as it is; each line ends with who set its value, and what auto chose.

    `choices` are by dotted name. What is `auto` stays so: elsewhere it may choose otherwise. Secrets are redacted.

    Raises:
        ValueError: the recipe holds an object of Python that YAML has no form for.
    """
    lines = ["# A resolved recipe: `accel-train run` trains it again as it is. Behind each value: who set it."]
    for depth, field, value, who in setting_lines(recipe, choices):
        lines.append("  " * depth + f"{field}: {value}".rstrip() + (f"  # {who}" if who else ""))
    return "\n".join(lines) + "\n"


def who_set(recipe: Recipe, name: str) -> str:
    """Who set a setting, by its dotted name; what a recipe built in Python differs from the defaults in, Python set."""
    origin, info = recipe.origin(name), recipe_names()[name]
    is_default = isinstance(info, FieldInfo) and info.default == value_of(recipe, name)
    return "python" if origin.kind == "default" and not is_default else str(origin)


class SettingLine(NamedTuple):
    """One line of a recipe for people: texts; a section has no value."""

    depth: int
    field: str
    value: str
    who: str


def setting_lines(recipe: Recipe, choices: Mapping[str, Choice[Any]] = MappingProxyType({})) -> Iterator[SettingLine]:
    """Every section and setting of a recipe in the order of the schema, with who set it, secrets redacted."""
    yield from _setting_lines(recipe, recipe, "", choices)


def _setting_lines(
    recipe: Recipe, section: Section, prefix: str, choices: Mapping[str, Choice[Any]]
) -> Iterator[SettingLine]:
    depth = prefix.count(".")
    for field in type(section).model_fields:
        name, value = prefix + field, getattr(section, field)
        if isinstance(value, Section):
            yield SettingLine(depth, field, "", _comment(choices[name]) if name in choices else "")
            yield from _setting_lines(recipe, value, f"{name}.", choices)
            continue
        who = who_set(recipe, name)
        if name in choices and choices[name].value != value:
            who += f"; {'auto chose' if value == 'auto' else 'becomes'} {choices[name]}"
        if not (isinstance(value, Mapping) and value):
            yield _setting_line(depth, field, value, who)
            continue
        yield SettingLine(depth, field, "", _comment(who))
        for key, item in value.items():
            origin = recipe.origin(f"{name}.{key}")
            yield _setting_line(depth + 1, key, item, who if origin.kind == "default" else str(origin))


def _setting_line(depth: int, key: Any, value: Any, who: str) -> SettingLine:
    shown = redact(value, str(key))
    who += "; redacted" if shown != value else ""
    return SettingLine(depth, one_line(key), one_line(shown), _comment(who))


def _comment(text: object) -> str:
    return "".join(c if c.isprintable() else " " for c in redact(str(text)))


def show(value: Any) -> str:
    """A value for a message: on one line, without secrets, cut to 80 characters."""
    text = one_line(redact(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
