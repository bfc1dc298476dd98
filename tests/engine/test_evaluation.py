"""An evaluation in which all processes forward alike ends on all of them at once, and no batch waits for a vote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accel_train.engine.evaluation import EvaluationReader
from accel_train.task import TaskData
from tests.support.processes import run_forked

BATCHES = 4
PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "evaluation_stop.py"


@pytest.mark.parametrize(
    ("stops", "forwards"), [(-1, BATCHES), (1, 2), (BATCHES - 1, BATCHES)], ids=["never", "second", "last"]
)
def test_a_vote_to_stop_is_read_after_the_next_batch_is_queued_and_ends_all_processes_alike(
    tmp_path: Path, stops: int, forwards: int
) -> None:
    forked = run_forked(["{rank}", str(stops)], 2, folder=tmp_path, program=PROGRAM)
    forked.expect(0)
    for rank in range(2):
        done, left = json.loads((tmp_path / f"rank-{rank}.out").read_text())
        assert (done.count("forward"), left) == (forwards, stops >= 0)
        # Each vote is read one batch later, so a forward is always queued in between.
        last = ["sent", "read"] if forwards < BATCHES else []
        batches = ["sent", "forward", *["sent", "read", "forward"] * (forwards - 1), *last]
        assert done[: len(batches)] == batches


@pytest.mark.parametrize(("total", "most"), [(103, 10), (103, 102), (12, 5), (7, 9), (4, None)])
def test_max_samples_of_an_evaluation_are_spread_evenly_over_the_data(total: int, most: int | None) -> None:
    samples: Any = list(range(total))
    data = TaskData(samples, samples, lambda some: {"x": torch.tensor(some), "num_targets": len(some)}, "")
    batches = EvaluationReader(Accelerator(cpu=True), data, 3, max_samples=most).batches()
    read = [index for batch, _ in batches for index in batch["x"].tolist()]
    assert len(read) == min(total, most or total)
    gaps = [later - earlier for earlier, later in zip(read, [*read[1:], total], strict=True)]
    assert read[0] == 0
    assert 1 <= min(gaps) <= max(gaps) <= min(gaps) + 1
