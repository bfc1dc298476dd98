"""Golden files of what is printed: a heading and an indented text per case.

tests/cli/wording/NAME.txt has what the commands print, and wording.txt of each folder has what its tests hold with
`raises_golden` and `assert_golden`, by the test's name. `ACCEL_TRAIN_WRITE_WORDING=1 pytest -n 0 tests/cli` writes
those of a folder again. Read their diff before you commit it.
"""

import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WRITE = "ACCEL_TRAIN_WRITE_WORDING"
TMP_PATH = re.compile(
    rf"{re.escape(tempfile.gettempdir())}/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?"
    r"[^/\s:'\"]+(?:/inner/[^/\s:'\"]+)?"
)


def read_wording(name: str) -> dict[str, str]:
    """Return the texts of the golden file of a command, or of a folder of tests (FOLDER/wording), by heading."""
    path = _path(name)
    cases: dict[str, list[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if line and not line.startswith(" "):
            cases[line] = []
        elif cases:
            cases[list(cases)[-1]].append(line.removeprefix("    "))
    return {heading: "\n".join(lines).strip("\n") for heading, lines in cases.items()}


def _path(name: str) -> Path:
    return TESTS / (f"{name}.txt" if "/" in name else f"cli/wording/{name}.txt")


@contextmanager
def raises_golden(*errors: type[BaseException], case: str = "") -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error (a ValueError, if none is named) with the whole text that the golden file of this test has."""
    with pytest.raises(errors or ValueError) as caught:
        yield caught
    assert_golden(str(caught.value), case)


def assert_golden(text: str, case: str = "") -> None:
    """Compare a text with the one that wording.txt, next to this test, has. `case` tells several of one test apart."""
    file, _, test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].partition("::")
    folder = (TESTS.parent / file).parent.relative_to(TESTS)
    assert_wording(f"{folder}/wording", " ".join(filter(None, (f"{Path(file).name}::{test}", case))), text)


def assert_wording(name: str, heading: str, text: str) -> None:
    """Compare a text with the case of a golden file. Paths of the test and other libraries' reasons are left out."""
    text = text.replace(f"{Path.cwd()}/", "").replace(str(Path.cwd()), "FOLDER")
    text = TMP_PATH.sub("FOLDER", text)
    text = re.sub(r"(cannot load it|cannot be loaded|of the hub): .*", r"\1: REASON", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n")
    cases = read_wording(name)
    if os.environ.get(WRITE):
        cases[heading] = text
        parts = (f"{key}\n{textwrap.indent(case, '    ')}\n" for key, case in cases.items())
        _path(name).write_text("\n".join(parts))
    assert text == cases.get(heading), f"{heading!r} in {name}.txt; {WRITE}=1 writes the new wording"


def assert_generated(page: Path, source: str, text: str) -> None:
    """Compare the part of a page that is generated from `source` with its text, between empty lines."""
    part = re.compile(rf"(<!-- generated from {source}: [^\n]* -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    wanted = f"\n{text}\n\n"
    if os.environ.get(WRITE):
        page.write_text(part.sub(lambda found: found[1] + wanted + found[3], page.read_text()))
    assert [found[2] for found in part.finditer(page.read_text())] == [wanted], f"{WRITE}=1 writes it anew"
