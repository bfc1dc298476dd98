"""Print the size of the code in tokens by package, and its growth since a revision: `make size BEFORE=origin/main`.

A token is a name, a number, a string, or a sign. Comments, docstrings, and line breaks are free, so explaining costs
nothing and long lines save nothing.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("accel_train", "benchmarks", "tests")
_FREE = frozenset(
    (
        *(tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER),
        *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    )
)


def tokens_of(source: str) -> int:
    """Return the number of tokens of a module without its docstrings."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in _FREE and token.start[0] not in told for token in tokens)


def sizes(revision: str | None = None) -> Counter[str]:
    """Return the tokens of each package of accel_train, and of `benchmarks` and `tests`; at a revision, or as on disk.

    Files that git does not know are left out.
    """
    found: Counter[str] = Counter()
    listed = ["ls-files"] if revision is None else ["ls-tree", "-r", "--name-only", revision]
    for name in _git(*listed, "--", *FOLDERS).splitlines():
        if name.endswith(".py") and (revision is not None or (ROOT / name).exists()):
            source = (ROOT / name).read_text() if revision is None else _git("show", f"{revision}:{name}")
            found[package_of(name)] += tokens_of(source)
    return found


def package_of(name: str) -> str:
    """Return the package that a file counts for: `accel_train/tasks`, `tests`, and `accel_train` for its own files."""
    top, *rest = Path(name).parts
    return f"{top}/{rest[0]}" if top == "accel_train" and len(rest) > 1 else top


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="revision to compare with")
    base = parser.parse_args().base
    now, before = sizes(), sizes(base) if base else None
    whole = {"accel_train, whole": sum(count for name, count in now.items() if name.startswith("accel_train"))}
    old = sum(count for name, count in (before or {}).items() if name.startswith("accel_train"))
    for name, count in [*whole.items(), *now.most_common()]:
        since = "" if before is None else f"  {count - (old if name in whole else before[name]):+8,}"
        print(f"{count:9,}{since}  {name}")


if __name__ == "__main__":
    main()
