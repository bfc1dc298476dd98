"""`stdlib-questions`: questions about functions of Python's standard library, answered by its parser."""

import ast
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accel_train.data.builtin.stdlib import data_set, distinct_functions, evenly_spaced, parse, parse_function

if TYPE_CHECKING:
    import datasets

MAX_FUNCTIONS = 3000
"""Most functions of stdlib-questions, evenly spaced over the files."""
MOST_ANSWER_CHARACTERS = 60


def stdlib_questions() -> "datasets.Dataset":
    """Return columns `question`, `context` (a function), `answers` (`text`, `answer_start`) and `id`, in file order.

    The questions ask for:

    - the default of a parameter; a parameter without a default has no answer
    - the value assigned to a variable
    - the iterable of a loop
    - the return value
    - the raised exception

    Each question is asked only if its answer is unique.
    """
    import datasets

    every = [each for each in distinct_functions().items() if parse_function(each[0]) is not None]
    rows: list[tuple[Any, ...]] = []
    for text, where in evenly_spaced(every, MAX_FUNCTIONS):
        for number, (question, answer) in enumerate(_questions(text), start=1):
            found = [] if answer is None else [answer]
            cell = {"text": [each for each, _ in found], "answer_start": [at for _, at in found]}
            rows.append((question, text, cell, f"{where}#{number}"))
    string = datasets.Value("string")
    answers = {"text": datasets.List(string), "answer_start": datasets.List(datasets.Value("int32"))}
    return data_set({"question": string, "context": string, "answers": answers, "id": string}, rows)


def _questions(text: str) -> Iterator[tuple[str, tuple[str, int] | None]]:
    """Yield each question about a function with (answer, start), or with None if it has no answer."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    for question, node in _asked(parse(text)):
        if node is None:
            yield question, None
            continue
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        if end - begin <= MOST_ANSWER_CHARACTERS:
            yield question, (text[begin:end], begin)


def _asked(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each question with the expression that answers it."""
    nodes = list(ast.walk(tree))
    [function] = tree.body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    pairs = [*zip(positional, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    for argument, default in pairs:
        if argument.arg not in ("self", "cls"):
            yield f"What is the default of {argument.arg}?", default
    assigned = [
        (node.targets[0].id, node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    ]
    loops = [
        (node.target.id, node.iter) for node in nodes if isinstance(node, ast.For) and isinstance(node.target, ast.Name)
    ]
    for form, found in (("What is assigned to {}?", assigned), ("What does the loop over {} go over?", loops)):
        counts = Counter(name for name, _ in found)
        yield from ((form.format(name), value) for name, value in found if counts[name] == 1)
    returned = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
    raised = [node.exc.func for node in nodes if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    for question, values in (("What does it return?", returned), ("Which exception does it raise?", raised)):
        yield from ((question, value) for value in values if len(values) == 1)
