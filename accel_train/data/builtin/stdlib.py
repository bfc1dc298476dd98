"""Python's standard library as offline data.

- `python-stdlib`, `stdlib-docstrings`, `stdlib-functions`
- `stdlib-summaries`: functions with the first sentence of their docstrings
- `stdlib-names`: functions with the name blanked and four names to choose from
- `stdlib-questions`: questions about functions, answered by its parser
- `stdlib-tags`: tokens of functions, tagged by the role of each name
- `hangul-letters`: Korean syllables from its Unicode data, as translation pairs
"""

import ast
import io
import re
import sysconfig
import textwrap
import tokenize
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from accel_train.core.files import files_below

if TYPE_CHECKING:
    import datasets

MAX_CHARACTERS = 600
"""Longest function of stdlib-docstrings and stdlib-names, in characters. Two thirds of the first fit, and 4 of 5."""
MAX_DISTINCT_CHARACTERS = 800
"""Longest function of stdlib-questions and stdlib-tags, in characters. A quarter of all functions are longer."""

NUM_PACKAGES = 10
"""Number of classes of stdlib-functions: the packages with the most functions. A module counts as a package."""
MAX_PER_PACKAGE = 1000
"""Most functions per package, evenly spaced over its files, so that no class dominates the data."""
# Shorter functions (`def close(self): pass`) are identical across packages.
MIN_LINES = 2

# Left out: third-party packages, tests (some are not UTF-8 on purpose), an editor, and wheels.
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "idlelib", "_bundled")
)
_DEFINITION = re.compile(r"^\s*(?:async\s+)?def\s", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Sample = TypeVar("Sample")


def data_set(columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> "datasets.Dataset":
    """Return rows as a data set. `columns` are names, or a mapping of names to features; default: inferred features."""
    import datasets

    features = datasets.Features(columns) if isinstance(columns, Mapping) else None
    return datasets.Dataset.from_dict(dict(zip(columns, map(list, zip(*rows)))), features)


def evenly_spaced(samples: Sequence[Sample], most: int) -> list[Sample]:
    """Return `most` evenly spaced samples, or all if there are not more."""
    count = min(len(samples), most)
    return [samples[index * len(samples) // count] for index in range(count)]


def python_stdlib_files() -> tuple[Path, ...]:
    """Return the files of the library, one document per `.py` file, sorted by relative name.

    Raises:
        ValueError: this Python has no source files (an embedded or zipped Python).
    """
    root = _root()
    paths = files_below(root, skipped=_NOT_STDLIB)
    files = tuple(path for path in paths if path.suffix == ".py" and path.is_file())
    if not files:
        raise ValueError(f"python-stdlib: {root} holds no .py files; name another corpus in data.train")
    return files


def stdlib_docstrings() -> "datasets.Dataset":
    """Return columns `prompt`, `completion` and `id` (`file.py:line`), in file order.

    Returns about 4,000 rows and takes a few seconds. A prompt is the dedented signature and docstring of a function. It
    has no final newline, because tokenizers join a newline with the indentation that follows. The completion is the
    rest of the function. Duplicate functions appear once.
    """
    rows = {(prompt, completion): where for prompt, completion, where in reversed(list(_prompts_and_bodies()))}
    return data_set(("prompt", "completion", "id"), [(*texts, where) for texts, where in reversed(rows.items())])


def stdlib_functions() -> "datasets.Dataset":
    """Return columns `text`, `label` (the package) and `id` (`package/file.py:line`), in file order.

    A text is a dedented function or method without decorators and docstring; a docstring would name the package. A
    nested function belongs to the text of its outer function, so no function is in both training and evaluation. Texts
    that several packages share are left out. Duplicates within a package appear once. Takes about two seconds.
    """
    import datasets

    samples: dict[str, dict[str, str]] = defaultdict(dict)
    packages_of: dict[str, set[str]] = defaultdict(set)
    for package, text, where in library_functions():
        samples[package].setdefault(text, where)
        packages_of[text].add(package)
    names = sorted(samples)
    rows = []
    for package, places in samples.items():
        alone = [(text, names.index(package), where) for text, where in places.items() if len(packages_of[text]) == 1]
        rows += evenly_spaced(alone, MAX_PER_PACKAGE)
    string = datasets.Value("string")
    return data_set({"text": string, "label": datasets.ClassLabel(names=names), "id": string}, rows)


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def parse(source: str) -> ast.Module:
    """Return the syntax tree of a file, without parser warnings."""
    with warnings.catch_warnings():
        # Invalid escapes in library strings would warn.
        warnings.simplefilter("ignore")
        return ast.parse(source)


def parse_function(text: str) -> ast.Module | None:
    """Return the syntax tree of a text from `functions_of`, or None.

    None for a text that is not ASCII: `ast` counts columns in bytes, and callers need characters. Also None for a text
    that does not parse, for example because a string left of the margin prevented dedenting.
    """
    try:
        return parse(text) if text.isascii() else None
    except SyntaxError:
        return None


def _prompts_and_bodies() -> Iterator[tuple[str, str, str]]:
    for file in python_stdlib_files():
        source = file.read_text(encoding="utf-8")
        # Not splitlines: Python's parser does not end a line at a form feed.
        lines = source.split("\n")
        for node in ast.walk(parse(source)):
            if not isinstance(node, Function) or len(node.body) == 1:
                continue
            end_of_docstring = node.body[0].end_lineno
            # A body on the last line of the docstring (after a semicolon) cannot be separated by lines.
            if ast.get_docstring(node, clean=False) is None or node.body[1].lineno == end_of_docstring:
                continue
            assert end_of_docstring is not None
            margin = " " * node.col_offset
            text = [line.removeprefix(margin) for line in lines[node.lineno - 1 : node.end_lineno]]
            cut = end_of_docstring - node.lineno + 1
            prompt, completion = "\n".join(text[:cut]), "\n" + "\n".join(text[cut:]).strip("\n") + "\n"
            if len(prompt) + len(completion) <= MAX_CHARACTERS:
                yield prompt, completion, f"{file.name}:{node.lineno}"


def library_functions(most: int | None = NUM_PACKAGES) -> Iterator[tuple[str, str, str]]:
    """Yield (package, function, `package/file.py:line`) for the functions of `largest_packages`."""
    for package, files in largest_packages(most).items():
        for name, source in files:
            yield from ((package, text, f"{name}:{line}") for text, line in functions_of(source))


def distinct_functions() -> dict[str, str]:
    """Return the place of each different function of the largest packages that is not too long, by its text."""
    found: dict[str, str] = {}
    for _, text, where in library_functions():
        if len(text) <= MAX_DISTINCT_CHARACTERS:
            found.setdefault(text, where)
    return found


def largest_packages(most: int | None = NUM_PACKAGES) -> dict[str, list[tuple[str, str]]]:
    """Return (name, source) pairs by package for the packages with the most functions, largest first; all if None.

    Counts functions with a regular expression. Parsing the whole library would take three times as long.
    """
    files: dict[str, list[tuple[str, str]]] = {}
    counts: Counter[str] = Counter()
    for file in python_stdlib_files():
        name = file.relative_to(_root())
        package = name.parts[0].removesuffix(".py")
        source = file.read_text(encoding="utf-8")
        files.setdefault(package, []).append((name.as_posix(), source))
        counts[package] += len(_DEFINITION.findall(source))
    largest = sorted(counts, key=lambda package: (-counts[package], package))[:most]
    return {package: files[package] for package in largest}


def functions_of(source: str) -> Iterator[tuple[str, int]]:
    """Yield (text, first line) of each function and method of a file, as in `stdlib_functions`."""
    lines = source.splitlines(keepends=True)
    for function, _ in _definitions(source):
        text = _code_of(function, lines)
        if text.count("\n") >= MIN_LINES:
            yield text, function.lineno


def _definitions(source: str) -> Iterator[tuple[Function, str]]:
    """Yield each function and method of a file, with its class and a dot. Nested functions are left out."""
    body: list[tuple[ast.AST, str]] = [(statement, "") for statement in parse(source).body]
    # The list grows: bodies of classes and branches are appended.
    for statement, owner in body:
        if isinstance(statement, Function):
            yield statement, owner
        else:
            owner = f"{statement.name}." if isinstance(statement, ast.ClassDef) else owner
            for block in ("body", "handlers", "orelse", "finalbody"):
                body += [(inner, owner) for inner in getattr(statement, block, [])]


def _code_of(function: Function, lines: list[str]) -> str:
    """Return the dedented function without its docstring, or "" if it only has a docstring."""
    assert function.end_lineno is not None
    text = lines[function.lineno - 1 : function.end_lineno]
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        if len(function.body) == 1:
            return ""
        assert docstring.end_lineno is not None
        text = lines[function.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : function.end_lineno]
    return textwrap.dedent("".join(text)).rstrip() + "\n"


MIN_WORDS = 3
"""Fewest words of a sentence. Shorter ones ("Close.") say too little."""


def stdlib_summaries() -> "datasets.Dataset":
    """Return columns `anchor` (a sentence), `positive` (a signature), `package`, and `id`, in file order.

    A signature is a name with its class and its arguments: `Stack.push(item)`. Each text appears once in the whole
    library, so no text is in two packages. Takes about two seconds.
    """
    seen: set[str] = set()
    rows = []
    for package, files in largest_packages(None).items():
        for name, source in files:
            for sentence, signature, line in _documented(source):
                texts = {sentence, signature}
                if len(sentence.split()) >= MIN_WORDS and len(texts) == 2 and not texts & seen:
                    seen |= texts
                    rows.append((sentence, signature, package, f"{name}:{line}"))
    return data_set(("anchor", "positive", "package", "id"), rows)


def _documented(source: str) -> Iterator[tuple[str, str, int]]:
    """Yield (first sentence, signature, line) of each function and method of a file that has a docstring."""
    for function, owner in _definitions(source):
        paragraph = re.split(r"\n\s*\n", (ast.get_docstring(function) or "").strip())[0]
        sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split()))[0]
        given = function.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        listed = ", ".join(name for name in names if name not in ("self", "cls"))
        yield sentence, f"{owner}{function.name}({listed})", function.lineno


NUM_CHOICES = 4
BLANK = "_"

_NAME = re.compile(r"(?:async )?def (\w+)")
# The last two names are a twentieth of all functions, and the first line reveals them.
_LEFT_OUT = (BLANK, "__init__", "getregentry")
_SEED = 14


def stdlib_names() -> "datasets.Dataset":
    """Return columns `text`, `endings` (four names), `label` (index of the right name) and `id`, in file order.

    `text` is a function in which `_` replaces its name everywhere. The three wrong names are drawn from the whole
    library in proportion to their frequency, so a name alone carries no signal. Texts are distinct.
    """
    functions: dict[str, tuple[str, str]] = {}
    for _, text, where in library_functions(None):
        found = _NAME.match(text)
        if found and len(text) <= MAX_CHARACTERS and found[1] not in _LEFT_OUT:
            functions.setdefault(re.sub(rf"\b{found[1]}\b", BLANK, text), (found[1], where))
    names = [name for name, _ in functions.values()]
    generator = np.random.default_rng(_SEED)
    rows = []
    for text, (name, where) in functions.items():
        chosen = [name]
        while len(chosen) < NUM_CHOICES:
            other = names[int(generator.integers(len(names)))]
            if other not in chosen:
                chosen.append(other)
        order = generator.permutation(NUM_CHOICES).tolist()
        rows.append((text, [chosen[place] for place in order], order.index(0), where))
    return data_set(("text", "endings", "label", "id"), rows)


MAX_ASKED = 3000
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
    for text, where in evenly_spaced(every, MAX_ASKED):
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
    assert isinstance(function, Function)
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


MAX_TAGGED = 4000
"""Most functions of stdlib-tags, evenly spaced over the files."""
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

    functions = evenly_spaced(list(distinct_functions().items()), MAX_TAGGED)
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


_FIRST_SYLLABLE, _LAST_SYLLABLE = 0xAC00, 0xD7A3


def hangul_letters() -> "datasets.Dataset":
    """Return columns `source`, `target` and `id` (`U+AC01`) for all 11,172 syllables in Unicode order.

    The source is the Unicode name of a syllable in Latin letters (`ggwaelg`). The target lists the names of its two or
    three letters (`ssangkiyeok wae rieul-kiyeok`). The source does not mark letter boundaries; they follow from the
    other letters.
    """
    rows = []
    for syllable in map(chr, range(_FIRST_SYLLABLE, _LAST_SYLLABLE + 1)):
        letters = [unicodedata.name(part).split(" ", 2)[2] for part in unicodedata.normalize("NFD", syllable)]
        source = unicodedata.name(syllable).removeprefix("HANGUL SYLLABLE ")
        rows.append((source.lower(), " ".join(letters).lower(), f"U+{ord(syllable):04X}"))
    return data_set(("source", "target", "id"), rows)
