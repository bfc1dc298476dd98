"""`finetune` and the forms of data that people have: `benchmarks.shapes`."""

from pathlib import Path

import pytest

from accel_train.data.sources import resolve_sources
from accel_train.data.tables import read_rows
from accel_train.experiments.finetune.start import write_recipe
from benchmarks import shapes
from benchmarks.shapes import SHAPES, Shape, read


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.write.__name__)
def test_a_form_of_data_is_read_right_or_refused_with_the_reason(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = read(shape)
    assert outcome.verdict == ("right" if shape.task else "refused"), outcome.shown


def test_a_file_for_each_class_is_read_line_by_line_where_the_task_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shapes.files_of_classes()
    written = write_recipe("names", ["--data.num_workers", "0"], task="text-classification")
    assert (written.recipe.data.lines, written.recipe.data.train) == ("file_names", "names")
    (source,) = resolve_sources("names", written.recipe.data, key="data.train")
    rows = [(row.cells, row.where) for row in read_rows(source, ("label", "text"), written.recipe.data)]
    lines = {path.stem: path.read_text().split("\n")[:-1] for path in sorted(Path("names").glob("*.txt"))}
    assert rows == [
        ((name, text), f"names/{name}.txt:{number}")
        for name, texts in lines.items()
        for number, text in enumerate(texts, start=1)
    ]
    assert written.found.counts == {name: len(texts) for name, texts in lines.items()}
