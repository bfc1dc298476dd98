"""`stdlib-functions`: the functions of the running Python's own library, labelled by the package they come from.

A data set for text classification that is there offline: code in, name of the package out.
"""

import ast
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_train.data.sources import python_stdlib_files, python_stdlib_root

if TYPE_CHECKING:
    import datasets

NUM_PACKAGES = 10
"""Classes: the packages with the most functions (a module counts as a package of its own)."""

MAX_PER_PACKAGE = 1000
"""Functions of a package at most, evenly spaced over its files, so that no class is most of the data."""

MIN_LINES = 2
"""Shorter functions (`def close(self): pass`) are the same in every package."""

_DEFINITION = re.compile(r"^\s*(?:async\s+)?def\s", re.MULTILINE)


def stdlib_functions() -> "datasets.Dataset":
    """Columns `text`, `label` (a class label) and `id` (`package/file.py:line`), in the order of the files.

    A text is a function or method as it stands in the file, decorators left out, moved to the left margin. Functions
    inside functions are part of the outer one's text, and not samples of their own: none is in training and evaluation
    at once. Docstrings are left out, because they name the package in plain words. A text that stands in several packages
    is left out, and one that stands in a package several times is there once. Takes about two seconds.

    Raises:
        ValueError: this Python carries no source files.
    """
    import datasets

    rows = _distinct_rows()
    names = sorted({package for package, _, _ in rows})
    columns = {
        "text": [text for _, text, _ in rows],
        "label": [names.index(package) for package, _, _ in rows],
        "id": [identity for _, _, identity in rows],
    }
    features = {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=names),
        "id": datasets.Value("string"),
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _distinct_rows() -> list[tuple[str, str, str]]:
    """(package, text, id) of every sample."""
    found: dict[str, list[tuple[str, str]]] = {}
    packages_of: dict[str, set[str]] = {}
    for package, files in _largest_packages().items():
        for name, source in files:
            for text, line in _functions(source):
                if package not in packages_of.setdefault(text, set()):
                    packages_of[text].add(package)
                    found.setdefault(package, []).append((text, f"{name}:{line}"))
    rows = []
    for package, samples in found.items():
        alone = [sample for sample in samples if len(packages_of[sample[0]]) == 1]
        count = min(len(alone), MAX_PER_PACKAGE)
        rows += [(package, *alone[index * len(alone) // count]) for index in range(count)]
    return rows


def _largest_packages() -> dict[str, list[tuple[str, str]]]:
    """Name and source of each file of the packages with the most functions, largest package first.

    Counted by a pattern: parsing the whole library would take three times as long.
    """
    root = python_stdlib_root()
    files: dict[str, list[tuple[str, str]]] = {}
    counts: Counter[str] = Counter()
    for file in python_stdlib_files():
        name = file.path.relative_to(root)
        package = name.parts[0].removesuffix(".py")
        source = file.path.read_text(encoding="utf-8")
        files.setdefault(package, []).append((name.as_posix(), source))
        counts[package] += len(_DEFINITION.findall(source))
    largest = sorted(counts, key=lambda package: (-counts[package], package))[:NUM_PACKAGES]
    return {package: files[package] for package in largest}


def _functions(source: str) -> Iterator[tuple[str, int]]:
    """Text and first line of each function and method of a file."""
    lines = source.splitlines(keepends=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        body: list[ast.AST] = list(ast.parse(source).body)
    for statement in body:  # grows by what classes and branches hold
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            text = _code_of(statement, lines)
            if text.count("\n") >= MIN_LINES:
                yield text, statement.lineno
        else:
            for block in ("body", "handlers", "orelse", "finalbody"):
                body += getattr(statement, block, [])


def _code_of(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """The function without its docstring; of one that is nothing else, nothing."""
    assert function.end_lineno is not None
    text = lines[function.lineno - 1 : function.end_lineno]
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        if len(function.body) == 1:
            return ""
        assert docstring.end_lineno is not None
        text = lines[function.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : function.end_lineno]
    return textwrap.dedent("".join(text)).rstrip() + "\n"
