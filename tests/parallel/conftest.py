"""What the tests of several files here share."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import Train
from tests.support.processes import run_forked
from tests.support.runs import write_corpus, write_recipe_file


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train in a folder of its own, on so many processes, to the end; returns the run folder."""

    def to_the_end(name: str, processes: int, **sections: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        write_corpus(folder)
        recipe = write_recipe_file(folder, **sections)
        forked = run_forked(["run", str(recipe)], processes, folder=folder / "processes")
        assert forked.wait() == [0] * processes, forked.stderr(0)
        return folder / "run"

    return to_the_end
