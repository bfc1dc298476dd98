"""A finished run for the tests that damage one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from accel_train import train
from tests.support.runs import tiny_recipe, write_corpus


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    sections: dict[str, Any] = {"schedule": {"max_steps": 4}, "checkpoint": {"every_steps": 2}}
    train(tiny_recipe(folder, task="causal-lm", **sections))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The run in a folder of its own."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))
