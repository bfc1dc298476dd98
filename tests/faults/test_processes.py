"""Preempted at any moment, by any signal, on one process or on all: the same step is saved everywhere, and nothing is
lost.
"""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import assert_same_bits_of_runs
from tests.support.processes import Forked, run_forked
from tests.support.runs import TINY_MODEL, done_steps, events, write_corpus, write_recipe_file

STEPS = 150
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SLOW: dict[str, dict[str, float]] = {
    "build": {"build": 3.0},
    "load": {"load": 3.0},
    "step": {"step": 0.05},
    "evaluate": {"evaluate": 0.5},
    "read": {"read": 0.3},
    "save": {"step": 0.01},
}
RUN: dict[str, Any] = {
    "task": "tests.support.tasks.process_faults:FaultTask",
    "model": {"config": {**TINY_MODEL, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}},
    "schedule": {"max_steps": STEPS},
    "batch": {"global_batch_size": 8, "per_device_eval_batch_size": 1},
    "evaluate": {"every_steps": 3, "max_samples": 8},
    "checkpoint": {"every_steps": 4, "keep": 2},
}


def start(folder: Path, started: list[Forked], name: str, seconds: dict[str, float]) -> Forked:
    recipe = write_recipe_file(folder, **RUN, output_dir=str(folder / name), options={"seconds": seconds})
    started.append(run_forked(["run", str(recipe)], 2, folder=folder / "processes"))
    return started[-1]


def wait_for(forked: Forked, moment: str, folder: Path, step: int) -> None:
    """Until the processes have met and prepare (the folder is locked), or a step after `step` is
    done; or all is over.
    """
    deadline = time.monotonic() + 300
    while None in forked.exit_codes() and time.monotonic() < deadline:
        if moment in ("build", "load") and (folder / ".lock.holder").exists():
            return
        if moment not in ("build", "load") and done_steps(folder) > step:
            return
        time.sleep(0.01)


def preempt(folder: Path, name: str, started: list[Forked], choose: random.Random) -> bool:
    """One sitting that is asked to stop at a random moment; whether it was, before it had finished."""
    run = folder / name
    moment = choose.choice(list(SLOW))
    before = done_steps(run)
    (run / ".lock.holder").unlink(missing_ok=True)
    forked = start(folder, started, name, SLOW[moment])
    wait_for(forked, moment, run, before)
    time.sleep(choose.uniform(0, 1.5))
    rank, number = choose.choice([0, 1, None]), choose.choice(SIGNALS)
    forked.kill(rank, number)
    begin = time.monotonic()
    codes = forked.wait(60)
    seconds = time.monotonic() - begin
    said = f"{moment}, {number.name} to {'all' if rank is None else f'rank {rank}'}: {codes} after {seconds:.1f} s"
    print(said, [event["message"] for event in events(run, "preempted")][-1:])
    if codes == [0, 0]:
        return False
    assert codes == [75, 75], f"{said}\n{forked.stderr(0)}\n{forked.stderr(1)}"
    assert seconds < 20, said
    if moment not in ("build", "load"):
        assert (run / "checkpoints" / f"step-{events(run, 'preempted')[-1]['step']:08d}").is_dir(), said
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    write_corpus(folder)
    assert start(folder, [], "whole", {}).wait() == [0, 0]
    return folder / "whole"


def preempt_until_done(folder: Path, started: list[Forked], whole: Path, times: int, seed: int) -> None:
    """Preempt a run so many times, let it finish, and hold it against one that nobody disturbed; where the machine is
    quick,
    and it has finished before, go on with another one."""
    write_corpus(folder)
    choose = random.Random(seed)
    num_preempted = num_runs = 0
    while num_preempted < times:
        num_runs += 1
        assert num_runs <= times, "most runs are over before they are preempted"
        name = f"preempted-{num_runs}"
        while num_preempted < times and preempt(folder, name, started, choose):
            num_preempted += 1
        assert start(folder, started, name, {}).wait() == [0, 0]
        assert_same_bits_of_runs(folder / name, whole, STEPS)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10, 15))
def test_preempted_ten_times_at_random_moments_the_run_loses_nothing(
    tmp_path: Path, started: list[Forked], whole: Path, seed: int
) -> None:
    preempt_until_done(tmp_path, started, whole, 10, seed)
