"""Heartbeats of the processes of a run, through the process group's store: which rank lives, what it does, and what failed first.

They use a connection of their own, from threads that no collective can block. The keys:

    status/RANK        status of a process, which publishes it every second
    machine/NAME       number of processes that have joined on a machine
    machine/NAME/I     rank of the I-th of them, from 1
    joined             number of processes that have joined
    all_joined         set by the last process that joins
    failure            the first failure of the run; later ones read it, so that all processes name the same cause
    stop               some process was asked to stop

A process reads the statuses of its own machine and of rank 0, so a start costs O(world size) calls in all.
"""

import itertools
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from accel_train.runtime.stacks import within

STORE_SECONDS = 5.0
"""Timeout of the store, after which its host counts as lost."""
LAST_READ_SECONDS = 3.0
"""Time that a failed rank 0 with the store stays for the others, which read it every second."""
PATIENCE_SECONDS = 20.0
"""Time that an idle process waits after a peer has ended without a failure, or the store is lost."""
ENDED, STOPPED = ("dead", "zombie"), ("stopped", "tracing-stop")  # states of a process, as psutil names them


@dataclass(frozen=True)
class ProcessStatus:
    """The status that a process published last."""

    pid: int
    host: str
    pid_namespace: str  # containers of one host have process numbers of their own
    heartbeat: int = 0  # counts up while any thread of the process runs
    progress: Sequence[int] = (0, 0)  # steps done, and batches evaluated
    place: str = ""  # the line of code that its main thread is in
    is_waiting: bool = False  # for other processes, in that line
    ended: str | None = None
    """The reason to end, where it is no failure: "" for a finished run; None while the process runs."""
    was_preparing: bool = False
    """Asked to stop while it still prepared the run: no step was done without it, so nothing is lost."""


Statuses = dict[int, ProcessStatus]  # by rank


@dataclass(frozen=True)
class Failure:
    """The reason why the processes of a run end."""

    rank: int  # of the process that failed, or that reports it
    message: str
    event: str = "peer_failed"  # its kind in events.jsonl
    exit_code: int = 5
    """Exit code of the other processes; after an out of memory that of the first one (6, 75), which says what to do."""
    problem: str = ""
    """The error of that process in one line, without its rank; empty for a failure that is no error of Python."""


def is_peer_error(error: BaseException | None) -> bool:
    """Return whether an exception only says that another process is gone."""
    torch = sys.modules.get("torch")  # what torch raises can only come up where it has been imported
    if torch is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


class HeartbeatStore:
    """Statuses and the failure of all processes, in a torch.distributed `store`.

    A method that reads or writes the store waits for its answer: call it through `within`, or from a thread that may wait.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        # Under torchrun the agent hosts the store, and outlives the processes.
        self._is_on_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        namespace = os.readlink("/proc/self/ns/pid") if os.path.lexists("/proc/self/ns/pid") else ""  # no Linux
        self._store, self._is_lost, self._publishing = store, False, threading.Lock()
        self._status = ProcessStatus(os.getpid(), socket.gethostname(), namespace)
        self._known = {rank: self._status}
        self._machine = f"machine/{self._status.host}/{namespace}"
        # Members of this machine that this process has read, and whether all processes of the run have joined.
        self._num_met, self._is_complete = 0, False
        self._processes: dict[int, Any] = {}
        self.known_failure: Failure | None = None  # the first one of the run
        self.last_contact = time.monotonic()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store, or raise a ConnectionError where it is lost: torch writes a page to stderr for each such call."""
        if self._is_lost or (self._is_on_rank_0 and self.state(0) in (*ENDED, *STOPPED)):
            raise ConnectionError("the store does not answer")
        try:
            return getattr(self._store, method)(*arguments)
        except Exception as error:
            self._is_lost |= type(error).__name__ == "DistNetworkError"
            raise

    def status(self, rank: int) -> ProcessStatus | None:
        """Return the status that a process published last; None before its first heartbeat."""
        if not self._call("check", [f"status/{rank}"]):
            return None
        self._known[rank] = ProcessStatus(**json.loads(self._call("get", f"status/{rank}")))
        return self._known[rank]

    def statuses(self) -> Statuses:
        """Return the last status of each process, read in one call once all have joined."""
        if not self._is_complete:
            return {rank: status for rank in range(self.world_size) if (status := self.status(rank)) is not None}
        values = self._call("multi_get", [f"status/{rank}" for rank in range(self.world_size)])
        self._known.update((rank, ProcessStatus(**json.loads(value))) for rank, value in enumerate(values))
        return dict(self._known)

    def meet(self) -> None:
        """Join, and wait at most `STORE_SECONDS` for the others, so that a process that dies soon is known."""
        self.exchange()
        with suppress(Exception):  # a peer that has died already; torch has several kinds for it
            self._call("wait", ["all_joined"], timedelta(seconds=STORE_SECONDS))
            self._meet_machine()

    def _join(self) -> None:
        index = self._call("add", self._machine, 1)
        self._call("set", f"{self._machine}/{index}", str(self.rank))
        if self._call("add", "joined", 1) == self.world_size:
            self._call("set", "all_joined", "1")

    def _meet_machine(self) -> None:
        """Read who has joined on this machine, and rank 0, for their machine and process number, which stay."""
        self._is_complete = self._call("check", ["all_joined"])
        for index in range(self._num_met + 1, self._call("add", self._machine, 0) + 1):
            # A process that has counted itself may not have written its rank yet.
            if not self._call("check", [f"{self._machine}/{index}"]):
                self._is_complete = False
                break
            if (rank := int(self._call("get", f"{self._machine}/{index}"))) != self.rank:
                self.status(rank)
            self._num_met = index
        if 0 not in self._known:
            self.status(0)

    def exchange(self, *, is_stopping: bool = False, **changes: Any) -> bool:
        """Publish a heartbeat with changes of the status, and read the run's failure; return whether some process `is_stopping`."""
        with self._publishing:
            self._status = replace(self._status, heartbeat=self._status.heartbeat + 1, **changes)
            self._call("set", f"status/{self.rank}", json.dumps(asdict(self._status)))
            if self._status.heartbeat == 1:
                self._join()
        if not self._is_complete:
            self._meet_machine()
        if self._call("check", ["failure"]):
            self.known_failure = Failure(**json.loads(self._call("get", "failure")))
        if is_stopping:
            self._call("set", "stop", str(self.rank))
        self.last_contact = time.monotonic()
        return bool(self._call("check", ["stop"]))

    def report_failure(self, failure: Failure) -> Failure:
        """Publish a failure; return the first one of the run, which another process may have published before."""
        return Failure(**json.loads(self._call("compare_set", "failure", "", json.dumps(asdict(failure)))))

    def state(self, rank: int) -> str:
        """Return the state of a process, as psutil names it; "" for one of another machine."""
        import psutil

        status = self._known.get(rank)
        if status is None or (status.host, status.pid_namespace) != (self._status.host, self._status.pid_namespace):
            return ""
        try:
            process = self._processes.get(rank) or self._processes.setdefault(rank, psutil.Process(status.pid))
            # After its end, another process may have its number.
            return str(process.status()) if process.is_running() else "dead"
        except psutil.NoSuchProcess:
            return "dead"

    def others(self, states: Collection[str]) -> list[int]:
        """Return the other processes of this machine that are in one of these states."""
        return [rank for rank in sorted(self._known) if rank != self.rank and self.state(rank) in states]

    def end_stopped(self) -> None:
        """Kill the other processes of this machine that are stopped: no other signal reaches them, and the launcher waits."""
        for rank in self.others(["stopped"]):
            with suppress(OSError):
                os.kill(self._known[rank].pid, signal.SIGKILL)

    def describe(self, rank: int) -> str:
        """Return a rank with its process and machine; `launch/slurm.sh` reads the machine's name from this."""
        status = self._known.get(rank)
        return f"rank {rank}" if status is None else f"rank {rank} (process {status.pid} on {status.host})"

    def stay_for_last_reads(self) -> None:
        """Wait until the others have read the store once more, or have ended, where this process hosts it."""
        deadline = time.monotonic() + (LAST_READ_SECONDS if self.rank == 0 and self._is_on_rank_0 else 0.0)
        while time.monotonic() < deadline and len(self.others(ENDED)) < self.world_size - 1:
            time.sleep(0.05)


def lost_peer(store: HeartbeatStore, idle_seconds: float) -> Failure | None:
    """Return which peer of this machine is gone; for a process that is idle for long, also one that ended without a failure."""
    is_stuck = idle_seconds > PATIENCE_SECONDS
    for rank in store.others(ENDED):
        status, who = within(1.0, lambda rank=rank: store.status(rank)), store.describe(rank)  # type: ignore[misc]
        if status is None or status.ended is None:
            cause = "killed (has the host run out of memory?), or it ended itself"
            return Failure(rank, f"{who} is gone without an error: {cause}{last_seen(status)}")
        if is_stuck:
            text = f"{who} has ended, and this process waits for it: {status.ended or 'no error'}"
            return Failure(rank, text, "preempted", 75) if status.was_preparing else Failure(rank, text)
    if is_stuck and time.monotonic() - store.last_contact > PATIENCE_SECONDS:
        return Failure(0, f"{store.describe(0)} does not answer: it may host the store of this run, which is lost")
    return None


def find_cause(store: HeartbeatStore, seconds: float) -> Failure | None:
    """Return what made a collective fail: a reported failure, or a peer that is gone; None if nothing is known in time."""
    deadline, failure = time.monotonic() + seconds, None
    while failure is None and time.monotonic() < deadline:
        within(1.0, store.exchange)
        if (failure := store.known_failure or lost_peer(store, math.inf)) is None:
            time.sleep(0.1)
    return failure


def find_hung(store: HeartbeatStore, before: Statuses, after: Statuses) -> dict[int, str]:
    """Return the ranks that the others wait for, each with the reason, from two readings some seconds apart.

    These are the ranks without a heartbeat; or else those with the fewest steps; or else, where all have as many, those that
    do not wait for others. Empty where all are alike. Without an answer of the store, only this machine's processes count.
    """
    silent: dict[int, str] = {}
    for rank in range(store.world_size):
        state, first, last = store.state(rank), before.get(rank), after.get(rank)
        is_silent = last is None or (first is not None and first.heartbeat == last.heartbeat)
        if state in (*ENDED, *STOPPED):
            silent[rank] = "has ended" if state in ENDED else "is stopped (SIGSTOP, or a debugger)"
        elif after and is_silent and rank != store.rank:
            silent[rank] = "sends no heartbeat"
    if silent:
        return {rank: f"{what}{last_seen(after.get(rank))}" for rank, what in silent.items()}
    if not after:
        return {0: "does not answer; it hosts the store of this run"}
    least = min(tuple(status.progress) for status in after.values())
    slow = {rank: status for rank, status in after.items() if tuple(status.progress) == least}
    if len(slow) == len(after):
        slow = {rank: status for rank, status in slow.items() if not status.is_waiting}
    if len(slow) == len(after) and len(after) > 1:
        return {}
    return {rank: f"makes no progress{last_seen(status)}" for rank, status in slow.items()}


def last_seen(status: ProcessStatus | None) -> str:
    """Return the end of a sentence: what a process had done at its last heartbeat, and where it was."""
    if status is None:
        return ""
    return f"; it had done step {status.progress[0]}, and was in {status.place or 'its start'}"


_runs = itertools.count()


def open_heartbeats(rank: int, world_size: int) -> HeartbeatStore | None:
    """Publish the first status of this process over the process group's store; None where it is alone."""
    import torch.distributed as dist

    if world_size == 1:
        return None
    group: Any = dist.group.WORLD
    # Each run of this process has keys of its own.
    store = dist.PrefixStore(f"accel_train/{next(_runs)}", group.get_group_store().clone())
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    heartbeats = HeartbeatStore(store, rank, world_size)
    heartbeats.meet()
    return heartbeats
