"""What the tests of several files here share."""

from pathlib import Path

import pytest
import yaml

from tests.support.plan_recipe import GOOD


@pytest.fixture(autouse=True)
def folder(empty_folder: Path) -> Path:
    """A folder with a good recipe and its data, in no launch."""
    Path("r.yaml").write_text(yaml.safe_dump(GOOD, sort_keys=False))
    Path("text.txt").write_text("one two three " * 400)
    return empty_folder
