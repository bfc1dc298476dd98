"""Every call of this package's functions in notebooks and pages fits the function that it names."""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("recipes/notebooks/**/*.ipynb", "docs/*.md", "README.md")
    for path in ROOT.glob(pattern)
)


def code_of(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(source) for source in cells)
    elif path.suffix == ".md":
        text = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return re.sub(r"^[%!].*$", "", text, flags=re.MULTILINE)


def misfits(code: str) -> Iterator[str]:
    """Yield the calls of imported names that the signature of the function does not take."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel_train"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    module = importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name, module)
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in found:
            continue
        if any(isinstance(each, ast.Starred) for each in node.args) or any(word.arg is None for word in node.keywords):
            continue
        try:
            inspect.signature(found[node.func.id]).bind(*node.args, **{str(word.arg): 0 for word in node.keywords})
        except TypeError as error:
            yield f"{ast.unparse(node)}: {error}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_fit_the_functions_that_they_name(name: str) -> None:
    assert [*misfits(code_of(ROOT / name))] == []


def test_a_call_that_does_not_fit_is_found() -> None:
    code = "from accel_train import train\nfrom accel_train.core.format import format_count as f\n"
    assert [*misfits(f"{code}train({{}})\nf(3, 'row')\nf(*[3])")] == []
    assert len([*misfits(f"{code}train()\nf(3, noun='row')\nf()")]) == 3
