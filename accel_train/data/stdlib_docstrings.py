"""`stdlib-docstrings`: what functions of the running Python's own library promise, and how they keep it.

A data set for fine-tuning that is there offline: signature and docstring in, body out.
"""

import ast
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_train.data.sources import python_stdlib_files

if TYPE_CHECKING:
    import datasets

NAME = "stdlib-docstrings"

MAX_CHARACTERS = 600
"""Longer functions are left out: two thirds of all stay, and fit into a few hundred tokens."""


def stdlib_docstrings() -> "datasets.Dataset":
    """Columns `prompt`, `completion` and `id` (`file.py:line`), in the order of the files: about 4,000 rows, in a few seconds.

    A prompt is the function's signature and docstring, moved to the left margin, without its line end (which tokenizers
    join with the indentation that follows); the completion is the rest. What stands in the library several times is there
    once.

    Raises:
        ValueError: this Python carries no source files.
    """
    import datasets

    rows = {(prompt, completion): where for prompt, completion, where in reversed(list(_functions()))}
    columns = [(prompt, completion, where) for (prompt, completion), where in reversed(rows.items())]
    return datasets.Dataset.from_dict(dict(zip(("prompt", "completion", "id"), map(list, zip(*columns)))))


def _functions() -> Iterator[tuple[str, str, str]]:
    for file in python_stdlib_files():
        source = file.path.read_text(encoding="utf-8")
        lines = source.split("\n")  # not splitlines: to Python's parser a form feed ends no line
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) == 1:
                continue
            end_of_docstring = node.body[0].end_lineno
            # A body on the docstring's last line, after a semicolon, cannot be cut off by lines.
            if ast.get_docstring(node, clean=False) is None or node.body[1].lineno == end_of_docstring:
                continue
            assert end_of_docstring is not None
            margin = " " * node.col_offset
            text = [line.removeprefix(margin) for line in lines[node.lineno - 1 : node.end_lineno]]
            cut = end_of_docstring - node.lineno + 1
            prompt, completion = "\n".join(text[:cut]), "\n" + "\n".join(text[cut:]).strip("\n") + "\n"
            if len(prompt) + len(completion) <= MAX_CHARACTERS:
                yield prompt, completion, f"{file.path.name}:{node.lineno}"
