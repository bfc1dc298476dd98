"""Heartbeats of a run's processes through the process group's store: who lives, current progress, first failure.

They use a separate connection, from threads that no collective can block. The keys:

    status/RANK        status of a process, published every second
    machine/NAME       number of processes that have joined on a machine
    machine/NAME/I     rank of the I-th of them, from 1
    joined             number of processes that have joined
    all_joined         set by the last process that joins
    failure            the first failure of the run; later ones read it, so that all processes name the same cause
    stop               some process was asked to stop

A process reads the statuses of its machine and of rank 0, and rank 0 reads all when a step is late. A start and a late
step therefore cost O(world size) calls in all.
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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

from accel_train.core.errors import ProcessFailed
from accel_train.core.json_io import parse_json
from accel_train.runtime.stacks import within

STORE_SECONDS = 5.0
"""Timeout of the store in seconds, after which its host counts as lost."""
LAST_READ_SECONDS = 3.0
"""Seconds that a failed rank 0 with the store stays alive, so that the others can read it. They read every second."""
PATIENCE_SECONDS = 20.0
"""Seconds that an idle process waits after a peer has ended without a failure, or the store is lost."""
FINDING_SECONDS = 3.0
"""Seconds to find out which process has ended, after a collective with it has failed."""
# States of a process, in psutil's names.
ENDED, STOPPED = ("dead", "zombie"), ("stopped", "tracing-stop")


@dataclass(frozen=True)
class ProcessStatus:
    """The last status that a process has published."""

    pid: int
    host: str
    pid_namespace: str
    """Namespace of `pid`. Containers of one host have separate process numbers."""
    heartbeat: int = 0
    """Counter that increases while any thread of the process runs."""
    progress: Sequence[int] = (0, 0)
    """Number of steps done, and of batches evaluated."""
    place: str = ""
    """Line of code that the main thread executes."""
    is_waiting: bool = False
    """Whether the main thread waits for other processes in that line."""
    work: str = ""
    """Work of the main thread outside of steps; "" in a step."""
    num_beats: int = 0
    """Number of works begun and ended, and of parts of them that are done."""
    ended: str | None = None
    """Reason for an end without failure ("" for a finished run); None while the process runs."""
    was_preparing: bool = False
    """Whether the process still prepared the run when it was asked to stop. No step was done without it."""

    def is_busy_since(self, before: "ProcessStatus") -> bool:
        """Return whether the process has made progress since an earlier status, or is at work and alive."""
        has_moved = (self.progress, self.num_beats) != (before.progress, before.num_beats)
        return has_moved or bool(self.work and not self.is_waiting and self.heartbeat != before.heartbeat)


Statuses = dict[int, ProcessStatus]
"""Statuses by rank."""


@dataclass(frozen=True)
class Failure:
    """The reason why the processes of a run end."""

    rank: int
    """Rank of the process that failed, or that reports the failure."""
    message: str
    event: str = "peer_failed"
    """Kind of the event in events.jsonl."""
    exit_code: int = 5
    """Exit code of the other processes. After out of memory, it is the first failed process's code (6 or 75)."""
    problem: str = ""
    """Error of that process in one line, without its rank; empty if the failure is not a Python error."""
    hosts: Sequence[str] = field(default_factory=list)
    """Machines of the processes that were lost or hang."""


def is_peer_error(error: BaseException | None) -> bool:
    """Return whether an exception only reports that another process is gone."""
    # torch can only have raised the error if it is imported.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


class HeartbeatStore:
    """Statuses and the first failure of all processes, in a torch.distributed `store`.

    Methods that read or write the store wait for its answer. Call them through `within`, or from a thread that may
    wait.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        # Under torchrun, the agent hosts the store and outlives the processes.
        self._is_on_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # The file exists only on Linux.
        namespace = os.readlink("/proc/self/ns/pid") if os.path.lexists("/proc/self/ns/pid") else ""
        self._store, self._is_lost, self._publishing = store, False, threading.Lock()
        self._status = ProcessStatus(os.getpid(), socket.gethostname(), namespace)
        self._known = {rank: self._status}
        self._machine = f"machine/{self._status.host}/{namespace}"
        # Number of members of this machine that this process has read, and whether all processes of the run have
        # joined.
        self._num_met, self._is_complete = 0, False
        self._processes: dict[int, Any] = {}
        # The first failure of the run.
        self.known_failure: Failure | None = None
        self.last_contact = time.monotonic()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store; raise a ConnectionError if the store is lost.

        Without this check, torch would write a page to stderr for each call to a lost store.
        """
        if self._is_lost or (self._is_on_rank_0 and self.state(0) in (*ENDED, *STOPPED)):
            raise ConnectionError("the store does not answer")
        try:
            return getattr(self._store, method)(*arguments)
        except Exception as error:
            self._is_lost |= type(error).__name__ == "DistNetworkError"
            raise

    def status(self, rank: int) -> ProcessStatus | None:
        """Return the last status that a process has published; None before its first heartbeat."""
        if not self._call("check", [f"status/{rank}"]):
            return None
        self._known[rank] = ProcessStatus(**parse_json(self._call("get", f"status/{rank}")))
        return self._known[rank]

    def statuses(self) -> Statuses:
        """Return the last status of each process. Once all have joined, one call reads them."""
        if not self._is_complete:
            return {rank: status for rank in range(self.world_size) if (status := self.status(rank)) is not None}
        values = self._call("multi_get", [f"status/{rank}" for rank in range(self.world_size)])
        self._known.update((rank, ProcessStatus(**parse_json(value))) for rank, value in enumerate(values))
        return dict(self._known)

    def look(self) -> Statuses:
        """Return the last statuses when a step is late: of all processes on rank 0, otherwise as in `_meet_machine`."""
        if self.rank == 0:
            return self.statuses()
        return {rank: status for rank in sorted(self._known) if (status := self.status(rank)) is not None}

    def leaves_hang_to_rank_0(self, before: Statuses, after: Statuses) -> bool:
        """Return whether rank 0 sent heartbeats between two looks. It then finds the cause, and reports it to all."""
        beats = {each[0].heartbeat for each in (before, after) if 0 in each}
        return self.rank != 0 and len(beats) == 2

    def meet(self) -> None:
        """Join, and wait at most `STORE_SECONDS` for the others. A process that dies early is then known."""
        self.exchange()
        # A peer has already died. torch raises several kinds of errors.
        with suppress(Exception):
            self._call("wait", ["all_joined"], timedelta(seconds=STORE_SECONDS))
            self._meet_machine()

    def _join(self) -> None:
        index = self._call("add", self._machine, 1)
        self._call("set", f"{self._machine}/{index}", str(self.rank))
        if self._call("add", "joined", 1) == self.world_size:
            self._call("set", "all_joined", "1")

    def _meet_machine(self) -> None:
        """Read which ranks have joined on this machine, and the status of each one and of rank 0.

        The machine and process number in a status do not change.
        """
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
        """Publish a heartbeat with changes of the status, and read the run's failure; return whether to stop.

        `is_stopping` publishes a stop request to all processes.
        """
        with self._publishing:
            self._status = replace(self._status, heartbeat=self._status.heartbeat + 1, **changes)
            self._call("set", f"status/{self.rank}", json.dumps(asdict(self._status)))
            if self._status.heartbeat == 1:
                self._join()
        if not self._is_complete:
            self._meet_machine()
        if self._call("check", ["failure"]):
            self.known_failure = Failure(**parse_json(self._call("get", "failure")))
        if is_stopping:
            self._call("set", "stop", str(self.rank))
        self.last_contact = time.monotonic()
        return bool(self._call("check", ["stop"]))

    def report_failure(self, failure: Failure) -> Failure:
        """Publish a failure; return the first failure of the run. Another process may have published it before."""
        return Failure(**parse_json(self._call("compare_set", "failure", "", json.dumps(asdict(failure)))))

    def state(self, rank: int) -> str:
        """Return the state of a process in psutil's names; "" for a process on another machine."""
        import psutil

        status = self._known.get(rank)
        if status is None or (status.host, status.pid_namespace) != (self._status.host, self._status.pid_namespace):
            return ""
        try:
            process = self._processes.get(rank) or self._processes.setdefault(rank, psutil.Process(status.pid))
            # After a process has ended, another one may get its number.
            return str(process.status()) if process.is_running() else "dead"
        except psutil.NoSuchProcess:
            return "dead"

    def others(self, states: Collection[str]) -> list[int]:
        """Return the other processes of this machine that are in one of these states."""
        return [rank for rank in sorted(self._known) if rank != self.rank and self.state(rank) in states]

    def end_stopped(self) -> None:
        """Kill the stopped processes of this machine. Only SIGKILL reaches them, and the launcher waits for them."""
        for rank in self.others(["stopped"]):
            with suppress(OSError):
                os.kill(self._known[rank].pid, signal.SIGKILL)

    def describe(self, rank: int) -> str:
        """Return a rank with its process and machine."""
        status = self._known.get(rank)
        return f"rank {rank}" if status is None else f"rank {rank} (process {status.pid} on {status.host})"

    def hosts(self, ranks: Collection[int]) -> list[str]:
        """Return the machines of these ranks, without ranks that have published nothing."""
        return sorted({self._known[rank].host for rank in ranks if rank in self._known})

    def stay_for_last_reads(self) -> None:
        """Wait until the other processes have read the store once more or have ended, if this process hosts it."""
        deadline = time.monotonic() + (LAST_READ_SECONDS if self.rank == 0 and self._is_on_rank_0 else 0.0)
        while time.monotonic() < deadline and len(self.others(ENDED)) < self.world_size - 1:
            time.sleep(0.05)


def lost_peer(store: HeartbeatStore, idle_seconds: float) -> Failure | None:
    """Return the failure of a peer of this machine that is gone; None if none is.

    If this process has been idle for long, a peer that ended without a failure also counts.
    """
    is_stuck = idle_seconds > PATIENCE_SECONDS
    for rank in store.others(ENDED):
        status, who = within(1.0, lambda rank=rank: store.status(rank)), store.describe(rank)  # type: ignore[misc]
        if status is None or status.ended is None:
            cause = "killed (has the host run out of memory?), or it ended itself"
            text = f"{who} is gone without an error: {cause}{last_seen(status)}"
        elif is_stuck:
            text = f"{who} has ended, and this process waits for it: {status.ended or 'no error'}"
            # A peer that was still preparing did no step, so nothing is lost.
            if status.was_preparing:
                return Failure(rank, text, "preempted", 75)
        else:
            continue
        return Failure(rank, text, hosts=store.hosts([rank]))
    if is_stuck and time.monotonic() - store.last_contact > PATIENCE_SECONDS:
        text = f"{store.describe(0)} does not answer. It may host the store of this run, and the store is lost"
        return Failure(0, text, hosts=store.hosts([0]))
    return None


def find_cause(store: HeartbeatStore, seconds: float) -> Failure | None:
    """Return the cause of a failed collective: a reported failure, or a peer that is gone; None if unknown in time."""
    deadline, failure = time.monotonic() + seconds, None
    while failure is None and time.monotonic() < deadline:
        within(1.0, store.exchange)
        if (failure := store.known_failure or lost_peer(store, math.inf)) is None:
            time.sleep(0.1)
    return failure


def find_hung(store: HeartbeatStore, before: Statuses, after: Statuses) -> dict[int, str]:
    """Return the ranks that the others wait for, each with the reason, from two readings some seconds apart.

    First come the ranks without a heartbeat. If all send heartbeats, return the ranks with the fewest steps. If the
    steps are also equal, return the ranks that do not wait for others. The result is empty if all ranks are alike.
    Without an answer from the store, only this machine's processes count.
    """
    silent: dict[int, str] = {}
    for rank in range(store.world_size) if store.rank == 0 else sorted(store._known):
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
    """Return the end of a sentence: the steps of a process at its last heartbeat, and the place it was in."""
    if status is None:
        return ""
    return f"; it had done step {status.progress[0]}, and was in {status.place or 'its start'}"


@contextmanager
def lost_peer_named(store: HeartbeatStore | None) -> Iterator[None]:
    """Name the lost process where a collective inside fails without a watchdog.

    Raises:
        ProcessFailed: a peer is gone. The text names it, as a run does that ends with exit code 5.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_peer_error(error):
            raise
        cause = None if store is None else find_cause(store, FINDING_SECONDS)
        message = f"another process is gone: {error}" if cause is None else cause.message
        raise ProcessFailed(message, Failure.exit_code) from error


_runs = itertools.count()


def open_heartbeats(rank: int, world_size: int) -> HeartbeatStore | None:
    """Publish the first status of this process over the process group's store; return None for a single process."""
    import torch.distributed as dist

    if world_size == 1:
        return None
    group: Any = dist.group.WORLD
    # Each run of this process uses different keys.
    store = dist.PrefixStore(f"accel_train/{next(_runs)}", group.get_group_store().clone())
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    heartbeats = HeartbeatStore(store, rank, world_size)
    heartbeats.meet()
    return heartbeats
