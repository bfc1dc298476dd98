"""`stdlib-tags`: tokens of functions of Python's standard library, tagged by the role of each name."""

import ast
import io
import tokenize
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_train.data.builtin.stdlib import data_set, distinct_functions, evenly_spaced, parse_function

if TYPE_CHECKING:
    import datasets

MAX_FUNCTIONS = 4000
"""Most functions, evenly spaced over the files."""
KINDS = ("attribute", "call", "exception", "function", "global", "keyword", "parameter", "variable")
TAG_NAMES = ("O", *(f"{prefix}-{kind}" for kind in KINDS for prefix in "BI"))

_LAYOUT = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)
# Line from 1, column from 0.
_Place = tuple[int, int]


def stdlib_tags() -> "datasets.Dataset":
    """Return columns `tokens`, `tags` (B- and I- of 8 kinds, and O) and `id` (`package/file.py:line`), in file order.

    A row is a function of `stdlib_functions`. Its words are Python's tokens without comments and layout. The kinds:

    - `function`: the name in a definition
    - `call`: a called name
    - `attribute`: another dotted name
    - `parameter`, `variable`: parameters, and variables that the function assigns
    - `global`: all other names
    - `exception`: a caught exception
    - `keyword`: the name of a keyword argument

    A dotted name is one entity: `os.path.join` in a call is B-call and four I-call.
    """
    import datasets

    functions = evenly_spaced(list(distinct_functions().items()), MAX_FUNCTIONS)
    rows = [
        (words, list(map(TAG_NAMES.index, tags)), where)
        for text, where in functions
        for words, tags in [tagged_words(text)]
        if words
    ]
    string, tag = datasets.Value("string"), datasets.ClassLabel(names=list(TAG_NAMES))
    return data_set({"tokens": datasets.List(string), "tags": datasets.List(tag), "id": string}, rows)


def tagged_words(text: str) -> tuple[list[str], list[str]]:
    """Return the tokens of a function and their tags. Both are empty if `parse_function` returns None."""
    tree = parse_function(text)
    if tree is None:
        return [], []
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _LAYOUT]
    spans = dict(_spans(tree))
    tags: list[str] = []
    kind, end = "", (0, 0)
    for number, token in enumerate(tokens):
        if token.start < end:
            tags.append(f"I-{kind}")
            continue
        is_defined = number > 0 and tokens[number - 1].string == "def"
        kind, end = ("function", token.end) if is_defined else spans.get(token.start, ("", token.end))
        is_name = token.type == tokenize.NAME
        tags.append(f"B-{kind}" if kind and is_name else "O")
        # A name inside a string. Older Pythons do not report its place.
        if not is_name:
            end = token.end
    return [token.string for token in tokens], tags


def _spans(tree: ast.Module) -> Iterator[tuple[_Place, tuple[str, _Place]]]:
    """Yield (start, (kind, end)) of each name. A dotted name is one span; its parts have no spans."""
    every = list(ast.walk(tree))
    parameters = {node.arg for node in every if isinstance(node, ast.arg)}
    assigned = {node.id for node in every if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    called = {id(node.func) for node in every if isinstance(node, ast.Call)}
    handlers = [node.type for node in every if isinstance(node, ast.ExceptHandler) and node.type is not None]
    caught = {id(part) for kind in handlers for part in (kind.elts if isinstance(kind, ast.Tuple) else [kind])}
    nodes: list[ast.AST] = [tree]
    # The list grows: children are appended, except inside dotted names.
    for node in nodes:
        if isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            kind = "parameter" if isinstance(node, ast.arg) else "keyword"
            yield _at(node), (kind, (node.lineno, node.col_offset + len(node.arg)))
        elif isinstance(node, ast.Name | ast.Attribute) and _is_dotted(node):
            kind = "attribute"
            if id(node) in called:
                kind = "call"
            elif id(node) in caught:
                kind = "exception"
            elif isinstance(node, ast.Name):
                kind = "parameter" if node.id in parameters else "variable" if node.id in assigned else "global"
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            yield _at(node), (kind, (node.end_lineno, node.end_col_offset))
            continue
        nodes += ast.iter_child_nodes(node)


def _at(node: ast.expr | ast.arg | ast.keyword) -> _Place:
    return node.lineno, node.col_offset


def _is_dotted(node: ast.AST) -> bool:
    """Return whether an expression is a name or a dotted name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
