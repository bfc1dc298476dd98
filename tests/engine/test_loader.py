"""Data workers: how many there are, and that they answer to the process that trains, and to nobody else."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from accel_train.core.errors import DataError, DataWorkerGone, ExitedEarly, SettingError
from accel_train.core.hardware import usable_cores
from accel_train.engine.loader import (
    Reading,
    _from_workers,
    _ignore_stop_signals,
    _InWorker,
    choose_num_workers,
    read_batches,
    why_no_workers,
)
from accel_train.recipe.loader import Recipe
from accel_train.runtime.exit import exit_code, message_of
from accel_train.task import TaskData, load_task
from tests.support.every_task import CASES, recipe_of
from tests.support.marks import slow
from tests.support.runs import TESTS, environment


def work(ready: Event) -> None:
    _ignore_stop_signals(0, stays=True)
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize("method", ["fork", slow("spawn"), "forkserver"])
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


STOPPED = """
import os, signal, sys
import torch
from accel_train.engine.loader import Reading, read_batches

def collate(samples):
    return {"pid": torch.tensor(os.getpid()), "num_targets": 1}

batches = read_batches(range(9), collate, iter([[0], [1]]), torch.device("cpu"), Reading(num_workers=1))
batch, _ = next(batches)
os.kill(int(batch["pid"]), signal.SIGSTOP)
print(int(batch["pid"]), flush=True)
if sys.argv[1] == "killed":
    os._exit(5)  # as the watchdog ends a process
batches.close()
sys.exit(5)
"""


@pytest.mark.parametrize("end", ["killed", slow("normal")])
def test_a_stopped_worker_ends_with_its_training_process(end: str, tmp_path: Path) -> None:
    # A worker that stays would keep a pipe open.
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run([sys.executable, "-c", STOPPED, end], env=environment(), stdout=out, timeout=120)
    assert done.returncode == 5
    pid = int((tmp_path / "out").read_text())
    status = Path(f"/proc/{pid}/stat")
    for _ in range(50):
        # Z: it has ended, and its new parent has not asked for its exit code yet.
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its training process")


PROGRAM = TESTS / "support/programs/start_methods.py"


@pytest.mark.parametrize(
    ("method", "case"),
    [
        ("spawn", "guarded"),
        slow("spawn", "unguarded"),
        slow("forkserver", "guarded"),
        slow("forkserver", "unguarded"),
        slow("fork", "daemonic"),
    ],
)
def test_workers_get_the_data_and_the_collate_alone_or_the_training_process_reads(
    method: str, case: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(PROGRAM), method, case]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    read = dict(line.removeprefix("read elsewhere: ").rsplit(" ", 1) for line in lines if line.startswith("read else"))
    said = [line for line in lines if line.startswith("reading ")]
    if case == "guarded":
        assert read == {"data and a lambda as loss": "True", "a lambda as collate": "False"}
        assert len(said) == 2
        assert all("pickle collate" in line for line in said)
    else:
        assert set(read.values()) == {"False"}
        assert all({"unguarded": "__main__", "daemonic": "daemonic"}[case] in line for line in said)
    assert len(said) == (1 if case == "unguarded" else 2)


@pytest.mark.parametrize("case", CASES)
def test_processes_that_are_not_forked_can_read_the_data_of_every_task(case: str, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(recipe_of(case, tmp_path))
    data = load_task(recipe.task).load_data(recipe, progress=False)
    assert why_no_workers(data, "forkserver") == ""
    assert "collate" in why_no_workers(replace(data, collate=lambda samples: {}), "forkserver")


def test_what_a_notebook_defines_cannot_be_read_in_a_started_process(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def collate(samples: Sequence[Any]) -> dict[str, Any]:
        return {}

    collate.__module__ = "__main__"
    data = TaskData([1], None, collate, "")  # type: ignore[arg-type]
    assert "notebook" in why_no_workers(data, "spawn")
    assert why_no_workers(data, "fork") == ""


def test_sys_exit_in_a_worker_reaches_the_training_as_the_error_itself() -> None:
    def leave(samples: Sequence[Any]) -> dict[str, Any]:
        sys.exit(3)

    found = _InWorker([0], leave).__getitems__([0])  # type: ignore[arg-type]
    assert isinstance(found, ExitedEarly)
    with pytest.raises(ExitedEarly) as caught:
        list(_from_workers(iter([found])))  # type: ignore[arg-type]
    assert caught.value is found


_DAMAGED = "images/3.png: cut off"


class _Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise DataError(_DAMAGED)


def _read(num_workers: int) -> None:
    reading = Reading(num_workers, timeout_seconds=60 if num_workers else 0)
    list(read_batches(_Broken(), len, iter([[0], [1]]), torch.device("cpu"), reading))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_sample_is_the_same_line_with_and_without_workers(num_workers: int) -> None:
    with pytest.raises(DataError) as caught:
        _read(num_workers)
    assert str(caught.value) == _DAMAGED
    assert exit_code(caught.value) == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        RuntimeError("received 0 items of ancdata"),
        RuntimeError("unable to open shared memory object </torch_1>: Too many open files (24)"),
    ],
)
def test_too_few_file_handles_are_a_line_that_names_the_setting(error: Exception) -> None:
    def start() -> Iterator[Any]:
        raise error
        yield

    with pytest.raises(SettingError) as caught:
        list(_from_workers(start()))  # type: ignore[arg-type]
    assert caught.value.settings == ("data.num_workers",)


def test_a_worker_that_hangs_up_has_its_exit_code_whatever_the_words() -> None:
    def hang_up() -> Iterator[Any]:
        raise ConnectionResetError
        yield

    with pytest.raises(DataWorkerGone):
        list(_from_workers(hang_up()))  # type: ignore[arg-type]
    assert exit_code(DataWorkerGone("any words")) == 5
    assert "data.num_workers" in message_of(DataWorkerGone("any words"))


@pytest.mark.parametrize(("machines", "workers"), [(1, 4), (8, 4), (64, 4)])
def test_cores_are_shared_by_the_processes_of_the_same_machine_alone(
    machines: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    data = TaskData([], None, lambda samples: {}, "none")  # type: ignore[arg-type]
    choice = choose_num_workers("auto", data, 8 * machines)
    assert choice.value == workers
    assert " 8 training processes" in choice.reason


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"pods/a": "max 100000"}, 8),
        ({"pods/a": "300000 100000"}, 3),
        ({"pods/a": "max 100000", "pods": "250000 100000"}, 2),  # the group above limits all in it
        ({"": "50000 100000"}, 1),  # half a core
        ({"pods/a": "9900000 100000"}, 8),
    ],
)
def test_cpu_quota_of_a_container_counts_as_its_cores(
    limits: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    (tmp_path / "cgroup").write_text("1:cpu:/elsewhere\n0::/pods/a\n")
    for group, text in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(text + "\n")
    choice = usable_cores(tmp_path / "cgroup", tmp_path)
    assert choice.value == cores
    assert ("cpu.max" in choice.reason) is (cores < 8)
