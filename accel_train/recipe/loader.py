"""A recipe from its layers, each value with who set it: a file, Python's overrides on it, the command line on both.

Later layers win. Of two settings that exclude each other (`EXCLUSIVE`) the later layer's replaces the earlier layer's,
so that a flag can override either.
"""

import math
import os
import select
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from accel_train.recipe import Recipe
from accel_train.recipe_errors import REQUIRED_EXAMPLES, explain, rule_of, wrong
from accel_train.recipe_names import (
    dotted,
    fields_of,
    free_names,
    is_section,
    kinds_of,
    look_up,
    recipe_names,
    remedy_for_unknown,
    section_names,
    value_of,
)
from accel_train.recipe_values import Origin, Section
from accel_train.recipe_writing import show
from accel_train.recipe_yaml import Key, parse_yaml
from accel_train.redaction import remember_secrets

_LARGEST_BYTES = 2**20
"""Hundreds of times what a recipe has; reading so much takes seconds."""
_WAIT_SECONDS = 5.0
Layer = dict[Key, tuple[Any, Origin]]
"""Settings of one source, flat, in the order in which they were written."""
EXCLUSIVE = (
    (("model", "config"), ("model", "pretrained")),
    (("schedule", "max_steps"), ("schedule", "num_epochs")),
    (("schedule", "warmup_steps"), ("schedule", "warmup_ratio")),
)


def load_recipe(
    path: str | Path, *, overrides: Mapping[str, Any] = MappingProxyType({}), arguments: Sequence[str] = ()
) -> Recipe:
    """Read a recipe file, with settings of Python and of the command line on top, each value knowing who set it.

    `overrides` are sections as mappings, `{"optimizer": {"learning_rate": 1e-3}}`; `arguments` are `--section.field VALUE`
    or `--section.field=VALUE`, where VALUE is a YAML scalar or flow collection, and the text as it is for a text setting.

    Raises:
        ValueError: the file cannot be read, or a setting breaks a rule; one line per problem: value, who set it, rule, remedy.
    """
    tree, lines = parse_yaml(_read_text(path), str(path))
    if not isinstance(tree, Mapping):
        what = "is empty" if tree is None else f"holds {show(tree)}, which is not a mapping of settings"
        raise ValueError(f"{path} {what}; a recipe begins like `{REQUIRED_EXAMPLES['output_dir']}`, a setting a line")
    problems: list[str] = []
    layers = [
        dict(_flatten(tree, (), lambda key: Origin("file", f"{path}:{lines[key]}"), problems)),
        dict(_flatten(overrides, (), lambda _: Origin("python"), problems)),
        _read_arguments(arguments, problems),
    ]
    for layer in layers:
        remember_secrets({dotted(key): value for key, (value, _) in layer.items()})
    if problems:
        raise ValueError("\n".join(problems))
    return _validate(_merge(layers), str(path))


def _read_text(path: str | Path) -> str:
    try:
        content = _read_bytes(path)
        return content.decode("utf-8-sig")
    except IsADirectoryError as error:
        files = sorted(file.name for file in Path(path).glob("*.y*ml"))
        remedy = f"it holds {', '.join(files[:5])}" if files else "name a YAML file"
        raise ValueError(f"{path} is a folder, not a recipe file; {remedy}") from error
    except FileNotFoundError as error:
        folder = Path(path).parent
        near = get_close_matches(Path(path).name, [f.name for f in folder.glob("*")] if folder.is_dir() else [], n=1)
        remedy = f"did you mean {folder / near[0]}?" if near else f"look for it from {Path.cwd()}"
        raise ValueError(f"{path}: no such recipe file; {remedy}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}; save it as UTF-8"
        ) from error


def _read_bytes(path: str | Path) -> bytes:
    """The bytes of a file, or of a pipe if somebody writes into it."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not select.select([file], [], [], _WAIT_SECONDS)[0]:
            raise ValueError(
                f"{path} is a pipe, and nothing came out of it in {_WAIT_SECONDS:g} seconds; name a YAML file"
            )
        os.set_blocking(file.fileno(), True)
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise ValueError(f"{path} is no recipe: it has more than {_LARGEST_BYTES:,} bytes; name a YAML file")
    return content


def _flatten(
    tree: Mapping[Any, Any], key: Key, origin: Callable[[Key], Origin], problems: list[str]
) -> Iterator[tuple[Key, tuple[Any, Origin]]]:
    """The settings of a tree, each section before what it holds; unknown names, and sections that are none, are problems."""
    for field, value in tree.items():
        here, name = (*key, field), dotted((*key, field))
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if name not in recipe_names() or "." in str(field):
            problems.append(f"unknown setting {name} ({origin(here)}); {remedy_for_unknown(name)}")
        elif name in free_names() and isinstance(value, Mapping):
            yield from _flatten_free(value, here, origin)
        elif name in section_names() and (
            isinstance(value, Mapping) or (value is None and NoneType not in kinds_of(name))
        ):
            yield here, ({}, origin(here))
            yield from _flatten(value or {}, here, origin, problems)
        elif kinds_of(name) == {Section}:
            problems.append(f"{name}={show(value)} ({origin(here)}): must be a mapping of {fields_of(name)}")
        else:
            yield here, (value, origin(here))


def _flatten_free(
    tree: Mapping[Any, Any], key: Key, origin: Callable[[Key], Origin]
) -> Iterator[tuple[Key, tuple[Any, Origin]]]:
    yield key, ({}, origin(key))
    for field, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten_free(value, (*key, field), origin)
        else:
            yield (*key, field), (value, origin((*key, field)))


def _read_arguments(arguments: Sequence[str], problems: list[str]) -> Layer:
    layer: Layer = {}
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        name = flag.removeprefix("--")
        if name == flag:
            raise ValueError(
                f"{flag!r} is neither a flag nor a flag's value; settings are written --section.field VALUE"
            )
        if name not in recipe_names() and not any(name.startswith(f"{free}.") for free in free_names()):
            raise ValueError(f"unknown flag {flag}; {remedy_for_unknown(name, '--')}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(
                    f"{flag} needs a value: {rule_of(name) if name in recipe_names() else 'any YAML value'}"
                )
            text = rest.pop(0)
        key, value = tuple(name.split(".")), _flag_value(name, text)
        tree = value
        for field in reversed(key):
            tree = {field: tree}
        origin = Origin("command line", flag)
        named = {k: v for k, v in _flatten(tree, (), lambda _, o=origin: o, problems) if k[: len(key)] == key}  # type: ignore[misc]
        layer = _apply(layer, named)
    return layer


def _flag_value(name: str, text: str) -> Any:
    """VALUE as YAML; where a setting takes text, the text as it is unless it is quoted, null, or a collection it takes too."""
    kinds = kinds_of(name) if name in recipe_names() else {Any}
    try:
        value = parse_yaml(text, f"--{name} {text}")[0]
    except ValueError:
        if str in kinds or (_takes_texts(name) and not text.startswith("[")):
            return text
        raise
    collection = (isinstance(value, list) and tuple in kinds) or (isinstance(value, dict) and text.startswith("{"))
    nothing = value is None and text != "" and NoneType in kinds
    return value if str not in kinds or isinstance(value, str) or collection or nothing else text


def _apply(base: Layer, layer: Layer) -> Layer:
    """`base` with the settings of `layer` in the place of those that they replace."""
    result = dict(base)
    for key, (value, origin) in layer.items():
        inside = [k for k in result if k[: len(key)] == key]
        if value == {} and inside and dotted(key) not in free_names():
            continue  # a section on the way to its settings leaves the others in place
        for old in inside:
            del result[old]
        for old in [k for k, (v, _) in result.items() if k == key[: len(k)] and v != {}]:
            del result[old]
        result[key] = (value, origin)
    return result


def _merge(layers: Iterable[Layer]) -> Layer:
    merged: Layer = {}
    for layer in layers:
        for one, other in (*EXCLUSIVE, *(pair[::-1] for pair in EXCLUSIVE)):
            winner, loser = _setter(layer, one), _setter(merged, other)
            if winner and loser and not _setter(layer, other):
                note = f"dropped: {winner} replaces {dotted(other)} of {loser}"
                merged = _apply(merged, {other: (None, Origin(winner.kind, note))})
        merged = _apply(merged, layer)
    return merged


def _setter(layer: Layer, key: Key) -> Origin | None:
    """Who gives a setting (or something in it) a value other than null."""
    return next((origin for k, (value, origin) in layer.items() if k[: len(key)] == key and value is not None), None)


def _tree(layer: Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, (value, _) in layer.items():
        place = tree
        for field in key[:-1]:
            place = place.setdefault(field, {})
        place[key[-1]] = {} if value == {} else value
    return tree


def _validate(layer: Layer, path: str) -> Recipe:
    layer = {
        key: ([value] if isinstance(value, str) and _takes_texts(dotted(key)) else value, origin)
        for key, (value, origin) in layer.items()
    }
    tree = _tree(layer)
    origins = {dotted(key): origin for key, (_, origin) in layer.items()}
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise ValueError("\n".join(explain(error, tree, origins, path))) from error
    problems = []
    for name in recipe_names():
        raw = look_up(tree, name)
        if raw is not None and not is_section(recipe_names()[name]) and not _same_kind(raw, value_of(recipe, name)):
            problems.append(wrong(name, raw, origins[name]))
    if problems:
        raise ValueError("\n".join(problems))
    return recipe.with_origins(origins)


def _takes_texts(name: str) -> bool:
    """Whether a setting is a list of texts and nothing else, so that one text can stand for a list of one."""
    info = recipe_names().get(name)
    return isinstance(info, FieldInfo) and info.annotation in (tuple[str, ...], tuple[str, ...] | None)


def _same_kind(raw: Any, value: Any) -> bool:
    """Whether pydantic took a value for what it is: it reads true as 1, "1" as 1, and "yes" as true; and NaN is no setting."""
    if isinstance(raw, Mapping):
        return not isinstance(value, Mapping) or all(_same_kind(item, item) for item in raw.values())
    if isinstance(raw, list | tuple):
        return isinstance(value, list | tuple) and all(map(_same_kind, raw, value))
    if isinstance(raw, float) and not math.isfinite(raw):
        return False
    return isinstance(raw, bool) == isinstance(value, bool) and isinstance(raw, str) == isinstance(value, str)
