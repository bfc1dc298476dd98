"""Recipe files: YAML in, each value with who set it; YAML out, ready to run again.

The YAML is that of YAML 1.2's core schema, not PyYAML's 1.1: `1e-4` is a number; `no`, `on` and `2024-01-01` are text;
only `true` and `false` are booleans; a key may stand once. A quoted scalar is text, so `"1e-4"` is no number.

Later layers win: the file, then Python's overrides, then the command line. Of two settings that exclude each other
(`EXCLUSIVE`) the later layer's replaces the earlier layer's, so that a flag can override either.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from accel_train.recipe import Origin, Recipe, Section
from accel_train.state import Choice

Key = tuple[Any, ...]
"""A setting's place in the tree: ("optimizer", "learning_rate")."""
Layer = dict[Key, tuple[Any, Origin]]
"""Settings of one source, flat, in the order in which they were written."""

EXCLUSIVE = (
    (("model", "config"), ("model", "pretrained")),
    (("schedule", "max_steps"), ("schedule", "num_epochs")),
    (("schedule", "warmup_steps"), ("schedule", "warmup_ratio")),
)
REQUIRED_EXAMPLES = {
    "output_dir": "output_dir: runs/my-run",
    "model": "model: {config: {model_type: gpt2, n_layer: 4}}",
    "data": "data: {train: python-stdlib}",
    "data.train": "train: python-stdlib",
    "schedule": "schedule: {max_steps: 1000}",
    "tokenizer.train_bpe": "train_bpe: {vocab_size: 4096}",
}
OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "batch_size": "batch.global_batch_size",
    "accumulation_steps": "batch.gradient_accumulation_steps",
    "per_device_train_batch_size": "batch.per_device_batch_size",
    "epochs": "schedule.num_epochs",
    "num_train_epochs": "schedule.num_epochs",
    "lr_scheduler_type": "schedule.type",
    "grad_clip": "optimizer.max_grad_norm",
    "fp16": "precision.mixed_precision",
    "bf16": "precision.mixed_precision",
    "block_size": "data.sequence_length",
    "max_length": "data.sequence_length",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluate.every_steps",
    "logging_steps": "log.every_steps",
    "report_to": "log.trackers",
}
"""What other trainers call our settings."""
LEAST_NEARNESS = 0.6
"""Names that have less in common (difflib's ratio) are not suggested."""


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
        what = "is empty" if tree is None else f"holds {_show(tree)}, which is not a mapping of settings"
        raise ValueError(f"{path} {what}; a recipe begins like `{REQUIRED_EXAMPLES['output_dir']}`, a setting a line")
    problems: list[str] = []
    layers = [
        dict(_flatten(tree, (), lambda key: Origin("file", f"{path}:{lines[key]}"), problems)),
        dict(_flatten(overrides, (), lambda _: Origin("python"), problems)),
        _read_arguments(arguments, problems),
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return _validate(_merge(layers), str(path))


# ---- YAML ------------------------------------------------------------------------------------------------------------


_TAG = "tag:yaml.org,2002:"
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_CORE_SCALARS = (
    ("null", r"null|Null|NULL|~|", [*"nN~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", _INT, [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser, with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own protocol)


class _CoreDumper(yaml.SafeDumper):
    """Writes what `_CoreLoader` reads as the same value, on one line."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


for _name, _pattern, _first in _CORE_SCALARS:
    for _class in (_CoreLoader, _CoreDumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar(_TAG + "str", text, style)


_CoreDumper.add_representer(str, _represent_text)


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Key, int]]:
    """The value of a YAML document, and the line of each of its keys.

    Raises:
        ValueError: `name:line:column`, what is wrong there, and the text of that line.
    """
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
        lines: dict[Key, int] = {}
        return (None if root is None else _construct(root, name, (), lines, ())), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None, "a parse error has a place"
        line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
        what = " ".join(filter(None, (error.problem, error.context)))
        remedy = "; indent with spaces" if "\t" in line else ""
        raise ValueError(f"{name}:{mark.line + 1}:{mark.column + 1}: {what}: {line.strip()!r}{remedy}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}; save it as plain UTF-8 text") from error
    except RecursionError as error:
        raise ValueError(f"{name}: nested too deeply; a recipe needs a few levels") from error


def _construct(node: yaml.Node, name: str, key: Key, lines: dict[Key, int], parents: tuple[yaml.Node, ...]) -> Any:
    here = f"{name}:{node.start_mark.line + 1}"
    if node in parents:
        raise ValueError(f"{here}: this alias contains itself; write the value out")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, here)
    if node.tag not in (_TAG + "map", _TAG + "seq"):
        raise ValueError(f"{here}: the tag {node.tag} is not allowed; recipes hold plain values only")
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, name, (*key, i), lines, (*parents, node)) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode), node
    first_lines: dict[Any, int] = {}
    result = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"{name}:{line}: a key must be a name, not a list or mapping")
        if key_node.value == "<<":
            raise ValueError(f"{name}:{line}: merge keys (<<) are not part of YAML 1.2; write the settings out")
        field = _scalar(key_node, here)
        dotted = ".".join(map(str, (*key, field)))
        if field in first_lines:
            raise ValueError(
                f"{name}:{line}: {dotted} is set twice, on lines {first_lines[field]} and {line}; remove one"
            )
        first_lines[field] = line
        lines[*key, field] = line
        result[field] = _construct(value_node, name, (*key, field), lines, (*parents, node))
    return result


def _scalar(node: yaml.ScalarNode, here: str) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            base = {"0o": 8, "0x": 16}.get(text[:2], 10)
            return int(text, base)
        if kind == "float":
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    except ValueError as error:
        raise ValueError(f"{here}: {text[:80]!r} is not a number that can be read") from error
    if kind != "str":
        raise ValueError(f"{here}: the tag {node.tag} is not allowed; recipes hold plain values only")
    return text


def _one_line(value: Any) -> str:
    """A value as YAML on one line, which reads as the same value in any place."""
    value = value.model_dump() if isinstance(value, Section) else value
    try:
        return yaml.dump(
            [value], Dumper=_CoreDumper, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
        )[1:-2]
    except yaml.YAMLError as error:
        raise ValueError(f"{value!r} cannot be written as YAML; use numbers, text, lists and mappings") from error


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
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


# ---- layers ----------------------------------------------------------------------------------------------------------


@cache
def recipe_names() -> Mapping[str, FieldInfo | type[Section]]:
    """Every setting (a field) and section (a class) of a recipe by its dotted name, in the order of the schema."""
    return MappingProxyType(dict(_walk_schema(Recipe, "")))


def _walk_schema(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo | type[Section]]]:
    for field, info in section.model_fields.items():
        parts = [part for part in (info.annotation, *get_args(info.annotation)) if _is_section(part)]
        # `tokenizer` is both: a setting (a name), or a section (train_bpe).
        yield prefix + field, parts[0] if info.annotation in parts else info
        for part in parts:
            yield from _walk_schema(part, f"{prefix}{field}.")


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _kinds(name: str) -> set[Any]:
    """The Python types a setting takes, among str, tuple, dict, Section, NoneType and the rest."""
    info = recipe_names()[name]
    annotation = info if _is_section(info) else info.annotation  # type: ignore[union-attr]
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return {Section if _is_section(option) else get_origin(option) or option for option in options}


@cache
def _free_names() -> frozenset[str]:
    """Settings that are mappings of anything: model.config and options."""
    return frozenset(name for name in recipe_names() if dict in _kinds(name))


@cache
def _section_names() -> frozenset[str]:
    return frozenset(name for name in recipe_names() if Section in _kinds(name))


def _flatten(
    tree: Mapping[Any, Any], key: Key, origin: Callable[[Key], Origin], problems: list[str]
) -> Iterator[tuple[Key, tuple[Any, Origin]]]:
    """The settings of a tree, each section before what it holds; unknown names, and sections that are none, are problems."""
    for field, value in tree.items():
        here, name = (*key, field), _dotted((*key, field))
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if name not in recipe_names() or "." in str(field):
            problems.append(f"unknown setting {name} ({origin(here)}); {_remedy_for_unknown(name)}")
        elif name in _free_names() and isinstance(value, Mapping):
            yield from _flatten_free(value, here, origin)
        elif name in _section_names() and (isinstance(value, Mapping) or (value is None and Section in _kinds(name))):
            yield here, ({}, origin(here))
            yield from _flatten(value or {}, here, origin, problems)
        elif _kinds(name) == {Section}:
            problems.append(f"{name}={_show(value)} ({origin(here)}): must be a mapping of {_fields_of(name)}")
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


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


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
        if name not in recipe_names() and not any(name.startswith(f"{free}.") for free in _free_names()):
            raise ValueError(f"unknown flag {flag}; {_remedy_for_unknown(name, '--')}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{flag} needs a value: {_rule(name) if name in recipe_names() else 'any YAML value'}")
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
    kinds = _kinds(name) if name in recipe_names() else {Any}
    try:
        value = parse_yaml(text, f"--{name} {text}")[0]
    except ValueError:
        if str in kinds:
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
        if value == {} and inside and _dotted(key) not in _free_names():
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
                note = f"dropped: {winner} replaces {_dotted(other)} of {loser}"
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


# ---- names -----------------------------------------------------------------------------------------------------------


def nearest_names(name: str) -> list[str]:
    """The settings that a mistyped or misplaced name means, best first; more than one only where they are equally near."""
    parts = name.replace("-", "_").split(".")
    name, leaf = ".".join(parts), parts[-1]
    if leaf in OTHER_NAMES:
        return [OTHER_NAMES[leaf]]
    scores = _nearness(name, recipe_names())
    for free in _free_names():
        depth = free.count(".") + 1
        head, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
        if rest:  # below model.config any name may stand, so only what is above it can be mistyped
            scores[f"{free}.{rest}"] = _nearness(head, [free])[free]
    best = max(scores.values())
    return [candidate for candidate, score in scores.items() if score == best][:3] if best >= LEAST_NEARNESS else []


def _nearness(name: str, candidates: Iterable[str]) -> dict[str, float]:
    """How near each candidate is, 0 to 1, by its whole name or its last part; its own section speaks for it."""
    section, _, leaf = name.rpartition(".")
    whole, last = (SequenceMatcher(None, b=b, autojunk=False) for b in (name, leaf))
    scores = {}
    for candidate in candidates:
        other_section, _, other_leaf = candidate.rpartition(".")
        whole.set_seq1(candidate)
        last.set_seq1(other_leaf)
        # quick_ratio is an upper bound, ten times cheaper
        ratios = [m.ratio() for m in (whole, last) if m.quick_ratio() >= LEAST_NEARNESS]
        if len(leaf) > 3 and other_leaf.startswith(leaf):
            ratios.append(0.9)  # an abbreviation
        scores[candidate] = max(ratios, default=0.0) + (0.05 if section == other_section else 0.0)
    return scores


def _remedy_for_unknown(name: str, dashes: str = "") -> str:
    if name in recipe_names():
        return f"write it nested: {': {'.join(name.split('.'))}: ...{'}' * name.count('.')}"
    near = nearest_names(name)
    if near:
        return f"did you mean {' or '.join(dashes + n for n in near)}?"
    section = name.rpartition(".")[0]
    return f"{section or 'a recipe'} has {_fields_of(section if section in _section_names() else '')}"


def _fields_of(section: str) -> str:
    prefix = f"{section}." if section else ""
    return ", ".join(
        n.removeprefix(prefix) for n in recipe_names() if n.startswith(prefix) and "." not in n[len(prefix) :]
    )


# ---- rules -----------------------------------------------------------------------------------------------------------


def _validate(layer: Layer, path: str) -> Recipe:
    tree = _tree(layer)
    origins = {_dotted(key): origin for key, (_, origin) in layer.items()}
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(error, tree, origins, path))) from error
    problems = []
    for name in recipe_names():
        raw = _look_up(tree, name)
        if raw is not None and not _is_section(recipe_names()[name]) and not _same_kind(raw, _value_of(recipe, name)):
            problems.append(_wrong(name, raw, origins[name]))
    if problems:
        raise ValueError("\n".join(problems))
    return recipe.with_origins(origins)


def _same_kind(raw: Any, value: Any) -> bool:
    """Whether pydantic took a value for what it is: it reads true as 1, "1" as 1, and "yes" as true; and NaN is no setting."""
    if isinstance(raw, Mapping):
        return not isinstance(value, Mapping) or all(_same_kind(item, item) for item in raw.values())
    if isinstance(raw, list | tuple):
        return isinstance(value, list | tuple) and all(map(_same_kind, raw, value))
    if isinstance(raw, float) and not math.isfinite(raw):
        return False
    return isinstance(raw, bool) == isinstance(value, bool) and isinstance(raw, str) == isinstance(value, str)


def _explain(
    error: ValidationError, tree: Mapping[str, Any], origins: Mapping[str, Origin], path: str
) -> Iterator[str]:
    groups: dict[str, Any] = {}
    for problem in error.errors(include_url=False):
        groups[_name_at(problem["loc"])] = problem
    for name, problem in groups.items():
        if any(other.startswith(f"{name}.") for other in groups):
            continue  # `tokenizer` is no text, but what is wrong is inside it
        raw = _look_up(tree, name)
        if problem["type"] == "value_error":
            message = str(problem["ctx"]["error"])
            named = [n for n, info in recipe_names().items() if isinstance(info, FieldInfo) and _mentions(message, n)]
            named = [n for n in named if n in origins and _look_up(tree, n) is not None]
            setters = ", ".join(f"{n}={_show(_look_up(tree, n))} from {origins[n]}" for n in named)
            yield f"{message} ({setters or path})"
        elif raw is None and problem["type"] == "missing":
            yield f"{name} is missing from {path}; add `{REQUIRED_EXAMPLES.get(name, f'{name}: ...')}`"
        else:
            yield _wrong(name, raw, origins[name])


def _mentions(message: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", message) is not None


def _name_at(place: tuple[int | str, ...]) -> str:
    """The setting at pydantic's place, which names the alternatives of a union and the items of a list as well."""
    name = ""
    for part in place:
        longer = f"{name}.{part}" if name else str(part)
        name = longer if longer in recipe_names() else name
    return name


def _wrong(name: str, raw: Any, origin: Origin) -> str:
    return f"{name}={_show(raw)} ({origin}): must be {_rule(name)}; {_remedy(name, raw)}"


def _remedy(name: str, raw: Any) -> str:
    info = recipe_names()[name]
    choices = [c for c in _literals(info.annotation if isinstance(info, FieldInfo) else None) if c != "auto"]
    for item in raw if isinstance(raw, list | tuple) else [raw]:
        if isinstance(item, str) and item not in choices and (near := get_close_matches(item, choices, n=1)):
            return f"did you mean {near[0]}?"
    if isinstance(raw, str) and raw.lower() in ("yes", "no", "on", "off", "true", "false") and bool in _kinds(name):
        return "write true or false, without quotes"
    if isinstance(raw, str) and isinstance(parse_yaml(_unquoted(raw), name)[0], int | float):
        return "write it without quotes"
    if str in _kinds(name) and isinstance(raw, int | float):
        return f'put it in quotes: "{_show(raw)}"'
    if isinstance(info, FieldInfo) and info.default is None:
        return "correct it, or leave it out"
    if isinstance(info, FieldInfo) and not info.is_required():
        return f"leave it out for the default, {_show(info.default)}"
    return f"for example `{REQUIRED_EXAMPLES[name]}`"


def _unquoted(text: str) -> str:
    return text if re.fullmatch(f"{_INT}|{_FLOAT}", text) else "text"


def _rule(name: str) -> str:
    """What a setting takes, in words: `auto` or a whole number of at least 1."""
    info = recipe_names()[name]
    if _is_section(info):
        return f"a mapping of {_fields_of(name)}"
    assert isinstance(info, FieldInfo)
    return _rule_of(info.annotation, info.metadata)


def _rule_of(annotation: Any, limits: Iterable[Any] = ()) -> str:
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _rule_of(
            parts[0], [x for part in parts[1:] for x in (part.metadata if isinstance(part, FieldInfo) else [part])]
        )
    if kind in (Union, UnionType):
        return " or ".join(_rule_of(part, limits) for part in parts)
    if kind is Literal:
        return str(parts[0]) if len(parts) == 1 else f"one of {', '.join(map(str, parts))}"
    if kind is tuple:
        whole = parts[-1] is not Ellipsis
        return f"a list of {f'{len(parts)}, each ' if whole else ''}{_rule_of(parts[0])}"
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


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _literals(part)]


def _look_up(tree: Any, name: str) -> Any:
    for field in name.split("."):
        if not isinstance(tree, Mapping) or field not in tree:
            return None
        tree = tree[field]
    return tree


def _value_of(recipe: Recipe, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), recipe)


def _show(value: Any) -> str:
    text = _one_line(redact(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- writing ---------------------------------------------------------------------------------------------------------


_SECRET_WORDS = re.compile(
    r"secret|passw(or)?d|passphrase|credential|api_?key|access_?key|private_?key|(^|_)auth$|_key$"
)
_TOKEN = re.compile(r"(^|_)token$")
_MODEL_TOKEN = re.compile(
    r"^(bos|eos|pad|unk|cls|sep|mask|image|video|audio|boi|eoi|boa|eoa|start|end|stop|decoder_start)_token$"
)
_SECRETS_IN_TEXT = (
    re.compile(r"(?<=://)[^\s/@]+(?=@)"),  # user:password, or a token, in front of a host
    re.compile(r"(?i)(?<=[?&])((?:[\w-]*(?:token|secret|password|key|signature|sig))=)[^&#\s]+"),
    re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,})"),
)
REDACTED = "REDACTED"


def redact(value: Any, name: str = "") -> Any:
    """The value without its secrets: what stands under a name like `hub_token` or `WANDB_API_KEY`, and passwords in URLs.

    `pad_token`, `num_tokens` and `tokenizer` are no secrets. Works through mappings and lists.
    """
    if is_secret(name) and value not in (None, "", REDACTED) and not isinstance(value, bool):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact(item) for item in value)
    if isinstance(value, str):
        for pattern in _SECRETS_IN_TEXT:
            value = pattern.sub(lambda found: (found.group(1) if found.lastindex else "") + REDACTED, value)
    return value


def is_secret(name: str) -> bool:
    """Whether what is kept under this name is a secret: `HF_TOKEN`, `apiKey`, `db-password`; not `pad_token_id`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2]).replace("-", "_").lower()
    return bool(_SECRET_WORDS.search(snake) or (_TOKEN.search(snake) and not _MODEL_TOKEN.search(snake)))


def format_recipe(recipe: Recipe, choices: Mapping[str, Choice[Any]] = MappingProxyType({})) -> str:
    """The recipe as YAML that can be run again as it is; each line ends with who set its value, and what auto chose.

    `choices` are by dotted name. What is `auto` stays so: elsewhere it may choose otherwise. Secrets are redacted.
    """
    lines = ["# A resolved recipe: `accel-train run` trains it again as it is. Behind each value: who set it."]
    for depth, field, value, who in setting_lines(recipe, choices):
        lines.append("  " * depth + f"{field}: {value}".rstrip() + (f"  # {who}" if who else ""))
    return "\n".join(lines) + "\n"


def write_recipe(recipe: Recipe, path: Path, choices: Mapping[str, Choice[Any]] = MappingProxyType({})) -> None:
    """Write `format_recipe` to a file, whole or not at all, readable by its owner alone.

    Raises:
        ValueError: the recipe holds an object of Python that YAML has no form for.
    """
    text = format_recipe(recipe, choices)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.touch(mode=0o600)  # as all of a run folder: for its owner alone
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def who_set(recipe: Recipe, name: str) -> str:
    """Who set a setting, by its dotted name; what a recipe built in Python differs from the defaults in, Python set."""
    origin, info = recipe.origin(name), recipe_names()[name]
    is_default = isinstance(info, FieldInfo) and info.default == _value_of(recipe, name)
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
    return SettingLine(depth, _one_line(key), _one_line(shown), _comment(who))


def _comment(text: object) -> str:
    return "".join(c if c.isprintable() else " " for c in redact(str(text)))


# ---- the model's configuration ---------------------------------------------------------------------------------------


def check_model_config(recipe: Recipe) -> None:
    """Refuse a `model.config` that transformers would take in silence, or only refuse once the model is built.

    Raises:
        ValueError: an unknown model_type or field, a value of the wrong type, or too few positions for the samples.
    """
    if recipe.model.config is None:
        return
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    fields = dict(recipe.model.config)
    model_type = fields.pop("model_type")
    at = f"({who_set(recipe, 'model.config')})"
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = get_close_matches(str(model_type), CONFIG_MAPPING, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "gpt2 and llama are two"
        raise ValueError(f"model.config.model_type={_show(model_type)} {at} is no model type of transformers; {remedy}")
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    known = {*default.to_dict(), *config_class.attribute_map} - {"model_type", "transformers_version"}
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling"}  # what transformers 4 called them, and 5 still reads
    problems = []
    for field in fields.keys() - known:
        near = get_close_matches(field, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
        where = recipe.origin(f"model.config.{field}")
        problems.append(
            f"model.config.{field} ({where}): {model_type} has no such field, and would ignore it; {remedy}"
        )
    if problems:
        raise ValueError("\n".join(sorted(problems)))
    unset = {name: None for name in ("bos_token_id", "eos_token_id") if name in known}  # a run takes the tokenizer's
    try:
        config = config_class(**unset | fields)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model.config {at} is not accepted by {model_type}: {reason}") from error
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    heads_have_own_size = any(name in field for field in known for name in ("head_dim", "d_kv", "kv_channels"))
    if isinstance(hidden, int) and isinstance(heads, int) and not heads_have_own_size and (heads < 1 or hidden % heads):
        names = [config_class.attribute_map.get(name, name) for name in ("hidden_size", "num_attention_heads")]
        raise ValueError(
            f"model.config {at}: {names[0]}={hidden} is not divisible by {names[1]}={heads}; change one of them"
        )
    rotary = getattr(config, "rope_parameters", None) is not None
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and not rotary and recipe.data.sequence_length > positions:
        field = config_class.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ValueError(
            f"data.sequence_length={recipe.data.sequence_length} ({who_set(recipe, 'data.sequence_length')}) is longer than "
            f"the {positions} positions of {model_type}; raise model.config.{field}, or lower data.sequence_length"
        )


def pretrained_config(recipe: Recipe) -> dict[str, Any]:
    """The configuration of `model.pretrained` as a `model.config`; no weights are loaded.

    Raises:
        ValueError: there is no such model.
    """
    from transformers import AutoConfig

    name = recipe.model.pretrained
    assert name is not None, "the recipe names a pretrained model"
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=recipe.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"model.pretrained={name!r} ({who_set(recipe, 'model.pretrained')}) cannot be loaded: {reason}"
        ) from error
    fields: dict[str, Any] = config.to_dict()
    return fields
