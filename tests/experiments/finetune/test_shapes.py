"""`finetune` and the forms of data that people have: `benchmarks.shapes`."""

from pathlib import Path

import pytest

from benchmarks.shapes import SHAPES, Shape, read


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.write.__name__)
def test_a_form_of_data_is_read_right_or_refused_with_the_reason(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = read(shape)
    assert outcome.verdict == ("right" if shape.task else "refused"), outcome.shown
