"""What is wrong with a recipe, a line for each problem: the value, who set it, the rule and the remedy."""

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from accel_train.recipe_names import fields_of, is_section, kinds_of, look_up, recipe_names
from accel_train.recipe_values import Origin
from accel_train.recipe_writing import show
from accel_train.recipe_yaml import is_number

REQUIRED_EXAMPLES = {
    "output_dir": "output_dir: runs/my-run",
    "model": "model: {config: {model_type: gpt2, n_layer: 4}}",
    "data": "data: {train: python-stdlib}",
    "data.train": "train: python-stdlib",
    "schedule": "schedule: {max_steps: 1000}",
    "tokenizer.train_bpe": "train_bpe: {vocab_size: 4096}",
}


def explain(error: ValidationError, tree: Mapping[str, Any], origins: Mapping[str, Origin], path: str) -> Iterator[str]:
    """A line for each problem that pydantic found in a tree of settings; `path` is the file that lacks what is missing."""
    groups: dict[str, Any] = {}
    for problem in error.errors(include_url=False):
        groups[_name_at(problem["loc"])] = problem
    for name, problem in groups.items():
        if any(other.startswith(f"{name}.") for other in groups):
            continue  # `tokenizer` is no text, but what is wrong is inside it
        raw = look_up(tree, name)
        if problem["type"] == "value_error":
            message = str(problem["ctx"]["error"])
            named = [n for n, info in recipe_names().items() if isinstance(info, FieldInfo) and _mentions(message, n)]
            named = [n for n in named if n in origins and look_up(tree, n) is not None]
            setters = ", ".join(f"{n}={show(look_up(tree, n))} from {origins[n]}" for n in named)
            yield f"{message} ({setters or path})"
        elif raw is None and problem["type"] == "missing":
            yield f"{name} is missing from {path}; add `{REQUIRED_EXAMPLES.get(name, f'{name}: ...')}`"
        else:
            yield wrong(name, raw, origins[name])


def _mentions(message: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", message) is not None


def _name_at(place: tuple[int | str, ...]) -> str:
    """The setting at pydantic's place, which names the alternatives of a union and the items of a list as well."""
    name = ""
    for part in place:
        longer = f"{name}.{part}" if name else str(part)
        name = longer if longer in recipe_names() else name
    return name


def wrong(name: str, raw: Any, origin: Origin) -> str:
    """The line for a value that a setting does not take."""
    return f"{name}={show(raw)} ({origin}): must be {rule_of(name)}; {_remedy(name, raw)}"


def _remedy(name: str, raw: Any) -> str:
    info = recipe_names()[name]
    choices = [c for c in _literals(info.annotation if isinstance(info, FieldInfo) else None) if c != "auto"]
    for item in raw if isinstance(raw, list | tuple) else [raw]:
        if isinstance(item, str) and item not in choices and (near := get_close_matches(item, choices, n=1)):
            return f"did you mean {near[0]}?"
    if isinstance(raw, str) and raw.lower() in ("yes", "no", "on", "off", "true", "false") and bool in kinds_of(name):
        return "write true or false, without quotes"
    if isinstance(raw, str) and is_number(raw):
        return "write it without quotes"
    if str in kinds_of(name) and isinstance(raw, int | float):
        return f'put it in quotes: "{show(raw)}"'
    if isinstance(info, FieldInfo) and info.default is None:
        return "correct it, or leave it out"
    if isinstance(info, FieldInfo) and not info.is_required():
        return f"leave it out for the default, {show(info.default)}"
    return f"for example `{REQUIRED_EXAMPLES[name]}`"


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _literals(part)]


def rule_of(name: str) -> str:
    """What a setting takes, in words: `auto` or a whole number of at least 1."""
    info = recipe_names()[name]
    if is_section(info):
        return f"a mapping of {fields_of(name)}"
    assert isinstance(info, FieldInfo)
    return _rule_of_type(info.annotation, info.metadata)


def _rule_of_type(annotation: Any, limits: Iterable[Any] = ()) -> str:
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _rule_of_type(
            parts[0], [x for part in parts[1:] for x in (part.metadata if isinstance(part, FieldInfo) else [part])]
        )
    if kind in (Union, UnionType):
        return " or ".join(_rule_of_type(part, limits) for part in parts)
    if kind is Literal:
        return str(parts[0]) if len(parts) == 1 else f"one of {', '.join(map(str, parts))}"
    if kind is tuple:
        whole = parts[-1] is not Ellipsis
        return f"a list of {f'{len(parts)}, each ' if whole else ''}{_rule_of_type(parts[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words.get(annotation, "a mapping of finite values") + (_limits(limits) if annotation in (int, float) else "")


def _limits(limits: Iterable[Any]) -> str:
    said = []
    for limit in limits:
        match limit:
            case annotated_types.Gt(gt=bound):
                said.append(f"greater than {bound}")
            case annotated_types.Ge(ge=bound):
                said.append(f"of at least {bound}")
            case annotated_types.Lt(lt=bound):
                said.append(f"less than {bound}")
            case annotated_types.Le(le=bound):
                said.append(f"at most {bound}")
    return f" {' and '.join(said)}" if said else ""
