"""A process that dies, hangs or cannot stop takes the whole run with it, soon, and with a word on who and why."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accel_train.peers import Failure, Peers, Standing, behind
from accel_train.signals import StopRequest
from accel_train.watchdog import Watchdog
from forked import Forked, run_forked
from runs import environment, events, losses, write_recipe_file

TASK = "fault_task:FaultTask"


def start(folder: Path, started: list[Forked], processes: int = 2, **sections: Any) -> Forked:
    recipe = write_recipe_file(folder, task=TASK, **{"schedule": {"max_steps": 100_000}, **sections})
    started.append(run_forked(["run", str(recipe)], processes, folder=folder / "processes"))
    return started[-1]


def seconds_until_end(forked: Forked, folder: Path, after_step: int) -> float:
    """From the step after which something is to happen, to the end of the last process."""
    wait_for_step(forked, folder, after_step)
    begin = time.monotonic()
    forked.wait(60)
    return time.monotonic() - begin


def wait_for_step(forked: Forked, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "run" / "metrics.jsonl").exists() or max(losses(folder / "run"), default=0) < step:
        assert time.monotonic() < deadline, "no such step"
        assert None in forked.exit_codes() or max(losses(folder / "run"), default=0) >= step, forked.stderr(0)
        time.sleep(0.02)


def errors(forked: Forked) -> list[str]:
    """The lines for the user, of all processes."""
    lines = [line for rank in range(len(forked.pids)) for line in forked.stderr(rank).splitlines()]
    return [line for line in lines if line.startswith(("error: ", "preempted: "))]


ENDS_WHILE_THE_LOOP_FAILS = """
import os, threading, time
from pathlib import Path
from accel_train.signals import StopRequest
from accel_train.watchdog import Watchdog

class Slow(Watchdog):
    def speaks(self):
        has_begun.set()
        time.sleep(1)
        return True

has_begun = threading.Event()
watchdog = Slow(StopRequest(), Path("run"), 60.0, None)
threading.Thread(target=watchdog._end, args=(5, "rank 0 is gone"), daemon=True).start()
has_begun.wait()
watchdog.note_end(RuntimeError, RuntimeError("Connection closed by peer"), None)
os._exit(9)
"""


def test_a_loop_that_fails_while_the_watchdog_says_why_does_not_cut_it_short(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_THE_LOOP_FAILS],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (5, "error: rank 0 is gone\n")


@pytest.mark.parametrize(
    ("fault", "rank", "codes", "said"),
    [
        ("raise_at", 1, [5, 1], "rank 1 (process {pid} on {host}) failed first: KeyError: 'a layer that is not there'"),
        pytest.param(
            "raise_at",
            0,
            [1, 5],
            "rank 0 (process {pid} on {host}) failed first: KeyError: 'a layer that is not there'",
            marks=pytest.mark.faults,
        ),
        pytest.param(
            "kill_at", 1, [5, -9], "rank 1 (process {pid} on {host}) is gone without a word", marks=pytest.mark.faults
        ),
        ("kill_at", 0, [-9, 5], "rank 0 (process {pid} on {host}) is gone without a word"),
        pytest.param(
            "exit_at", 1, [5, 0], "rank 1 (process {pid} on {host}) is gone without a word", marks=pytest.mark.faults
        ),
    ],
)
def test_process_that_dies_ends_the_whole_run_within_10_seconds_and_is_named(
    corpus: Path, started: list[Forked], fault: str, rank: int, codes: list[int], said: str
) -> None:
    forked = start(corpus, started, options={fault: {"step": 4, "rank": rank}})
    assert seconds_until_end(forked, corpus, after_step=2) < 10
    assert forked.exit_codes() == codes
    assert len(errors(forked)) == 1, forked.stderr(0) + forked.stderr(1)
    [line] = errors(forked)
    assert line.startswith("error: " + said.format(pid=forked.pids[rank], host=socket.gethostname()))
    if rank != 0:
        assert [event["message"] for event in events(corpus / "run", "peer_failed")] == [line.removeprefix("error: ")]


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "place"), [("raise_in_load", "load_data"), ("raise_in_build", "build_model")])
def test_process_that_fails_while_the_run_is_prepared_is_named_as_well(
    corpus: Path, started: list[Forked], fault: str, place: str
) -> None:
    forked = start(corpus, started, options={fault: 1})
    begin = time.monotonic()
    codes = forked.wait()
    assert time.monotonic() - begin < 15
    assert codes == [5, 2 if place == "load_data" else 1]
    [line] = errors(forked)
    assert f"rank 1 (process {forked.pids[1]} on {socket.gethostname()}) failed first: " in line


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        pytest.param("sigstop_at", 1, "is stopped (SIGSTOP, or a debugger)", marks=pytest.mark.faults),
        pytest.param("sigstop_at", 0, "is stopped (SIGSTOP, or a debugger)", marks=pytest.mark.faults),
        ("spin_at", 1, "does not go on; it had done step 3, and was in tests/fault_task.py:"),
        pytest.param(
            "spin_at",
            0,
            "does not go on; it had done step 3, and was in tests/fault_task.py:",
            marks=pytest.mark.faults,
        ),
    ],
)
def test_process_that_hangs_is_named_with_its_stack_and_all_end_soon_after_the_timeout(
    corpus: Path, started: list[Forked], fault: str, rank: int, said: str
) -> None:
    guard = {"hang_timeout_seconds": 5}
    forked = start(corpus, started, options={fault: {"step": 4, "rank": rank}}, guard=guard)
    assert 4 < seconds_until_end(forked, corpus, after_step=2) < 15
    print(forked.stderr(0), forked.stderr(1))
    stopped = -9 if fault == "sigstop_at" else 5
    assert forked.exit_codes() == [stopped if each == rank else 5 for each in (0, 1)]
    [line] = errors(forked)
    assert line.startswith("error: no step for 5 s (guard.hang_timeout_seconds): ")
    assert f"rank {rank} (process {forked.pids[rank]} on {socket.gethostname()}) {said}" in line
    running = [each for each in (0, 1) if each != rank or fault == "spin_at"]
    for each in running:
        assert "in steps_in_order" in stacks(corpus, each)
    if fault == "spin_at":
        assert "in _spin" in stacks(corpus, rank)
    assert any("(most recent call first)" in forked.stderr(each) for each in running)


def stacks(folder: Path, rank: int) -> str:
    return (folder / "run" / f"stacks-rank-{rank}.txt").read_text()


def met(ranks: int) -> list[Peers]:
    """Processes that know of each other through one store; only the first one has said where it lives."""
    store = dist.HashStore()
    peers = [Peers(store, rank, ranks) for rank in range(ranks)]
    peers[0].introduce()
    peers[0].meet()
    return peers


@pytest.mark.parametrize(
    ("standings", "said"),
    [
        ({0: (5, 3, True), 1: (4, 3, False)}, {1: "gives no sign of life; when it last spoke, it had done step 3"}),
        ({0: (5, 3, True), 1: (5, 2, True)}, {1: "does not go on; it had done step 2, and was in a.py:1"}),
        ({0: (5, 3, True), 1: (5, 3, False)}, {1: "does not go on; it had done step 3, and was in a.py:1"}),
        ({0: (5, 3, True), 1: (5, 3, True)}, {}),
        ({0: (5, 3, False)}, {1: "gives no sign of life"}),
        ({}, {0: "does not answer; it holds the store of this run"}),
    ],
)
def test_whom_the_others_wait_for_is_who_is_silent_or_has_come_less_far_or_waits_for_nobody(
    standings: dict[int, tuple[int, int, bool]], said: dict[int, str]
) -> None:
    before = {rank: Standing(4, (step, 0), "a.py:1", waits) for rank, (_, step, waits) in standings.items()}
    after = {rank: Standing(beat, (step, 0), "a.py:1", waits) for rank, (beat, step, waits) in standings.items()}
    found = behind(met(2)[0], before, after)
    assert found.keys() == said.keys()
    assert all(found[rank].startswith(text) for rank, text in said.items())


def test_the_first_process_to_tell_of_a_failure_is_the_one_that_all_hear_of() -> None:
    first, second, third = met(3)
    assert first.failure() is None
    cause = Failure(1, "failed first: KeyError: 'x'")
    assert second.tell_failure(cause) == cause
    assert first.tell_failure(Failure(0, "failed first: something that followed")) == cause
    assert third.failure() == cause


def test_one_process_tells_the_user_and_no_other_does() -> None:
    assert [peers.claim_word() for peers in met(3)] == [True, False, False]


def test_no_thread_of_a_closed_watchdog_is_left_for_the_interpreter_to_end(tmp_path: Path) -> None:
    looks = threading.Event()

    def progress() -> tuple[int, int]:
        if threading.current_thread() is not threading.main_thread():
            looks.set()
            time.sleep(0.5)
        return (1, 0)

    before = set(threading.enumerate())
    with Watchdog(StopRequest(), tmp_path, 60.0, None) as watchdog:
        watchdog.watch_steps(progress, str)
        assert looks.wait(60)
    assert set(threading.enumerate()) <= before
