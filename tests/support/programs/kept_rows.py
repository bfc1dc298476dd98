"""`accel-train` that keeps rows of any size. A line in BUILDS names each saved entry. With DIES, it is killed there."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from accel_train.cli.main import main
from accel_train.data.text import kept, rows_cache

SAVE = kept._save


def save(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    with open(os.environ["BUILDS"], "a") as file:
        file.write(f"{folder.name}\n")
    rest = SAVE(folder, values)
    if "DIES" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return rest


if __name__ == "__main__":
    rows_cache.LEAST_BYTES = 0
    kept._save = save
    raise SystemExit(main(sys.argv[1:]))
