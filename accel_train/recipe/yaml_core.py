"""YAML 1.2's core schema: parse YAML with the line of each key, and write values on one line.

PyYAML implements YAML 1.1. Here `1e-4` is a number. `no`, `on`, and `2024-01-01` are text. Only `true` and `false` are
booleans. A key may occur once. A quoted scalar is text, so `"1e-4"` is not a number.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from accel_train.core.errors import SettingError
from accel_train.core.redaction import redact
from accel_train.recipe.values import Section

Key = tuple[Any, ...]
"""Place of a setting in the tree: ("optimizer", "learning_rate")."""
_MOST_VALUES = 100_000
"""Largest number of values that aliases may create. Nine levels of nine aliases would create 400 million."""
_TAG = "tag:yaml.org,2002:"
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_SCALARS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "null": (r"null|Null|NULL|~|", "nN~", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    "int": (_INT, "-+0123456789", lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))),
    "float": (_FLOAT, "-+.0123456789", lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower()))),
}
"""Scalars that are not text: pattern, first characters, and reader."""
_WORDS = ("null", "true", "false")
"""Words that are not text, or that would not be text with other capitals."""


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser, with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own protocol)


class _CoreDumper(yaml.SafeDumper):
    """Dumper whose one-line output `_CoreLoader` reads as the same value."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


for _name, (_pattern, _first, _) in _SCALARS.items():
    for _class in (_CoreLoader, _CoreDumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), [*_first, ""])


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar(_TAG + "str", text, style)


def _represent_section(dumper: yaml.SafeDumper, section: Section) -> yaml.MappingNode:
    return dumper.represent_dict(section.model_dump())


_CoreDumper.add_representer(str, _represent_text)
_CoreDumper.add_multi_representer(Section, _represent_section)


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Key, int]]:
    """Return the value of a YAML document, and the line of each of its keys.

    Raises:
        ValueError: a syntax error. The message has `name:line:column`, the problem, and the text of the line.
    """
    document = _Document(name, max(_MOST_VALUES, len(text)))
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
        return (None if root is None else document.value(root)), document.lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None, "a parse error has a place"
        lines = [*text.splitlines(), ""]
        line = lines[row := min(mark.line, len(lines) - 1)]
        told = (error.problem, error.context)
        what = " ".join(filter(None, reversed(told) if str(error.problem).startswith("but ") else told))
        remedy = "indent with spaces" if "\t" in line else ""
        if "alias" in what:
            remedy = "* begins an alias in YAML, so put quotes around a pattern that begins with it: '*name*'"
        before = next((number for number in reversed(range(row)) if lines[number].strip()), None)
        if what.startswith("mapping values") and before is not None:
            if ":" not in lines[before]:
                found = lines[before].strip()
                raise SettingError(f"{found!r} lacks a colon, as in name: value", at=f"{name}:{before + 1}") from error
            if _depth(line) > _depth(lines[before]):
                remedy = f"begin it in the column of line {before + 1}, which has a value already"
        at = f"{name}:{mark.line + 1}:{mark.column + 1}"
        raise SettingError(f"{what}: {line.strip()!r}", remedy, at) from error
    except yaml.YAMLError as error:
        raise SettingError(" ".join(str(error).split()), "save it as plain UTF-8 text", name) from error
    except RecursionError as error:
        raise SettingError("nested too deeply", "a recipe needs a few levels", name) from error


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


@dataclass
class _Document:
    """Reader of a document: the values of its nodes, and the lines of their keys. Each alias creates new values."""

    name: str
    values_left: int
    lines: dict[Key, int] = field(default_factory=dict)

    def value(self, node: yaml.Node, key: Key = (), parents: tuple[yaml.Node, ...] = ()) -> Any:
        here = f"{self.name}:{node.start_mark.line + 1}"
        self.values_left -= 1
        if self.values_left < 0:
            problem = f"aliases expand to more than {_MOST_VALUES:,} values, too many for a recipe"
            raise SettingError(problem, "Write them out.", self.name)
        if node in parents:
            raise SettingError("this alias contains itself", "write the value out", here)
        kind = node.tag.removeprefix(_TAG)
        if kind not in (("str", *_SCALARS) if isinstance(node, yaml.ScalarNode) else ("map", "seq")):
            raise SettingError(f"the tag {node.tag} is not allowed", "recipes hold plain values only", here)
        if isinstance(node, yaml.ScalarNode):
            try:
                return node.value if kind == "str" else _SCALARS[kind][2](node.value)
            except ValueError as error:
                raise SettingError(f"{node.value[:80]!r} is not a readable number", at=here) from error
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*key, i), (*parents, node)) for i, item in enumerate(node.value)]
        return self._mapping(node, key, (*parents, node))

    def _mapping(self, node: yaml.Node, key: Key, parents: tuple[yaml.Node, ...]) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for name_node, value_node in node.value:
            here = f"{self.name}:{name_node.start_mark.line + 1}"
            if not isinstance(name_node, yaml.ScalarNode):
                raise SettingError("a key must be a name, not a list or mapping", at=here)
            if name_node.value == "<<":
                raise SettingError("merge keys (<<) are not part of YAML 1.2", "write the settings out", here)
            name = self.value(name_node)
            place, line = (*key, name), name_node.start_mark.line + 1
            first = self.lines.setdefault(place, line)
            if name in result:
                dotted = ".".join(map(str, place))
                problem = f"{dotted} is set twice, on lines {first} and {line}"
                raise SettingError(problem, "remove one", here, (dotted,))
            result[name] = self.value(value_node, place, parents)
        return result


def is_number(text: str) -> bool:
    """Return whether an unquoted text would be read as a number."""
    return re.fullmatch(f"{_INT}|{_FLOAT}", text) is not None


def one_line(value: Any) -> str:
    """Return a value as YAML on one line that reads as the same value in any place."""
    if isinstance(value, str) and value.isascii() and value.isidentifier() and value.lower() not in _WORDS:
        # This covers most of a recipe. PyYAML's dumper takes 0.1 ms per value.
        return value
    try:
        return yaml.dump(
            [value], Dumper=_CoreDumper, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
        )[1:-2]
    except yaml.YAMLError as error:
        problem = f"{value!r} cannot be written as YAML"
        raise SettingError(problem, "use numbers, text, lists and mappings") from error


def show(value: Any) -> str:
    """Return a value for a message: on one line, without secrets, cut to 80 characters."""
    text = one_line(redact(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
