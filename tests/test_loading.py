"""Data workers answer to the process that trains, and to nobody else."""

import multiprocessing
import subprocess
import time
from multiprocessing.synchronize import Event

import pytest

from accel_train.loading import _listen_to_parent_alone


def work(ready: Event) -> None:
    _listen_to_parent_alone(0, stays=True)
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_ends_when_its_training_process_asks_and_at_no_other_signal(method: str) -> None:
    context = multiprocessing.get_context(method)
    ready = context.Event()
    worker = context.Process(target=work, args=(ready,))  # type: ignore[attr-defined]
    worker.start()
    try:
        assert ready.wait(60)
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # as a scheduler does
        worker.join(0.5)
        assert worker.is_alive()
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == 0
    finally:
        worker.kill()
