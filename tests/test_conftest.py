"""No test finds what another one has left."""

import subprocess
import sys
from pathlib import Path

from tests.support.runs import environment

TWO_TESTS = """
import os

import pytest
from accelerate import Accelerator, PartialState

@pytest.fixture(scope="module", autouse=True)
def leaving():
    os.environ["OF_THE_MODULE"] = "left"

def test_first():
    os.environ.update(OF_A_TEST="left", CHANGED="left")
    del os.environ["DELETED"]
    Accelerator(cpu=True)

def test_second():
    seen = {name: os.environ.get(name) for name in ("OF_THE_MODULE", "OF_A_TEST", "CHANGED", "DELETED")}
    assert seen == {"OF_THE_MODULE": None, "OF_A_TEST": None, "CHANGED": "before", "DELETED": "before"}
    assert PartialState._shared_state == {}
"""


def test_next_test_finds_environment_and_device_as_before(tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(TWO_TESTS)
    words = ["-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:xdist", "-p", "no:cacheprovider", str(file)]
    variables = environment(CHANGED="before", DELETED="before")
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-4:-2]) == (0, ["2", "passed"]), done.stdout
