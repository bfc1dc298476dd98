"""What the tests of several files here share."""

from pathlib import Path

import pytest
import yaml

from tests.support.plan_recipe import GOOD


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good recipe and its data, in no launch."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    Path("r.yaml").write_text(yaml.safe_dump(GOOD, sort_keys=False))
    Path("text.txt").write_text("one two three " * 400)
    return tmp_path
