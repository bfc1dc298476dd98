"""Messages and pages whose wording matters, one file per command or part in tests/wording.

A test that is about facts asserts fields and numbers. A test that is about wording compares with a file here, so that a
sentence changes in one place. `UPDATE_WORDING=1 pytest -n0 ...` writes the files; read the diff before you commit.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "wording"
_HEAD = "== "


def assert_wording(part: str, case: str, text: str) -> None:
    """Assert that `text` is the wording of a case in tests/wording/PART.txt.

    Replace what varies (paths, times, versions) before the call.
    """
    file = FOLDER / f"{part}.txt"
    known = _read(file)
    if os.environ.get("UPDATE_WORDING"):
        known[case] = text.strip()
        FOLDER.mkdir(exist_ok=True)
        file.write_text("\n".join(f"{_HEAD}{name}\n{said}\n" for name, said in sorted(known.items())))
    assert text.strip() == known.get(case), f"the wording of {case!r} differs from {file}"


def _read(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    parts = f"\n{file.read_text()}".split(f"\n{_HEAD}")[1:]
    return {case: said.strip() for case, _, said in (part.partition("\n") for part in parts)}
