"""torchrun with the run's own exit code: the processes here are small scripts that end as they are told."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from accel_train.torchrun import exit_code_of, exit_code_when_stopped, stops_deferred
from tests.support.processes import free_port
from tests.support.runs import REPOSITORY, TESTS, environment

WORKER = """
import os, signal, sys, time
rank, attempt, folder = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], sys.argv[1]
open(f"{folder}/started", "a").write(f"{rank}:{attempt} ")
code = sys.argv[2].split("/")[int(attempt)].split(",")[int(rank)]
if code == "stop":
    def save(*_):
        time.sleep(1.0)
        open(f"{folder}/saved", "a").write(rank)
        os._exit(75)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, save)
    open(f"{folder}/ready", "a").write(rank)
    time.sleep(60)
if code == "follows":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while not os.path.exists(f"{folder}/saved"):
        time.sleep(0.01)
    time.sleep(float(sys.argv[3]))
    code = "75"
if code == "sleeps":
    time.sleep(60)
if code == "lost":
    while not os.path.exists(f"{folder}/ready"):
        time.sleep(0.01)
    code = "5"
if code == "smaller":
    from accel_train.runtime.launcher import allow_restart
    allow_restart("out of memory; a smaller micro-batch is remembered")
    code = "75"
if "BOTH_END" in os.environ:  # by themselves: when one has failed, torchrun ends the others
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    plan = sys.argv[2].replace("/", "_")
    open(f"{folder}/{plan}-{attempt}-{rank}", "w").close()
    while not os.path.exists(f"{folder}/{plan}-{attempt}-{1 - int(rank)}"):
        time.sleep(0.01)
if code.startswith("-"):
    os.kill(os.getpid(), -int(code))
time.sleep(0.2 if code == "0" else 0)
os._exit(int(code))
"""
DRIVER = """
import sys
from accel_train.torchrun import run
for codes in sys.argv[3:]:
    restarts = codes.count("/")
    flags = ["--standalone", "--nproc_per_node=2", f"--max_restarts={restarts}"]
    print("ended with", run([*flags, *sys.argv[1:3], codes]))
"""


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 75], 75),
        ([75, 2], 2),  # the one that was wrong first; torchrun ended the other
        ([5, 3], 3),
        ([5, 5, 4], 4),
        ([-15, 6], 6),
        ([5, -9], 5),
        ([75, -9], 5),
        ([-9], 5),
        ([5, 1], 1),
    ],
)
def test_code_that_says_most_about_why_is_that_of_the_job(codes: Sequence[int], code: int) -> None:
    assert exit_code_of(codes) == code
    assert exit_code_of(codes[::-1]) == code


@pytest.mark.parametrize(
    ("number", "codes", "code"),
    [
        (signal.SIGTERM, [75, 75], 75),
        (signal.SIGUSR1, [-9, 75], 75),  # killed while it saved: the checkpoint before is there to go on from
        (signal.SIGTERM, [5, 75], 75),
        (signal.SIGTERM, [0, 0], 0),
        (signal.SIGTERM, [3, 3], 3),
        (signal.SIGTERM, [6, 75], 6),
        (signal.SIGTERM, [], 75),
        (signal.SIGINT, [130, 130], 130),
        (signal.SIGINT, [75, 75], 130),
    ],
)
def test_job_that_was_asked_to_stop_says_run_it_again_unless_that_is_of_no_use(
    number: int, codes: Sequence[int], code: int
) -> None:
    assert exit_code_when_stopped(number, codes) == code


def test_restarts_are_for_what_they_can_mend_and_the_exit_code_is_the_runs_own(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "driver.py").write_text(DRIVER)
    plans = ["75,75", "smaller,smaller/0,0", "smaller,75/75,75/0,0", "-9,5/0,0", "2,2/0,0/0,0", "6,5/0,0/0,0", "0,0"]
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "worker.py"), str(tmp_path), *plans]
    repository = str(REPOSITORY)
    done = subprocess.run(
        command,
        env=environment(PYTHONPATH=repository, BOTH_END="1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("ended")] == [
        "ended with 75",
        "ended with 0",  # after a restart: 75 was out of memory, and no preemption
        "ended with 75",  # after a restart: preempted then
        "ended with 0",  # after a restart
        "ended with 2",  # without one
        "ended with 6",  # without one
        "ended with 0",
    ]
    started = (tmp_path / "started").read_text().split()
    assert [started.count(f"0:{attempt}") for attempt in range(3)] == [7, 3, 0]


def test_stop_signal_reaches_the_processes_once_and_they_may_take_their_time(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    torchrun = ["-m", "accel_train.torchrun", "--standalone", "--nproc_per_node=2", "--max_restarts=3"]
    launcher = psutil.Popen(
        [sys.executable, *torchrun, str(tmp_path / "worker.py"), str(tmp_path), "stop,stop"],
        env=environment(PYTHONPATH=str(REPOSITORY)),
    )
    try:
        wait_until(lambda: (tmp_path / "ready").exists() and len((tmp_path / "ready").read_text()) == 2)
        launcher.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        launcher.send_signal(signal.SIGTERM)  # again, from someone who is in a hurry, while they save
        assert launcher.wait(30) == 75
        assert sorted((tmp_path / "saved").read_text()) == ["0", "1"]
        assert (tmp_path / "started").read_text().split().count("0:0") == 1
        assert "0:1" not in (tmp_path / "started").read_text()
    finally:
        for process in (*launcher.children(recursive=True), launcher) if launcher.is_running() else ():
            process.kill()


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_stops_the_processes_unless_it_is_ignored(tmp_path: Path, nohup: bool) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    torchrun = [sys.executable, "-m", "accel_train.torchrun", "--standalone", "--nproc_per_node=2"]
    launcher = psutil.Popen(
        [*(["nohup"] if nohup else []), *torchrun, str(tmp_path / "worker.py"), str(tmp_path), "stop,stop"],
        env=environment(PYTHONPATH=str(REPOSITORY)),
    )
    try:
        wait_until(lambda: (tmp_path / "ready").exists() and len((tmp_path / "ready").read_text()) == 2)
        launcher.send_signal(signal.SIGHUP)
        if nohup:
            time.sleep(0.5)
            assert not (tmp_path / "saved").exists()
            launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(30) == 75
        assert sorted((tmp_path / "saved").read_text()) == ["0", "1"]
    finally:
        for process in (*launcher.children(recursive=True), launcher) if launcher.is_running() else ():
            process.kill()


def test_stop_signal_is_heard_while_a_restart_waits_for_a_machine_that_was_lost(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    torchrun = ["-m", "accel_train.torchrun", "--nnodes=2", "--nproc_per_node=1", "--max_restarts=3"]
    torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    here, lost = (
        psutil.Popen(
            [
                sys.executable,
                *torchrun,
                f"--rdzv_conf=is_host={is_host}",
                str(tmp_path / "worker.py"),
                str(tmp_path),
                f"{code},{code}/0,0",
            ],
            env=environment(PYTHONPATH=str(REPOSITORY)),
        )
        for code, is_host in (("lost", 1), ("sleeps", 0))
    )
    try:
        wait_until(lambda: (tmp_path / "started").exists() and len((tmp_path / "started").read_text().split()) == 2)
        (worker,) = here.children()
        for process in (*lost.children(recursive=True), lost):
            process.kill()
        lost.wait(10)
        (tmp_path / "ready").write_text("lost")
        worker.wait(30)
        time.sleep(1.0)
        here.send_signal(signal.SIGUSR1)
        assert here.wait(20) == 75
        assert sorted((tmp_path / "started").read_text().split()) == ["0:0", "1:0"]
    finally:
        for launcher in (here, lost):
            for process in (*launcher.children(recursive=True), launcher) if launcher.is_running() else ():
                process.kill()


@pytest.mark.parametrize(
    ("is_host", "seconds"),
    [pytest.param(0, 0.0, marks=pytest.mark.slow), (1, 0.0), pytest.param(1, 3.0, marks=pytest.mark.slow)],
    ids=["guest", "host", "host-that-is-gone-before-the-other-ends"],
)
def test_one_machine_is_asked_to_stop_and_all_end_with_75_however_many_restarts_are_left(
    tmp_path: Path, is_host: int, seconds: float
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    torchrun = ["-m", "accel_train.torchrun", "--nnodes=2", "--nproc_per_node=1", "--max_restarts=3"]
    torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    asked, other = (
        psutil.Popen(
            [
                sys.executable,
                *torchrun,
                f"--rdzv_conf=is_host={host}",
                str(tmp_path / "worker.py"),
                str(tmp_path),
                f"{code},{code}/0,0",
                str(seconds),
            ],
            env=environment(PYTHONPATH=str(REPOSITORY)),
        )
        for code, host in (("stop", is_host), ("follows", 1 - is_host))
    )
    try:
        wait_until(lambda: (tmp_path / "ready").exists() and len((tmp_path / "started").read_text().split()) == 2)
        asked.send_signal(signal.SIGTERM)
        assert asked.wait(20) == 75
        assert other.wait(20) == 75
        assert sorted((tmp_path / "started").read_text().split()) == ["0:0", "1:0"]
    finally:
        for launcher in (asked, other):
            for process in (*launcher.children(recursive=True), launcher) if launcher.is_running() else ():
                process.kill()


def test_signals_come_once_processes_are_stopped() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with stops_deferred():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            assert came == []
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_before_there_are_processes_says_run_it_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accel_train.torchrun", "--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1"]
    command += ["--master_port=1", "--nproc_per_node=1", str(tmp_path / "none.py")]
    launcher = psutil.Popen(command, env=environment(PYTHONPATH=str(REPOSITORY)))
    try:
        wait_until(lambda: catches(launcher.pid, signal.SIGUSR1))
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(10) == 75
    finally:
        if launcher.is_running():
            launcher.kill()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc(5))."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_scripts_whose_last_act_is_a_collective_end_in_good_order() -> None:
    """Without a pause at the interpreter's end one process in four is aborted here."""
    begun = []
    for _ in range(4):
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in ("0", "1"):
            variables = environment(**job, RANK=rank, LOCAL_RANK=rank, ACCELERATE_USE_CPU="true")
            program = [sys.executable, str(TESTS / "support/programs/exit.py")]
            begun.append(subprocess.Popen(program, env=variables, stderr=subprocess.PIPE, text=True))
    ended = [(process.communicate(timeout=300)[1], process.returncode) for process in begun]
    assert [code for _, code in ended] == [0] * 8, "\n".join(said for said, _ in ended)
