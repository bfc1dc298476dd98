"""Load a recipe from its layers (a file, Python overrides, the command line), and record who set each value.

Later layers win. If two settings exclude each other (`EXCLUSIVE`), the later layer's setting replaces the earlier
layer's. A flag can therefore override either one.
"""

import math
import os
import re
import select
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from accel_train.core.errors import RecipeProblems, SettingError
from accel_train.core.format import did_you_mean
from accel_train.core.redaction import remember_secrets
from accel_train.core.state import JsonRecord
from accel_train.recipe import names, schema
from accel_train.recipe.values import Origin, Section, value_of
from accel_train.recipe.yaml_core import Key, parse_yaml, show

_LARGEST_BYTES = 2**20
"""Largest size of a recipe file. It is hundreds of times a recipe's size, and reading it takes seconds."""
_WAIT_SECONDS = 5.0
Layer = dict[Key, tuple[Any, Origin]]
"""Settings of one source, flat, in the order in which they were written."""
EXCLUSIVE = (
    (("model", "config"), ("model", "pretrained")),
    (("schedule", "max_steps"), ("schedule", "num_epochs")),
    (("schedule", "warmup_steps"), ("schedule", "warmup_ratio")),
)


class Recipe(schema.Recipe):
    """All settings of a run. `Recipe.from_yaml(path)` reads a recipe, `train(recipe)` runs it."""

    @classmethod
    def from_yaml(cls, path: str, **overrides: Any) -> "Recipe":
        """Read a recipe file; `overrides` are sections as mappings: `optimizer={"learning_rate": 1e-3}`.

        Raises:
            ValueError: the file cannot be read, or breaks a rule. The message names key, line, rule, and remedy.
        """
        return load_recipe(path, overrides=overrides)


def load_recipe(
    path: str | Path, *, overrides: Mapping[str, Any] = MappingProxyType({}), arguments: Sequence[str] = ()
) -> Recipe:
    """Read a recipe file or a shipped recipe, with settings from Python and the command line on top.

    Args:
        overrides: sections as mappings, `{"optimizer": {"learning_rate": 1e-3}}`.
        arguments: `--section.field VALUE` or `--section.field=VALUE`. VALUE is a YAML scalar or flow collection; for a
            text setting it is the plain text.

    Raises:
        ValueError: the file cannot be read, or a setting breaks a rule. Each problem is one line: value, who set it,
            rule, remedy.
    """
    path = shipped_or(path)
    tree, lines = parse_yaml(_read_text(path), str(path))
    if not isinstance(tree, Mapping):
        problem = "is empty" if tree is None else f"holds {show(tree)}, not a mapping of settings"
        remedy = f"Write one setting per line, for example `{names.REQUIRED_EXAMPLES['output_dir']}`."
        raise SettingError(f"{path} {problem}", remedy)
    return _load(tree, lambda key: Origin("file", f"{path}:{lines[key]}"), str(path), overrides, arguments)


def make_recipe(tree: Mapping[str, Any], name: str, *, arguments: Sequence[str] = ()) -> Recipe:
    """Return the recipe of settings that a program chose, as nested mappings, with the command line's settings on top.

    `name` stands for the file in messages. `arguments` are as in `load_recipe`.

    Raises:
        ValueError: a setting breaks a rule. The message names it.
    """
    return _load(tree, lambda _: Origin("python", name), name, {}, arguments)


def _load(
    tree: Mapping[str, Any],
    origin: Callable[[Key], Origin],
    name: str,
    overrides: Mapping[str, Any],
    arguments: Sequence[str],
) -> Recipe:
    problems: list[str] = []
    own = _has_own_task(tree, overrides, arguments)
    layers = [
        dict(_flatten(tree, (), origin, problems, own)),
        dict(_flatten(overrides, (), lambda _: Origin("python"), problems, own)),
        _read_arguments(arguments, problems, own),
    ]
    for layer in layers:
        remember_secrets({names.dotted(key): value for key, (value, _) in layer.items()})
    if problems:
        raise RecipeProblems(*problems)
    return _validate(_merge(layers), name)


def _has_own_task(tree: Mapping[str, Any], overrides: Mapping[str, Any], arguments: Sequence[str]) -> bool:
    """Return whether the task is a custom one, which may have settings of `data` that only it knows."""
    flags = [text for flag, name, text in split_flags(arguments, own_data=True) if name == "task"]
    return ":" in str((flags or [overrides.get("task", tree.get("task"))])[-1])


def _read_text(path: str | Path) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            # A pipe delivers something within seconds.
            if not select.select([file], [], [], _WAIT_SECONDS)[0]:
                problem = f"{path} is a pipe that sent nothing for {_WAIT_SECONDS:g} seconds"
                raise SettingError(problem, "Name a YAML file.")
            os.set_blocking(file.fileno(), True)
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            problem = f"{path} is not a recipe: it has more than {_LARGEST_BYTES:,} bytes"
            raise SettingError(problem, "Name a YAML file.")
        return content.decode("utf-8-sig")
    except IsADirectoryError as error:
        files = sorted(file.name for file in Path(path).glob("*.y*ml"))
        remedy = f"it holds {', '.join(files[:5])}" if files else "name a YAML file"
        raise SettingError(f"{path} is a folder, not a recipe file", remedy) from error
    except FileNotFoundError as error:
        folder = Path(path).parent
        known = [file.name for file in folder.glob("*")]
        there_are = f"look for it from {Path.cwd()}, or take one of `accel-train recipes`"
        remedy = did_you_mean(
            Path(path).name,
            [*known, *shipped_recipes()],
            there_are,
            show=lambda name: name if name in shipped_recipes() else str(folder / name),
        )
        raise SettingError("no such recipe file", remedy, str(path)) from error
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        raise SettingError(problem, "Check the path and its permissions.") from error
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        raise SettingError(problem, "Save it as UTF-8.") from error


def _flatten(
    tree: Mapping[Any, Any], key: Key, origin: Callable[[Key], Origin], problems: list[str], own: bool
) -> Iterator[tuple[Key, tuple[Any, Origin]]]:
    """Yield the settings of a tree, each section before its fields.

    Messages about unknown names and invalid sections are appended to `problems`. With `own`, any name below `data` is
    valid, because the recipe's own task may know it.
    """
    for field, value in tree.items():
        here, name = (*key, field), names.dotted((*key, field))
        is_free = names.is_free(names.dotted(key)) or (
            own and key[:1] == ("data",) and name not in names.recipe_names()
        )
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if not is_free and (name not in names.recipe_names() or "." in str(field)):
            problems.append(f"unknown setting {name} ({origin(here)}); {names.remedy_for_unknown(name)}")
            continue
        kinds = {Any, dict} if is_free else names.kinds_of(name)
        is_blank = value is None and Section in kinds and NoneType not in kinds
        if is_blank or (isinstance(value, Mapping) and kinds & {Section, dict}):
            yield here, ({}, origin(here))
            yield from _flatten(value or {}, here, origin, problems, own)
        elif kinds == {Section}:
            problems.append(f"{name}={show(value)} ({origin(here)}): must be a mapping of {names.fields_of(name)}")
        else:
            yield here, (value, origin(here))


def _read_arguments(arguments: Sequence[str], problems: list[str], own: bool) -> Layer:
    layer: Layer = {}
    for flag, name, text in split_flags(arguments, own_data=own):
        *section, field = name.split(".")
        tree, origin = {field: _flag_value(name, text)}, Origin("command line", flag)
        found = _flatten(tree, tuple(section), lambda _, o=origin: o, problems, own)  # type: ignore[misc]
        layer = _apply(layer, dict(found))
    return layer


def split_flags(arguments: Sequence[str], *, own_data: bool = True) -> list[tuple[str, str, str]]:
    """Split `--section.field VALUE` or `--section.field=VALUE` words into triples of flag, setting, and text.

    With `own_data`, any setting of `data` passes: the recipe may be for a custom task, and its reader checks the name.

    Raises:
        ValueError: a word is not a flag, names an unknown setting, or has no value.
    """
    found, rest = [], list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        name = flag.removeprefix("--")
        if name == flag:
            problem = f"{flag!r} is neither a flag nor a flag's value"
            raise SettingError(problem, "Write settings as --section.field VALUE.")
        is_known = name in names.recipe_names() or names.is_free(name)
        if not is_known and not (own_data and name.startswith("data.")):
            raise SettingError(f"unknown flag {flag}", names.remedy_for_unknown(name, "--"))
        if not equals:
            if not rest or rest[0].startswith("--"):
                rule = names.rule_of(name) if name in names.recipe_names() else "any YAML value"
                raise SettingError(f"{flag} needs a value: {rule}", settings=(name,))
            text = rest.pop(0)
        found.append((flag, name, text))
    return found


def _flag_value(name: str, text: str) -> Any:
    """Return VALUE parsed as YAML; for a text setting, return the text.

    Quoted text, null, and collections that the setting takes are parsed for a text setting too.
    """
    kinds = names.kinds_of(name) if name in names.recipe_names() else {Any}
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
    result = dict(base)
    for key, (value, origin) in layer.items():
        inside = {k for k in result if k[: len(key)] == key}
        if value == {} and inside and names.dotted(key) not in names.free_names():
            # A section on the way to its settings keeps its other settings.
            continue
        above = {k for k, (v, _) in result.items() if k == key[: len(k)] and v != {}}
        for old in inside | above:
            del result[old]
        result[key] = (value, origin)
    return result


def _merge(layers: Iterable[Layer]) -> Layer:
    merged: Layer = {}
    for layer in layers:
        for one, other in (*EXCLUSIVE, *(pair[::-1] for pair in EXCLUSIVE)):
            winner, loser = _setter(layer, one), _setter(merged, other)
            if winner and loser and not _setter(layer, other):
                note = f"dropped: {winner} replaces {names.dotted(other)} of {loser}"
                merged = _apply(merged, {other: (None, Origin(winner.kind, note))})
        merged = _apply(merged, layer)
    return merged


def _setter(layer: Layer, key: Key) -> Origin | None:
    """Return who gives a setting (or a setting below it) a value other than null."""
    return next((origin for k, (value, origin) in layer.items() if k[: len(key)] == key and value is not None), None)


def _validate(layer: Layer, path: str) -> Recipe:
    tree: JsonRecord = {}
    for key, (value, _) in layer.items():
        place = tree
        for field in key[:-1]:
            place = place.setdefault(field, {})
        is_one_text = isinstance(value, str) and _takes_texts(names.dotted(key))
        place[key[-1]] = [value] if is_one_text else {} if value == {} else value
    origins = {names.dotted(key): origin for key, (_, origin) in layer.items()}
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeProblems(*names.explain(error, tree, origins, path)) from error
    problems = []
    for name, info in names.recipe_names().items():
        raw = None if names.is_section(info) else names.look_up(tree, name)
        if raw is not None and not _same_kind(raw, value_of(recipe, name)):
            problems.append(names.wrong(name, raw, origins[name]))
    if problems:
        raise RecipeProblems(*problems)
    return recipe.with_origins(origins)


def _takes_texts(name: str) -> bool:
    """Return whether a setting takes only a list of texts. One text may then stand for a list of one."""
    info = names.recipe_names().get(name)
    return isinstance(info, FieldInfo) and info.annotation in (tuple[str, ...], tuple[str, ...] | None)


def _same_kind(raw: Any, value: Any) -> bool:
    """Return whether pydantic kept a value's type; False for NaN and Inf.

    pydantic would read true as 1, "1" as 1, and "yes" as true.
    """
    if isinstance(value, Section):
        return all(_same_kind(item, getattr(value, name)) for name, item in raw.items())
    if isinstance(raw, Mapping):
        return not isinstance(value, Mapping) or all(_same_kind(item, item) for item in raw.values())
    if isinstance(raw, list | tuple):
        return isinstance(value, list | tuple) and all(map(_same_kind, raw, value))
    if isinstance(raw, float) and not math.isfinite(raw):
        return False
    return isinstance(raw, bool) == isinstance(value, bool) and isinstance(raw, str) == isinstance(value, str)


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
