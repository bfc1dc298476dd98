"""Python's standard library as offline data.

`python-stdlib`, `stdlib-docstrings`, `stdlib-functions`; `stdlib-summaries`: functions with the first sentence of their
docstrings; `stdlib-names`: functions with the name blanked and four names to choose from.
"""

import ast
import re
import sysconfig
import textwrap
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
