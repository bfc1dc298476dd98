"""A finished run for the tests of commands on runs."""

from pathlib import Path

import pytest

from tests.cli.test_main import GOOD
from tests.support.commands import call
from tests.support.runs import write_yaml


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with r.yaml, text.txt, and `out`, which is a finished run of r.yaml."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_yaml("r.yaml", {**GOOD, "data": {**GOOD["data"], "eval_fraction": 0.2}})
        Path("text.txt").write_text("one two three " * 40)
        call("run", "r.yaml")
    return folder
