"""`one_visible_gpu.py WORDS`: `accel-train WORDS` where no process has the GPU of its LOCAL_RANK.

torch then fails in a barrier that names this GPU (`srun --gpus-per-task=1`).
"""

import sys
from typing import Any

import torch.distributed as dist

from accel_train.cli.main import main


def refuse(*_: Any, device_ids: Any = None) -> None:
    raise RuntimeError(f"CUDA error: invalid device ordinal {device_ids}")


if __name__ == "__main__":
    dist.barrier = refuse  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
