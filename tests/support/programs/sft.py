"""A program as a user writes it, on each of several processes: `sft.py FOLDER stock|ours|killed|dies SETUP`."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import datasets
import trl
from transformers import TrainerCallback

from accel_train import SFTTrainer
from tests.support.processes import end_group
from tests.support.sft import RESUMED, SPREAD, losses, made, scores


class Killer(TrainerCallback):
    """Kills the process after step 8."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 8:
            os.kill(os.getpid(), signal.SIGKILL)


def dies(row: dict[str, Any]) -> str:
    """Kills the main process while it formats rows."""
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return "red"


def main(folder: Path, kind: str, setup: str) -> None:
    """`folder/result.json` has the losses and metrics."""
    datasets.disable_progress_bars()
    chosen: Any = {"stock": trl.SFTTrainer}.get(kind, SFTTrainer)
    data, given = ("chat", {"formatting_func": dies}) if kind == "dies" else {**SPREAD, **RESUMED}[setup]
    trainer = made(chosen, folder / "run", data, **given, callbacks=[Killer()] if kind == "killed" else None)
    trainer.train()
    if trainer.is_world_process_zero():
        (folder / "result.json").write_text(json.dumps({"losses": losses(trainer), "scores": scores(trainer)}))
    if kind == "stock":
        # Its DDP stays as it is until it is freed.
        del trainer
    end_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
