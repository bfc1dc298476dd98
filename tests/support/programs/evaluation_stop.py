"""An evaluation whose processes forward alike: `evaluation_stop.py RANK STOPS`, where process 0 is asked to stop before
batch STOPS (-1: never).

Prints, a line of JSON: what the evaluation did in order, and whether it ended early.
"""

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.engine.evaluation import EvaluationLeft, EvaluationReader, evaluate
from accel_train.task import TaskData


class Counts(nn.Module):
    def forward(self, batch: Any, what: str) -> dict[str, Tensor]:
        done.append("forward")
        return {"loss_sum": torch.ones(())}


rank, stops = map(int, sys.argv[1:])
done: list[str] = []
accelerator, is_true = Accelerator(cpu=True), Tensor.__bool__
reduce = accelerator.reduce


def reduced(tensor: Tensor) -> Any:
    done.append("sent")
    return reduce(tensor)


def read(tensor: Tensor) -> bool:
    done.append("read")
    return is_true(tensor)


def is_over() -> bool:
    return rank == 0 and done.count("forward") == stops


accelerator.reduce = reduced  # type: ignore[method-assign, assignment]
Tensor.__bool__ = read  # type: ignore[method-assign]
samples: Any = [0.0] * 8
data = TaskData(samples, samples, lambda some: {"x": torch.tensor(some), "num_targets": len(some)}, "")
reader, left = EvaluationReader(accelerator, data, 1, forwards_alike=True), False
try:
    evaluate(reader, Counts(), is_over=is_over)
except EvaluationLeft:
    left = True
print(json.dumps([done, left]))
accelerator.end_training()
