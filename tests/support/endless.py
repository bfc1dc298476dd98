"""A run of a task with faults that goes on until a test ends it."""

import time
from pathlib import Path
from typing import Any

from tests.support.processes import Forked, run_forked
from tests.support.runs import wait_for_step, write_recipe_file

TASK = "tests.support.tasks.process_faults:FaultTask"
ENDLESS = {"schedule": {"max_steps": 100_000}}


def start(folder: Path, started: list[Forked], processes: int = 1, **sections: Any) -> Forked:
    recipe = write_recipe_file(folder, task=TASK, **{**ENDLESS, **sections})
    started.append(run_forked(["run", str(recipe)], processes, folder=folder / f"processes-{len(started)}"))
    return started[-1]


def wait_for(forked: Forked, folder: Path, step: int = 1) -> None:
    """Wait until the run in `folder` has logged a step."""
    wait_for_step(folder / "run", step, lambda: None in forked.exit_codes(), lambda: forked.stderr(0))


def seconds_to_end(forked: Forked) -> float:
    begin = time.monotonic()
    forked.wait(60)
    return time.monotonic() - begin
