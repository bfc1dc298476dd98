"""Read the tools of chats and the calls of tools, in the form that chat templates expect."""

import json
from typing import Any

from accel_train.core.json_io import parse_json
from accel_train.data.tables import check_text, show_cell
from accel_train.recipe.data import Data


def read_calls(value: Any, at: str, data: Data) -> list[dict[str, Any]]:
    """Return the calls of a message as {type: function, function: {name, arguments}}, with arguments as an object.

    OpenAI writes the arguments as a string, which templates would quote again. ShareGPT writes one call or a list.

    Raises:
        ValueError: a call is not JSON, or has no name or no arguments.
    """
    calls = read_tools(value, at, data)
    for call in calls:
        arguments = _json(call["function"].get("arguments"), at, data)
        if not isinstance(arguments, dict):
            raise ValueError(f"{at}: the arguments of a call are {show_cell(arguments)}, not an object; write {{}}")
        call["function"] = {**call["function"], "arguments": arguments}
    return calls


def read_tools(cell: Any, at: str, data: Data) -> list[dict[str, Any]]:
    """Return the tools in a cell (JSON, or a string of it) as {type: function, function: {name, ...}}.

    Raises:
        ValueError: the cell is not JSON, or a tool has no name.
    """
    tools, found = [], _json(cell, at, data) or []
    for tool in found if isinstance(found, list) else [found]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{at}: {show_cell(tool)} is not a function with a name; write {{name: ..., ...}}")
        tools.append({"type": "function", **(tool if "function" in tool else {"function": tool})})
    return tools


def _json(value: Any, at: str, data: Data) -> Any:
    """Return the value of a JSON string, or other values without null, with which Arrow fills absent keys."""
    is_string = isinstance(value, str)
    without_null = None if is_string else (lambda each: {name: item for name, item in each.items() if item is not None})
    try:
        text = json.dumps(parse_json(value or "null") if is_string else value, ensure_ascii=False, default=str)
    except ValueError as error:
        raise ValueError(f"{at}: {show_cell(value)} is not JSON ({error}); repair or drop the row") from None
    return parse_json(check_text(text, at, data), object_hook=without_null)
