"""The notebooks run from top to bottom, offline, and give the outputs that are stored in them."""

import copy
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.notebooks import FOLDER, REPOSITORY, differences, run_notebook

NOTEBOOKS = sorted(FOLDER.rglob("*.ipynb"))
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the kernel client and what it imports
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: str(path.relative_to(FOLDER).with_suffix("")))
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.mark.slow
def test_a_notebook_gives_the_outputs_that_are_stored_in_it(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    found = differences(stored, run_notebook(path))
    assert not found, "run `make notebooks`, and look at what changed:\n" + "\n".join(found)


def test_a_notebook_is_stored_with_outputs_and_without_traces_of_a_machine(path: Path) -> None:
    text, notebook = path.read_text(), nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any(cell.outputs for cell in code)
    assert len(text) < 150_000
    for trace in (str(Path.home()), str(REPOSITORY), "/home/", "/site-packages/", "Traceback", '"execution":'):
        assert trace not in text


def changed(notebook: Any, before: str, after: str) -> Any:
    """A copy in which a piece of the printed text is another one."""
    changed = copy.deepcopy(notebook)
    outputs = [output for cell in changed.cells for output in cell.get("outputs", ()) if "text" in output]
    assert any(before in output.text for output in outputs)
    for output in outputs:
        output.text = output.text.replace(before, after)
    return changed


def test_a_stale_output_is_found_and_rounding_is_not() -> None:
    cell = nbformat.v4.new_code_cell("train(recipe)")
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="accuracy   0.9412 on 360 digits\nstep 150: the end\n")
    ]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    assert differences(notebook, changed(notebook, "  0.9412", " 0.9371")) == []
    for before, after in (("0.9412", "0.7"), ("the end", "an end"), ("360", "300"), ("digits\n", "digits\nmore\n")):
        assert len(differences(notebook, changed(notebook, before, after))) == 1
    without = copy.deepcopy(notebook)
    without.cells[0].outputs = []
    assert len(differences(notebook, without)) == 1
    cell.metadata["tags"] = ["varies"]
    assert differences(notebook, changed(notebook, "the end", "an end")) == []


def test_there_are_the_notebooks_that_the_readme_names() -> None:
    assert [path.stem for path in NOTEBOOKS if path.parent == FOLDER] == [
        "any_module",
        "chats",
        "competition",
        "image_classifier",
        "several_gpus",
        "text_classifier",
        "text_tasks",
        "tiny_gpt",
    ]
