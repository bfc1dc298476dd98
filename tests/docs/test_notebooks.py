"""The notebooks run from top to bottom, offline, as they are."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.runs import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "recipes" / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel client and what it imports
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_notebook_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "a notebook is kept without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}}).execute()


def test_there_are_the_notebooks_that_the_readme_names() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "image_classifier",
        "several_gpus",
        "text_classifier",
        "text_tasks",
        "tiny_gpt",
    ]
