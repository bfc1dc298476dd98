"""Each test runs in an empty folder, as if no launcher had started it."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
