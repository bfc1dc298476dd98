"""The notebooks in the shape of transformers' own: with our Trainer they give what they give with transformers'."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from tests.support.hf_models import history
from tests.support.runs import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "notebooks" / "hf"
OUR_IMPORT = re.compile(r"^from accel_train(\.hf)? import ", re.MULTILINE)

RAGGED = {"causal_lm_fine_tuning", "masked_lm", "summarization", "token_classification", "translation"}
# Their batches have different numbers of targets, so transformers' mean of batch means depends on the batch size.
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def code_cells(name: str) -> list[str]:
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def run(name: str, replacement: str | None = None) -> dict[str, Any]:
    """Run the cells in one namespace, which is returned; with a replacement of what our classes are imported from."""
    names: dict[str, Any] = {}
    for source in code_cells(name):
        changed = source if replacement is None else OUR_IMPORT.sub(f"from {replacement} import ", source)
        exec(compile(changed, f"{name}.ipynb", "exec"), names)
    return names


def measured(names: dict[str, Any], name: str) -> list[dict[str, float]]:
    """The log and the metrics of the last evaluation and prediction, without clocks."""
    lines = [*history(names["trainer"]), names["metrics"], names["predicted"].metrics]
    left_out = ("eval_loss", "test_loss") if name in RAGGED else ()
    clocks = ("_runtime", "_per_second", "_preparation_time")
    return [{k: v for k, v in line.items() if k not in left_out and not k.endswith(clocks)} for line in lines]


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Models of 64 bits: Adam makes a step of the rounding in a gradient that is zero (a bias before a batch norm)."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cuda", "double_precision")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # transformers' on a CPU
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_gives_the_numbers_that_it_gives_with_the_trainer_of_transformers(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs, ours = run(name, "transformers"), run(name)
    for expected, found in zip(measured(theirs, name), measured(ours, name), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    expected, found = theirs["predicted"], ours["predicted"]
    torch.testing.assert_close(found.predictions, expected.predictions, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.label_ids, expected.label_ids, rtol=0, atol=0)
    if name in RAGGED:
        their_loss = theirs["metrics"]["eval_loss"]
        theirs["trainer"].args.per_device_eval_batch_size = 1000  # one batch: its mean is over all targets
        in_one_batch = theirs["trainer"].evaluate()["eval_loss"]
        assert ours["metrics"]["eval_loss"] == pytest.approx(in_one_batch, abs=1e-5)
        assert abs(their_loss - in_one_batch) > 1e-5


def test_a_notebook_differs_from_one_for_transformers_by_the_import_in_a_cell_of_its_own() -> None:
    assert len(NOTEBOOKS) == 11
    assert set(NOTEBOOKS) > RAGGED
    for name in NOTEBOOKS:
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        nbformat.validate(notebook)
        (source,) = (source for source in code_cells(name) if "accel_train" in source)
        assert OUR_IMPORT.match(source), name
        assert len(source.splitlines()) == 1, name
        assert 8 <= len(notebook.cells) <= 16, name
