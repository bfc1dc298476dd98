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
