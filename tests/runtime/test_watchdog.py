"""A process that dies, hangs or cannot stop ends the whole run soon; each process prints which rank it was, and why."""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from accel_train.core.json_io import read_json
from accel_train.runtime.heartbeat import Failure, HeartbeatStore, ProcessStatus, find_hung, lost_peer
from accel_train.runtime.signals import StopRequest
from accel_train.runtime.watchdog import Watchdog
from tests.support.endless import seconds_to_end, start, wait_for
from tests.support.marks import faults
from tests.support.processes import Forked
from tests.support.runs import events, ran, refused
from tests.support.wording import assert_golden


def errors(forked: Forked) -> list[str]:
    """The lines for the user, of all processes."""
    lines = [line for rank in range(len(forked.pids)) for line in forked.stderr(rank).splitlines()]
    return [line for line in lines if line.startswith(("error: ", "preempted: "))]


def named(forked: Forked, rank: int) -> str:
    return f"rank {rank} (process {forked.pids[rank]} on {socket.gethostname()})"


ENDS_WHILE_THE_LOOP_FAILS = """
import os, threading, time
from pathlib import Path
from accel_train.runtime.heartbeat import Failure
from accel_train.runtime.signals import BEFORE_THE_FIRST_STEP, StopRequest
from accel_train.runtime.watchdog import Watchdog
from tests.support.marks import faults

def record(event):
    has_begun.set()
    time.sleep(1)

has_begun = threading.Event()
watchdog = Watchdog(StopRequest(), Path("run"), 60.0, None)
watchdog.record = record
threading.Thread(target=watchdog._end, args=(Failure(0, "rank 0 is gone"),), daemon=True).start()
has_begun.wait()
watchdog.note_end(RuntimeError, RuntimeError("Connection closed by peer"), None)
os._exit(9)
"""


def test_a_loop_that_fails_while_the_watchdog_ends_the_process_does_not_cut_it_short(tmp_path: Path) -> None:
    done = ran([sys.executable, "-c", ENDS_WHILE_THE_LOOP_FAILS], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (5, "error: rank 0 is gone\n")


@pytest.mark.parametrize(
    ("fault", "rank", "codes", "said"),
    [
        ("raise_at", 1, [5, 1], "failed first: KeyError: 'a layer that is not there'"),
        faults("raise_at", 0, [1, 5], "failed first: KeyError: 'a layer that is not there'"),
        faults("kill_at", 1, [5, -9], "is gone without an error"),
        ("kill_at", 0, [-9, 5], "is gone without an error"),
        faults("exit_at", 1, [5, 0], "is gone without an error"),
    ],
)
def test_process_that_dies_ends_the_whole_run_within_10_seconds_and_is_named(
    corpus: Path, started: list[Forked], fault: str, rank: int, codes: list[int], said: str
) -> None:
    forked = start(corpus, started, 2, options={fault: {"step": 4, "rank": rank}})
    wait_for(forked, corpus, 2)
    assert seconds_to_end(forked) < 10
    assert forked.exit_codes() == codes
    begin = f"error: rank {1 - rank}: "
    [line] = errors(forked)
    assert line.startswith(f"{begin}{named(forked, rank)} {said}")
    if rank != 0:
        assert [event["message"] for event in events(corpus / "run", "peer_failed")] == [line.removeprefix(begin)]


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "place"), [("raise_in_load", "load_data"), ("raise_in_build", "build_model")])
def test_process_that_fails_while_the_run_is_prepared_is_named_as_well(
    corpus: Path, started: list[Forked], fault: str, place: str
) -> None:
    forked = start(corpus, started, 2, options={fault: 1})
    begin = time.monotonic()
    codes = forked.wait()
    assert time.monotonic() - begin < 15
    assert codes == [5, 2 if place == "load_data" else 1]
    line, *own = errors(forked)
    assert line.startswith(f"error: rank 0: {named(forked, 1)} failed first: ")
    # An error that nobody foresaw leaves a traceback in the process that it came up in.
    is_mistake = place == "load_data"
    assert len(own) == int(is_mistake)
    assert not own or own[0].partition(": corpus.jsonl:7 ")[0] == "error: rank 1"


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        faults("sigstop_at", 1, "is stopped (SIGSTOP, or a debugger)"),
        faults("sigstop_at", 0, "is stopped (SIGSTOP, or a debugger)"),
        ("spin_at", 1, "makes no progress; it had done step 3, and was in tasks/process_faults.py:"),
        faults("spin_at", 0, "makes no progress; it had done step 3, and was in tasks/process_faults.py:"),
    ],
)
def test_process_that_hangs_is_named_with_its_stack_and_all_end_soon_after_the_timeout(
    corpus: Path, started: list[Forked], fault: str, rank: int, said: str
) -> None:
    guard = {"hang_timeout_seconds": 5}
    forked = start(corpus, started, 2, options={fault: {"step": 4, "rank": rank}}, guard=guard)
    wait_for(forked, corpus, 2)
    assert 4 < seconds_to_end(forked) < 15
    print(forked.stderr(0), forked.stderr(1))
    stopped = -9 if fault == "sigstop_at" else 5
    assert forked.exit_codes() == [stopped if each == rank else 5 for each in (0, 1)]
    running = [each for each in (0, 1) if each != rank or fault == "spin_at"]
    for each, line in zip(running, errors(forked), strict=True):
        begin, _, cause = line.partition("(guard.hang_timeout_seconds): ")
        assert begin.startswith(f"error: rank {each}: ")
        assert begin.endswith(" 5 s ")
        assert cause.startswith(f"{named(forked, rank)} {said}")
    for each in running:
        assert "in steps_in_order" in stacks(corpus, each)
    if fault == "spin_at":
        assert "in _spin" in stacks(corpus, rank)
    assert all("(most recent call first)" in forked.stderr(each) for each in running)


@pytest.mark.parametrize(
    ("processes", "strategy", "work"),
    [
        (2, "ddp", {"save": 5}),
        faults(1, "ddp", {"score": 5, "save": 5, "baselines": 5}),
        faults(2, "fsdp2", {"load": 5, "score": 5, "save": 5, "baselines": 5}),
    ],
)
def test_work_after_the_last_step_that_takes_longer_than_the_timeout_does_not_end_the_run(
    corpus: Path, started: list[Forked], processes: int, strategy: str, work: dict[str, int]
) -> None:
    sections = {"guard": {"hang_timeout_seconds": 2}, "schedule": {"max_steps": 2}, "evaluate": {"every_steps": 2}}
    sections |= {"options": {"seconds": work}, "parallel": {"strategy": strategy}}
    forked = start(corpus, started, processes, **sections)
    forked.expect(0, 60)
    assert read_json(corpus / "run" / "summary.json")["steps"] == 2
    assert (corpus / "run" / "model" / "model.safetensors").is_file()
    noted = [line for line in forked.stderr(0).splitlines() if line.startswith("note: ")]
    what = {"score": "computing metrics", "save": "writing model/", "baselines": "computing baselines and a sample"}
    for name in work.keys() & what.keys():
        assert any(f"{what[name]} has taken" in line for line in noted), noted


@pytest.mark.parametrize(("where", "rank"), [("score", 1), faults("save", 0)])
def test_process_that_hangs_after_the_last_step_is_named_and_all_end(
    corpus: Path, started: list[Forked], where: str, rank: int
) -> None:
    sections = {"guard": {"hang_timeout_seconds": 2}, "schedule": {"max_steps": 2}, "evaluate": {"every_steps": 2}}
    forked = start(corpus, started, 2, options={"sigstop_in": {where: rank}}, **sections)
    forked.wait(60)
    assert forked.exit_codes() == [-9 if each == rank else 5 for each in (0, 1)]
    [line] = errors(forked)
    assert_golden(line.partition(";")[0].replace(named(forked, rank), f"rank {rank} (PROCESS)"))


def stacks(folder: Path, rank: int) -> str:
    return (folder / "run" / f"stacks-rank-{rank}.txt").read_text()


def stores(ranks: int) -> list[HeartbeatStore]:
    """What each process has of one store; only the first one has sent a heartbeat."""
    store = dist.HashStore()
    heartbeats = [HeartbeatStore(store, rank, ranks) for rank in range(ranks)]
    heartbeats[0].exchange()
    return heartbeats


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ({0: (5, 3, True), 1: (4, 3, False)}, {1: "sends no heartbeat; it had done step 3"}),
        ({0: (5, 3, True), 1: (5, 2, True)}, {1: "makes no progress; it had done step 2, and was in a.py:1"}),
        ({0: (5, 3, True), 1: (5, 3, False)}, {1: "makes no progress; it had done step 3, and was in a.py:1"}),
        ({0: (5, 3, True), 1: (5, 3, True)}, {}),
        ({0: (5, 3, False)}, {1: "sends no heartbeat"}),
        ({}, {0: "does not answer; it hosts the store of this run"}),
    ],
)
def test_ranks_that_hang_are_those_without_heartbeat_or_with_fewest_steps_or_that_wait_for_nobody(
    statuses: dict[int, tuple[int, int, bool]], said: dict[int, str]
) -> None:
    at = ("elsewhere", "")
    before = {rank: ProcessStatus(1, *at, 4, (step, 0), "a.py:1", waits) for rank, (_, step, waits) in statuses.items()}
    after = {
        rank: ProcessStatus(1, *at, beat, (step, 0), "a.py:1", waits) for rank, (beat, step, waits) in statuses.items()
    }
    found = find_hung(stores(2)[0], before, after)
    assert found.keys() == said.keys()
    assert all(found[rank].startswith(text) for rank, text in said.items())


def test_the_first_failure_that_is_reported_is_the_one_that_all_processes_name() -> None:
    first, second, third = stores(3)
    assert first.known_failure is None
    cause = Failure(1, "rank 1 failed first: KeyError: 'x'")
    assert second.report_failure(cause) == cause
    assert first.report_failure(Failure(0, "something that followed")) == cause
    third.exchange()
    assert third.known_failure == cause


def test_a_stop_request_and_a_status_reach_all_processes_by_their_next_heartbeat() -> None:
    first, second = stores(2)
    assert not second.exchange(progress=(3, 0), ended="saved")
    assert first.exchange(is_stopping=True)
    assert second.exchange()
    status = first.status(1)
    assert status is not None
    assert (status.progress, status.ended) == ([3, 0], "saved")


def test_a_process_that_dies_within_the_first_second_was_known_to_its_peers_before_the_first_step() -> None:
    first, second = stores(3)[:2]
    late = threading.Timer(0.5, HeartbeatStore(second._store, 2, 3).exchange)
    late.start()
    second.meet()
    assert [f"(process {os.getpid()} on " in second.describe(rank) for rank in range(3)] == [True, True, True]
    late.join()
    assert "process" not in first.describe(2)


class CountedStore:
    """A store that counts the calls of all processes."""

    def __init__(self) -> None:
        self.store, self.num_calls, self.num_keys = dist.HashStore(), 0, 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.num_calls += 1
            self.num_keys += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return getattr(self.store, name)(*arguments)

        return call


def join(ranks: int, per_machine: int) -> tuple[CountedStore, list[HeartbeatStore]]:
    store = CountedStore()
    heartbeats = [HeartbeatStore(store, rank, ranks) for rank in range(ranks)]
    for rank, each in enumerate(heartbeats):
        host = f"host{rank // per_machine}"
        each._status, each._machine = replace(each._status, host=host), f"machine/{host}"
        each.exchange()
    for each in heartbeats:
        each.meet()
    return store, heartbeats


@pytest.mark.parametrize("rank", [0, 8])
def test_the_start_of_a_process_makes_as_many_store_calls_in_a_large_run_as_in_a_small_one(rank: int) -> None:
    calls = {}
    for num_processes in (64, 4096):
        store = CountedStore()
        others = [HeartbeatStore(store, each, num_processes) for each in range(rank + 1, rank + 8)]
        for other in others:
            other.exchange()
        status = store.get(f"status/{rank + 1}").decode().replace(socket.gethostname(), "elsewhere")
        for each in {*range(num_processes)} - {*range(rank, rank + 8)}:
            store.set(f"status/{each}", status)
        store.add("joined", num_processes - 8)
        own, before = HeartbeatStore(store, rank, num_processes), store.num_calls
        own.meet()
        start = store.num_calls
        own.exchange()
        calls[num_processes] = (start - before, store.num_calls - start)
        assert sorted(own._known) == sorted({0, *range(rank, rank + 8)})
    assert calls[4096] == calls[64]
    assert calls[64][0] < 80
    assert calls[64][1] < 8


def test_a_process_knows_its_machine_and_rank_0_and_reads_all_in_one_call_when_it_looks_for_a_hang() -> None:
    store, heartbeats = join(12, 4)
    last = heartbeats[11]
    assert set(last._known) == {0, 8, 9, 10, 11}
    before = store.num_calls
    assert set(last.statuses()) == set(range(12))
    assert store.num_calls == before + 1
    last.exchange()
    assert store.num_calls == before + 4


def test_keys_that_a_late_step_reads_grow_with_the_processes_and_not_with_their_square() -> None:
    read = {}
    for ranks in (64, 512):
        store, heartbeats = join(ranks, 8)
        before = store.num_keys
        for each in heartbeats:
            each.look()
            each.look()
        read[ranks] = store.num_keys - before
    assert read[512] < 1.1 * 8 * read[64]
    assert read[512] < 40 * 512


def test_rank_0_names_what_hangs_unless_it_sends_no_heartbeat_itself() -> None:
    _, heartbeats = join(12, 4)
    main, last = heartbeats[0], heartbeats[11]
    before = {each.rank: each.look() for each in (main, last)}
    for each in heartbeats[:5]:
        each.exchange()
    assert last.leaves_hang_to_rank_0(before[11], last.look())
    assert not main.leaves_hang_to_rank_0(before[0], main.look())
    assert sorted(find_hung(main, before[0], main.look())) == [5, 6, 7, 8, 9, 10, 11]
    before[11] = last.look()
    for each in heartbeats[8:]:
        each.exchange()
    after = last.look()
    assert not last.leaves_hang_to_rank_0(before[11], after)
    assert list(find_hung(last, before[11], after)) == [0]


@pytest.mark.parametrize(("was_preparing", "event", "exit_code"), [(True, "preempted", 75), (False, "peer_failed", 5)])
def test_a_peer_that_was_asked_to_stop_while_it_prepared_the_run_is_a_preemption_for_those_that_wait_for_it(
    was_preparing: bool, event: str, exit_code: int
) -> None:
    first, second = stores(2)
    with subprocess.Popen([sys.executable, "-c", ""]) as peer:
        peer.wait()
    second._status = replace(second._status, pid=peer.pid)
    second.exchange(is_stopping=True, ended="asked to", was_preparing=was_preparing)
    first.exchange()
    cause = lost_peer(first, math.inf)
    assert cause is not None
    assert (cause.rank, cause.event, cause.exit_code) == (1, event, exit_code)
    assert cause.message.endswith(": asked to")
    assert cause.hosts == ([] if was_preparing else [socket.gethostname()])


def test_machines_of_lost_processes_are_written_for_the_launcher_and_those_of_failed_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_LOST_HOSTS", str(tmp_path / "lost"))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    watchdog = Watchdog(StopRequest(), tmp_path, 60.0, stores(2)[0])
    watchdog.note_end(ValueError, ValueError("a bug"), None)
    assert not (tmp_path / "lost").exists()
    watchdog._record(Failure(1, "gone", hosts=["a", "b.cluster"]))
    assert (tmp_path / "lost").read_text() == "a\nb.cluster\n"


def test_a_stop_that_a_library_turns_into_an_error_of_its_own_is_no_failure_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    (first, second), stop = stores(2), StopRequest()
    stop.requested = stop.is_preparing = True
    error = RuntimeError("could not determine the shape of object type 'torch.storage.UntypedStorage'")
    Watchdog(stop, tmp_path, 60.0, first).note_end(RuntimeError, error, None)
    assert second.exchange()
    assert second.known_failure is None
    status = second.status(0)
    assert status is not None
    assert status.was_preparing


def test_a_launcher_that_stops_a_process_while_it_reports_an_error_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    (first, _), stop = stores(2), StopRequest()
    error = ValueError("no such tensor")

    def fail() -> None:
        with stop, stop.preparing():
            Watchdog(stop, tmp_path, 60.0, first).note_end(ValueError, error, None)
            signal.raise_signal(signal.SIGTERM)  # as when a peer that read it has ended before
            raise error

    assert refused(fail, named="") is error


@pytest.mark.parametrize(
    ("problem", "message", "is_reported"),
    [
        ("no such tensor", "no such tensor", True),
        ("no such tensor", "another", False),
        ("what failed first: no such tensor", "no such tensor", False),
    ],
)
def test_the_same_error_on_several_processes_is_printed_by_the_first(
    problem: str, message: str, is_reported: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store, other = stores(2)
    first, second = (Watchdog(StopRequest(), tmp_path, 60.0, heartbeats) for heartbeats in (store, other))
    second.note_end(ValueError, ValueError(problem), None)
    first.note_end(ValueError, ValueError(message), None)
    assert not second.is_reported
    assert first.is_reported == is_reported
    store.exchange()
    assert store.known_failure is not None
    assert (store.known_failure.rank, store.known_failure.problem) == (1, problem)


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
