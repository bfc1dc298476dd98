"""With the oldest transformers and Accelerate that are supported the Trainer does what it does with the newest: a part
of the tests.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY

OLDEST = REPOSITORY / ".venv" / "oldest"
"""What `make .venv/oldest` installs, to be laid over the environment."""

NAMES = ("training", "overrides", "evaluation", "callbacks", "checkpoints", "seq2seq")
FILES = [f"tests/hf/test_{name}.py" for name in NAMES]
SELECTED = (
    "weights_and_log or best_weights or resume_goes_on or checkpoints_are_where or as_in_run_qa or come_in_order "
    "or callbacks_are_told or get_their_states_back or saved_can_be_loaded or transformers_wrote_is_resumed "
    "or evaluations_that_generate or test_overrides"
)
"""`make test-oldest` runs all of tests/hf."""


def floor(package: str) -> str:
    """The oldest version that pyproject.toml allows."""
    found = re.search(rf'"{package}>=([\d.]+)', (REPOSITORY / "pyproject.toml").read_text())
    assert found
    return found[1]


@pytest.mark.slow
@pytest.mark.skipif(
    not OLDEST.is_dir(), reason="`make .venv/oldest` installs the oldest versions; `make test-slow` does"
)
def test_the_trainer_holds_its_promises_with_the_oldest_versions_that_are_declared(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(OLDEST), str(REPOSITORY)])
    versions = "import accelerate, transformers; print(accelerate.__version__, transformers.__version__)"
    found = subprocess.run(
        [sys.executable, "-c", versions], env=environment, capture_output=True, text=True, check=True
    )
    for version, package in zip(found.stdout.split(), ("accelerate", "transformers"), strict=True):
        assert version.split(".")[:2] == floor(package).split(".")[:2], f"{OLDEST} has {package} {version}"
    words = [
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-pno:cacheprovider",
        "-mnot slow",
        "-k",
        SELECTED,
        f"--basetemp={tmp_path / 'inner'}",
    ]
    done = subprocess.run(
        [sys.executable, *words, *FILES], env=environment, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
