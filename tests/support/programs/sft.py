"""A program as a user writes it, on each of several processes: `sft.py FOLDER stock|ours SETUP`."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import trl

from accel_train import SFTTrainer
from tests.support.sft import SPREAD, losses, made


def main(folder: Path, kind: str, setup: str) -> None:
    """`folder/result.json` has the losses."""
    datasets.disable_progress_bars()
    data, given = SPREAD[setup]
    chosen: Any = {"stock": trl.SFTTrainer, "ours": SFTTrainer}[kind]
    trainer = made(chosen, folder / "run", data, **given)
    trainer.train()
    if trainer.is_world_process_zero():
        (folder / "result.json").write_text(json.dumps({"losses": losses(trainer)}))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
