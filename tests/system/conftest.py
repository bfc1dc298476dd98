"""The fixture of the reported cases."""

from pathlib import Path

import pytest


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> None:
    """Change to an empty folder, outside of a launch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_TRAIN_DEBUG", raising=False)
