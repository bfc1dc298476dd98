"""The JSON Schema of the `--json` output, and its documentation page, generated from the types of the results."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict, is_typeddict

from accel_train.cli import results
from accel_train.cli.commands import COMMANDS
from accel_train.core.state import JsonRecord

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Error(TypedDict):
    """The failure of a command."""

    type: str
    """Class of the error, or the event that ended the process: hang, peer_failed, preempted. The exit code determines
    the remedy.
    """
    message: str
    """Text on standard error, one line per problem, without secrets."""


class Answer(TypedDict):
    """The object that every command prints with --json: one line, on standard output."""

    schema_version: Literal[1]
    """Version of the format. Fields may be added to a version. Existing fields keep name, type, and meaning."""
    command: str | None
    """Name of the command. Null if no command has this name."""
    ok: bool
    """Whether the exit code is 0."""
    exit_code: int
    result: Any
    """Result of the command. Null if the command failed or has no result (a process that was asked to stop)."""
    error: Error | None
    """Failure of the command. Null if it succeeded. Some failures have a result too: the findings of `doctor` and
    `verify`.
    """


def json_schema(*, closed: bool = False) -> JsonRecord:
    """Return the JSON Schema of the object, with the result of each command in `$defs`.

    `closed` allows no other fields.
    """
    _describe("forbid" if closed else "allow")
    kinds = {"answer": Answer, **{name: command.result for name, command in COMMANDS.items()}}
    inputs: list[Any] = [(name, "serialization", TypeAdapter(kind)) for name, kind in kinds.items()]
    references, schema = TypeAdapter.json_schemas(inputs, ref_template="#/$defs/{model}")
    answer = schema["$defs"].pop("Answer")
    properties = {**answer["properties"], "command": {"enum": [*COMMANDS, None]}}
    rules = [
        {
            "if": {"properties": {"command": {"const": name}}},
            "then": {"properties": {"result": {"anyOf": [references[name, "serialization"], {"type": "null"}]}}},
        }
        for name in COMMANDS
    ]
    return {"$schema": DIALECT, **answer, "properties": properties, "allOf": rules, "$defs": schema["$defs"]}


def schema_page() -> str:
    """Return the page of all results: one table of fields per command."""
    _describe("allow")
    lines = [
        "# Results for programs",
        "",
        "What `accel-train COMMAND --json` prints: [for programs](programs.md) has examples. The JSON Schema:",
        "`from accel_train.cli.results.schema import json_schema`.",
        "",
        "## The object",
        "",
        *_table(Answer),
        "",
        "`error`:",
        "",
        *_table(Error),
    ]
    whole = {name: command.result for name, command in COMMANDS.items()}
    for name, kind in whole.items():
        about = _about(kind).partition(": ")[2]
        lines += ["", f"## {name}", "", f"{about[0].upper()}{about[1:]}", "", *_table(kind)]
        # A whole result within another one has a table of its own.
        text = " ".join(map(str, kind.__annotations__.values()))
        for part in _types():
            if part not in whole.values() and part.__name__ in text:
                about = _about(part)
                lines += ["", f"`{part.__name__}`: {about[0].lower()}{about[1:]}", "", *_table(part)]
    return "\n".join(lines) + "\n"


def _describe(others: Literal["allow", "forbid"]) -> None:
    """Make pydantic read descriptions from the strings below fields, and allow or forbid other fields."""
    for kind in (Answer, Error, *_types()):
        kind.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True, extra=others)  # type: ignore[attr-defined]


def _types() -> list[type]:
    return [kind for kind in vars(results).values() if is_typeddict(kind)]


def _about(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _table(kind: type) -> Iterator[str]:
    schema = TypeAdapter(kind).json_schema(mode="serialization")
    yield from ("| field | type | meaning |", "|---|---|---|")
    for name, field in schema["properties"].items():
        yield f"| `{name}` | {_type_of(field)} | {' '.join(field.get('description', '').split())} |"


def _type_of(field: JsonRecord) -> str:
    """Return a field's type in words: `a list of MemoryOfPlan`, `number or null`."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_type_of, field["anyOf"])))
    if "enum" in field or "const" in field:
        values = field.get("enum") or [field["const"]]
        return "number" if "NaN" in values else " or ".join(map(str, values))
    if field.get("type") == "array":
        return f"list of {_type_of(field['items'])}"
    if field.get("type") == "object":
        return "object"
    return {"boolean": "true or false"}.get(str(field.get("type")), str(field.get("type", "any")))
