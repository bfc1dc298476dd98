"""A program whose second process alone asks, and that writes what each process has seen: `fit_callbacks.py FOLDER`."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_train import Callback, fit
from tests.support.processes import end_group

RANK = int(os.environ.get("RANK", "0"))
"""Without a launcher, the process is both: the main one, and the one that asks."""
ASKS = int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK


class Seen(Callback):
    """What a process sees, and a request to evaluate at step 3."""

    def on_start(self, run):
        self.seen = [("start", run.first_step, run.max_steps)]
        self.is_main = run.is_main

    def on_step(self, step):
        self.seen.append(("step", step.step, step.loss))

    def ask(self, step, requests):
        requests.evaluate |= ASKS and step.step == 3

    def on_end(self, summary):
        self.seen.append(("end", self.is_main, bool(summary)))


class StopAtFirst(Callback):
    """A stop at the first evaluation."""

    def on_evaluation(self, step, metrics, requests):
        requests.stop |= ASKS


def main() -> None:
    folder = Path(sys.argv[1])
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data, seen = TensorDataset(inputs, inputs.sum(dim=1)), Seen()
    torch.manual_seed(1)
    fit(
        nn.Linear(4, 1),
        data,
        loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(),
        eval_data=data,
        output_dir=folder / "run",
        max_steps=9,
        batch_size=8,
        learning_rate=0.05,
        evaluate={"every_steps": 0},
        log={"every_steps": 1, "progress": False},
        callbacks=[seen, StopAtFirst()],
    )
    (folder / f"seen-{RANK}.json").write_text(json.dumps(seen.seen))
    end_group()


main()
