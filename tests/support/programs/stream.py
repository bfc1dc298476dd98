"""A program as a user writes it, on each of several processes: `stream.py FOLDER STREAM [STEP]` trains on a stream,
resumes if there is a checkpoint, and is killed after a step.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from datasets.distributed import split_dataset_by_node
from transformers import TrainerCallback

from accel_train.core.errors import SettingError
from tests.hf.test_streams import READS, STREAMS, run
from tests.support.hf_models import history
from tests.support.processes import end_group


class Killer(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, name: str, kill_at: int) -> None:
    """`folder/result.json` has the losses and weights, and the samples that the main process read."""
    data, world_size = STREAMS[name][0](), int(os.environ.get("WORLD_SIZE", "1"))
    is_split_refused = False
    resume = max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)
    given = {"per_device_train_batch_size": 4 // world_size, "callbacks": [Killer(kill_at)], "logging_steps": 1}
    trainer = run(folder, data, resume, **given)
    reads = READS["generator"]
    try:
        run(folder / "split", split_dataset_by_node(data, int(os.environ.get("RANK", "0")), world_size), max_steps=1)
    except SettingError:
        is_split_refused = True
    if trainer.is_world_process_zero():
        found = {
            "losses": [line["loss"] for line in history(trainer) if "loss" in line],
            "weights": [each for weights in trainer.model.parameters() for each in weights.flatten().tolist()],
            "reads": reads,
            "is_split_refused": is_split_refused,
        }
        (folder / "result.json").write_text(json.dumps(found))
    end_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
