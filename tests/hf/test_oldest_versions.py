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

SELECTED = [
    "test_training.py::test_weights_and_log_are_those_of_transformers",
    "test_training.py::test_evaluations_and_best_model_are_those_of_transformers",
    "test_training.py::test_a_resume_goes_on_as_if_it_had_not_stopped",
    "test_training.py::test_checkpoints_are_where_transformers_looks_for_them",
    "test_evaluation.py::test_the_evaluation_loop_is_called_as_in_run_qa_and_an_override_is_used",
    "test_evaluation.py::test_predictions_come_in_order_and_padded_as_in_transformers",
    "test_callbacks.py::test_callbacks_are_told_what_transformers_tells_them_in_its_order",
    "test_callbacks.py::test_callbacks_get_their_states_back_in_order_and_a_line_names_other_numbers",
    "test_training.py::test_everything_that_is_saved_can_be_loaded",
    "test_checkpoints.py::test_a_checkpoint_that_transformers_wrote_is_resumed_to_the_same_weights",
    "test_seq2seq.py::test_training_with_evaluations_that_generate_is_that_of_transformers",
    "test_surface.py",
]
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
    words = ["-m", "pytest", "-q", "-n0", "-pno:cacheprovider", "-mnot slow", f"--basetemp={tmp_path / 'inner'}"]
    names = [f"tests/hf/{name}" for name in SELECTED]
    done = subprocess.run(
        [sys.executable, *words, *names], env=environment, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
