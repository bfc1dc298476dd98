"""`stdlib-summaries`: functions of Python's standard library with the first sentence of their docstrings."""

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_train.data.builtin.stdlib import Function, largest_packages, parse

if TYPE_CHECKING:
    import datasets

MIN_WORDS = 3
"""Fewest words of a sentence. Shorter ones ("Close.") say too little."""


def stdlib_summaries() -> "datasets.Dataset":
    """Return columns `anchor` (a sentence), `positive` (a signature), `package`, and `id`, in file order.

    A signature is a name with its class and its arguments: `Stack.push(item)`. Each text appears once in the whole
    library, so no text is in two packages. Takes about two seconds.
    """
    import datasets

    seen: set[str] = set()
    rows = []
    for package, files in largest_packages(None).items():
        for name, source in files:
            for sentence, signature, line in _documented(source):
                texts = {sentence, signature}
                if len(sentence.split()) >= MIN_WORDS and len(texts) == 2 and not texts & seen:
                    seen |= texts
                    rows.append((sentence, signature, package, f"{name}:{line}"))
    return datasets.Dataset.from_dict(dict(zip(("anchor", "positive", "package", "id"), map(list, zip(*rows)))))


def _documented(source: str) -> Iterator[tuple[str, str, int]]:
    """Yield (first sentence, signature, line) of each function and method of a file that has a docstring."""
    body: list[tuple[ast.AST, str]] = [(statement, "") for statement in parse(source).body]
    # The list grows: bodies of classes and branches are appended.
    for statement, owner in body:
        if isinstance(statement, Function):
            paragraph = re.split(r"\n\s*\n", (ast.get_docstring(statement) or "").strip())[0]
            sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split()))[0]
            given = statement.args
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            listed = ", ".join(name for name in names if name not in ("self", "cls"))
            yield sentence, f"{owner}{statement.name}({listed})", statement.lineno
        else:
            owner = f"{statement.name}." if isinstance(statement, ast.ClassDef) else owner
            for block in ("body", "handlers", "orelse", "finalbody"):
                body += [(inner, owner) for inner in getattr(statement, block, [])]
