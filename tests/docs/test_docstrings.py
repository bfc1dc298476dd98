"""A docstring stands alone in an editor's hover: it begins with a verb, or names the thing."""

import ast

from tests.support.runs import REPOSITORY

NEEDS_A_SENTENCE_BEFORE = {"of", "as", "what", "how", "whether", "where", "which", "why", "from", "for", "in"}


def test_docstrings_of_modules_classes_and_functions_stand_alone() -> None:
    found = []
    for path in sorted((REPOSITORY / "accel_train").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or "Empty"
                if text.split()[0].lower() in NEEDS_A_SENTENCE_BEFORE:
                    found.append(f"{path.relative_to(REPOSITORY)}: {text.splitlines()[0]}")
    assert found == []
