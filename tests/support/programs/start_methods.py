"""Train under a start method of data workers; print, for each case, whether other processes have read the samples.

Arguments: the start method, and the case: `guarded`, `unguarded` or `daemonic`.
"""

import multiprocessing
import os
import sys
import threading

import torch
from torch import nn
from torch.utils.data import Dataset

from accel_train import fit

method, case = sys.argv[1:]


class Rows(Dataset):
    """Samples that name the process that reads them."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((2,), float(index)), os.getpid()


def train(name, **more):
    readers = set()

    def loss(model, batch):
        readers.update(batch[1].tolist() if torch.is_grad_enabled() else ())
        return model(batch[0])[:, 0].square()

    model = nn.Linear(2, 1)
    model.lock = threading.Lock()  # cannot be pickled
    fit(
        model, Rows(), loss=loss, output_dir=name, max_steps=2, batch_size=4, data={"num_workers": 1},
        log={"progress": False}, **more,
    )  # fmt: skip
    print(f"read elsewhere: {name} {os.getpid() not in readers}", flush=True)


def all_cases():
    train("data and a lambda as loss")
    train("a lambda as collate", collate=lambda samples: torch.utils.data.default_collate(list(samples)))
    if case == "daemonic":
        return
    from accel_train import Trainer
    from tests.support.hf_models import Plain, arguments, plain_rows

    own = Plain()
    own.lock = threading.Lock()
    args = arguments("trainer", max_steps=1, dataloader_num_workers=1)
    Trainer(
        own, args, data_collator=lambda rows: torch.utils.data.default_collate(rows), train_dataset=plain_rows(16)
    ).train()


if case == "unguarded":
    if multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method(method)
    train("unguarded")
elif __name__ == "__main__":
    multiprocessing.set_start_method(method)
    if case == "daemonic":
        process = multiprocessing.get_context("fork").Process(target=all_cases, daemon=True)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    all_cases()
