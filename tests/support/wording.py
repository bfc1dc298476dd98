"""Golden files of what the commands print: tests/cli/wording/NAME.txt, with a heading and an indented text per case.

`ACCEL_TRAIN_WRITE_WORDING=1 pytest -n 0 tests/cli` writes them again. Read their diff before you commit it.
"""

import os
import re
import textwrap
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "cli" / "wording"
WRITE = "ACCEL_TRAIN_WRITE_WORDING"


def read_wording(name: str) -> dict[str, str]:
    """Return the texts of a golden file by heading."""
    path = FOLDER / f"{name}.txt"
    cases: dict[str, list[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if line and not line.startswith(" "):
            cases[line] = []
        elif cases:
            cases[list(cases)[-1]].append(line.removeprefix("    "))
    return {heading: "\n".join(lines).strip("\n") for heading, lines in cases.items()}


def assert_wording(name: str, heading: str, text: str) -> None:
    """Compare a text with the case of a golden file. Paths of the test and other libraries' reasons are left out."""
    text = text.replace(f"{Path.cwd()}/", "").replace(str(Path.cwd()), "FOLDER")
    text = re.sub(r"(cannot load it|cannot be loaded|of the hub): .*", r"\1: REASON", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n")
    cases = read_wording(name)
    if os.environ.get(WRITE):
        cases[heading] = text
        parts = (f"{key}\n{textwrap.indent(case, '    ')}\n" for key, case in cases.items())
        (FOLDER / f"{name}.txt").write_text("\n".join(parts))
    assert text == cases.get(heading), f"{heading!r} in {name}.txt; {WRITE}=1 writes the new wording"


def assert_generated(page: Path, source: str, text: str) -> None:
    """Compare the part of a page that is generated from `source` with its text, between empty lines."""
    part = re.compile(rf"(<!-- generated from {source}: [^\n]* -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    wanted = f"\n{text}\n\n"
    if os.environ.get(WRITE):
        page.write_text(part.sub(lambda found: found[1] + wanted + found[3], page.read_text()))
    assert [found[2] for found in part.finditer(page.read_text())] == [wanted], f"{WRITE}=1 writes it anew"
