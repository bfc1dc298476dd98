"""A program that trains a module of its own: `fit_module.py OUTPUT_DIR STRATEGY`."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_train import fit


def main() -> None:
    output_dir, strategy = sys.argv[1:]
    torch.manual_seed(1)
    inputs = torch.randn(64, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    result = fit(
        model,
        TensorDataset(inputs, inputs.sum(dim=1)),
        loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(),
        output_dir=output_dir,
        max_steps=6,
        batch_size=8,
        learning_rate=0.05,
        parallel={"strategy": strategy},
        log={"every_steps": 1, "progress": False},
    )
    assert result.summary == {} or result.model.state_dict()["0.weight"].shape == (8, 4)


main()
