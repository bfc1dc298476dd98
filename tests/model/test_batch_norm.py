"""Buffers that a forward in training changes, also those of no batch norm."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accel_train.model.batch_norm import RunningStatistics
from tests.support.processes import run_forked


class Averaging(nn.Module):
    """Averages its input in a buffer, written in one of the usual ways, beside buffers that stay as they are."""

    mean: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("limit", torch.full((2,), math.inf))
        self.register_buffer("mask", torch.ones(1, dtype=torch.bool).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        average = self.mean.lerp(x.detach().mean(0), 0.5)
        if self.way == "in place":
            self.mean.copy_(average)
        elif self.way == "data":
            self.mean.data.copy_(average)
        else:
            self.mean = average
        return x - self.mean


@pytest.mark.parametrize("way", ["in place", "data", "anew"])
@pytest.mark.parametrize("bad_step", [0, 1])
def test_any_buffer_that_the_first_step_changes_is_as_before_after_a_skipped_one(way: str, bad_step: int) -> None:
    module = Averaging(way)
    statistics = RunningStatistics(module)
    for step in range(3):
        statistics.keep()
        module(torch.full((4, 2), math.nan if step == bad_step else 1.0))
        statistics.put_back(torch.tensor(float(step == bad_step)))
    assert module.mean.tolist() == [0.75, 0.75], "two good steps"
    assert module.limit.isinf().all()


def test_processes_begin_a_step_with_such_buffers_of_process_0(tmp_path: Path) -> None:
    program = Path(__file__).parent.parent / "support/programs/shared_buffers.py"
    forked = run_forked([], 2, folder=tmp_path, program=program)
    forked.expect(0)
    for rank in range(2):
        assert json.loads((tmp_path / f"rank-{rank}.out").read_text()) == [[0, 0], [0.5, 0.5], [0.75, 0.75]]
