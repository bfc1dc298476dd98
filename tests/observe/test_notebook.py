"""In a Jupyter kernel progress is one output of the cell: a bar, and a row for each evaluation."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.wording import assert_golden

TRAINING = """
from accel_train.observe.progress import Progress

progress = Progress("auto", total_steps=100, initial_step=20)
progress.note("what was chosen")
progress.begin()
for step in range(21, 101):
    progress.advance(step)
    progress.show(step, loss=3 - step / 50, learning_rate=3e-4, tokens_per_second=12345.6)
    if step % 50 == 0:
        found = {"loss": 1.5, "bits_per_byte": 2.25, "seconds": 3.0, "num_targets": 7}
        progress.evaluated(step, "evaluation", found | ({"<b>": 0.5} if step == 100 else {}))
progress.note("saved")
progress.evaluated(100, "final evaluation", {"loss": 1.25})
progress.close()
progress.evaluated(100, "evaluation", {"loss": 1.0})
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel client and what it imports
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_notebook_shows_one_bar_and_a_table_of_evaluations_updated_in_place() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(TRAINING)])
    NotebookClient(notebook, timeout=300, coalesce_streams=True).execute()
    streams = [output for output in notebook.cells[0].outputs if output.output_type == "stream"]
    assert [stream.name for stream in streams] == ["stdout"]
    assert_golden(streams[0].text)
    (shown,) = [output for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    *table, bar = shown.data["text/plain"].splitlines()
    assert len({len(line) for line in table}) == 1
    assert [line.split() for line in table] == [
        ["step", "training", "loss", "evaluation", "loss", "bits", "per", "byte", "<b>"],
        ["50", "2.0000", "1.5000", "2.2500"],
        ["100", "1.0000", "1.5000", "2.2500", "0.5000"],
        ["100", "(last)", "1.0000", "1.2500"],
    ]
    assert bar.split(", ")[:4] == ["100%  100/100", "loss 1", "lr 3.0e-04", "12.3k tok/s"]
    html = shown.data["text/html"]
    assert html.startswith('<progress value="100" max="100"')
    assert html.count("<tr>") == 4
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
