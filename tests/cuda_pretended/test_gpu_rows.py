"""All rows of benchmarks/gpu.py run on a pretended GPU, so that on a real one no row fails for a fault of the program.

Not run: compilation, kernels, the profiler's trace, and the GPU tests, which are only collected.
Document masks are dense, because a CPU build of torch has no `varlen_attn`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import COLUMNS, OURS, PHASES, planned_rows
from benchmarks.gpu_loops import OTHER_WORK, SETTINGS
from tests.cuda_pretended.test_cuda_pretended import Driver
from tests.docs.test_benchmarks import parse_table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cuda")]
OF_ACCEL_TRAIN = {"planned_gib", "planned_ms"}
OF_BF16 = {"mfu", "mfu_of_matmul"}


@pytest.mark.timeout(1800)
def test_every_row_has_all_its_figures_and_the_table_shows_it(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.output_of("rows.py", str(tmp_path))
    saved = json.loads((tmp_path / "results" / "gpu.json").read_text())["rows"]
    rows: dict[str, dict[str, Any]] = {row["row"]: row for row in saved}
    problems = {name: row["problem"] for name, row in rows.items() if "problem" in row}
    assert problems == {}
    assert list(rows) == [row["row"] for row in planned_rows()]
    for name, row in rows.items():
        if "model" in row:
            expected = {field for field, _ in COLUMNS.values()}
            expected -= set() if row["variant"] == OURS else OF_ACCEL_TRAIN
            expected -= OF_BF16 if row["setting"] in OTHER_WORK else set()
            assert {field for field in expected if row.get(field) is None} == set(), name
            # The other loops may wait: the row says where.
            assert row["sync"] == "none" or row["variant"] != OURS, (name, row["sync"])
    assert {len(each["seconds"]) for each in rows["loss"]["losses"].values()} == {2}
    assert rows["llama-1.4B checkpoints accel_train eager"]["saved_gb_per_second"] > 0
    # A process without a GPU collects and skips all of them.
    assert rows["tests"]["tests"].endswith(" skipped")
    assert rows["tests"]["failed"] == []
    shown = parse_table((tmp_path / "results" / "gpu.md").read_text())
    trained = [row for row in saved if "model" in row]
    assert [(row["model"], row["variant"]) for row in shown] == [(row["model"], row["variant"]) for row in trained]


def test_a_checkpoint_is_saved_within_the_timed_steps() -> None:
    phases, every = PHASES["checkpoints"], SETTINGS["checkpoints"]["checkpoint"]["every_steps"]
    assert phases.warmup < every < phases.warmup + phases.timed
