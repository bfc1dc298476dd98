"""YAML 1.2's core schema, read with the line of each key and written on one line.

PyYAML's own is 1.1. Here `1e-4` is a number; `no`, `on` and `2024-01-01` are text; only `true` and `false` are booleans;
a key may stand once. A quoted scalar is text, so `"1e-4"` is no number.
"""

import math
import re
from typing import Any

import yaml

from accel_train.recipe_values import Section

Key = tuple[Any, ...]
"""A setting's place in the tree: ("optimizer", "learning_rate")."""
_MOST_VALUES = 100_000
"""What aliases may make of a few lines: nine levels of nine aliases are 400 million values."""
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
        sizes: dict[int, int] = {}
        num_values = 0 if root is None else _num_values(root, sizes)
        if num_values > max(_MOST_VALUES, len(sizes)):
            raise ValueError(
                f"{name}: with its aliases it has {num_values:,} values, too many for a recipe; write out what is meant"
            )
        return (None if root is None else _construct(root, name, (), lines, ())), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None, "a parse error has a place"
        line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
        what = " ".join(filter(None, (error.problem, error.context)))
        remedy = "; indent with spaces" if "\t" in line else ""
        if "alias" in what:
            remedy = "; * begins an alias in YAML, so put quotes around a pattern that begins with it: '*name*'"
        raise ValueError(f"{name}:{mark.line + 1}:{mark.column + 1}: {what}: {line.strip()!r}{remedy}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}; save it as plain UTF-8 text") from error
    except RecursionError as error:
        raise ValueError(f"{name}: nested too deeply; a recipe needs a few levels") from error


def _num_values(node: yaml.Node, sizes: dict[int, int]) -> int:
    """How many values a node has once its aliases are written out; `sizes` keeps it by id, so that each node is counted once."""
    if id(node) not in sizes:
        sizes[id(node)] = 0  # of an alias that contains itself, which is refused later
        items = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = (part for item in items for part in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = 1 + sum(_num_values(part, sizes) for part in parts)
    return sizes[id(node)]


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


def is_number(text: str) -> bool:
    """Whether a text, not quoted, would be read as a number."""
    return re.fullmatch(f"{_INT}|{_FLOAT}", text) is not None


def one_line(value: Any) -> str:
    """A value as YAML on one line, which reads as the same value in any place."""
    value = value.model_dump() if isinstance(value, Section) else value
    try:
        return yaml.dump(
            [value], Dumper=_CoreDumper, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
        )[1:-2]
    except yaml.YAMLError as error:
        raise ValueError(f"{value!r} cannot be written as YAML; use numbers, text, lists and mappings") from error
