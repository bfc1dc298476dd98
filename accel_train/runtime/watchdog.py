"""End a process that would otherwise wait forever: for a peer that died or hangs, or for a step that does not come.

Training never waits for the watchdog's two threads. One thread sends heartbeats, and reads whether the run has failed
or must stop. The other thread checks the clock, the loop's progress, and the processes of this machine. Progress is
read from plain attributes, so a step costs nothing. Each process prints the reason for its end. All name the first
failure of the run as the cause.

The timeout limits steps and evaluation batches. A process at other work (`core/work.py`: preparing, saving, metrics,
callbacks, everything after the last step) is not limited, and the processes that wait for it are not either. They end
if one of them is lost: the heartbeats show it. Collectives have no limit of their own meanwhile.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from accel_train.core.errors import CheckpointError, OutOfMemory, Preempted, RestartNeeded, TrainingStopped
from accel_train.core.json_io import utc_event
from accel_train.core.redaction import redact_text
from accel_train.core.work import current_work
from accel_train.runtime.heartbeat import (
    Failure,
    HeartbeatStore,
    Statuses,
    find_cause,
    find_hung,
    is_peer_error,
    lost_peer,
)
from accel_train.runtime.launcher import allow_restart
from accel_train.runtime.signals import BEFORE_THE_FIRST_STEP, INTERRUPTED_MESSAGE, StopRequest
from accel_train.runtime.stacks import (
    Done,
    Progress,
    finish_writing,
    one_line,
    place_of_main_thread,
    within,
    write_stacks,
)

TICK_SECONDS, HEARTBEAT_SECONDS = 0.5, 1.0
GRACE_SECONDS = 1.5
"""Seconds before the watchdog reports a lost peer. A process mostly fails earlier, in a collective.

Its message is then better than the watchdog's.
"""
STOP_SECONDS = 15.0
"""Seconds for a step after a stop request. Launchers kill after 30 seconds."""
JOIN_SECONDS = 2.0
"""Seconds for each thread to end when the watchdog closes."""
FIRST_STEP_ALLOWANCE = 3
"""Multiple of the timeout for the first step, because it may compile."""
START_SECONDS = 1800.0
"""Least timeout while the run is prepared. Processes then wait for each other in collectives that count no progress."""
LOST_HOSTS = "ACCEL_TRAIN_LOST_HOSTS"
"""Environment variable with the path of a file for the names of machines whose process was lost or hung."""
AGREED = (TrainingStopped, CheckpointError, Preempted)
"""Errors that all processes raise at the same point. They are not failures of one process."""
FOR_ALL: dict[type[BaseException], tuple[str, int]] = {
    OutOfMemory: ("out_of_memory", 6), RestartNeeded: ("out_of_memory", 75),
}  # fmt: skip
"""Event and exit code of all processes if one fails with these errors. After any other error, the others end with 5."""


class Watchdog:
    """Watches this process while it is open. A single process has no `heartbeats` (None)."""

    current: ClassVar["Watchdog | None"] = None
    """The watchdog that was opened last in this process."""
    at_end: ClassVar[list[Callable[[str, str, int], object]]] = []
    """Functions called with event, message, and exit code before a watchdog ends this process."""

    def __init__(
        self, stop: StopRequest, output_dir: Path, timeout_seconds: float, heartbeats: HeartbeatStore | None
    ) -> None:
        self.stop, self.output_dir, self.timeout_seconds = stop, output_dir, timeout_seconds
        self.heartbeats = heartbeats
        self.rank = 0 if heartbeats is None else heartbeats.rank
        # Prefix of each line that this process prints.
        self.who = "" if heartbeats is None else f"rank {self.rank}: "
        self.cause: Failure | None = None
        """Failure of another process that made this one fail."""
        self.is_reported = False
        """Whether another process failed first with the same message, and prints it."""
        self.record: Callable[[Mapping[str, Any]], object] | None = None
        """Function that appends an event to the run folder, on the main process."""
        self._progress = Progress()
        self._since_stop = self._since_insisted = self._alarmed = 0.0
        self._halfway: Statuses | None = None
        self._ending = self._ends_process = False
        self._noted_seconds = 0.0
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def watch_steps(self, progress: Done, phase: Callable[[], str]) -> None:
        """Expect steps from now on: `progress` returns steps done and batches evaluated, `phase` the current phase."""
        self._watch_collectives()
        self._progress.begin(progress, phase)

    def __enter__(self) -> "Watchdog":
        type(self).current = self
        self._watch_collectives()
        for work in (self._watch, *((self._send_heartbeats,) if self.heartbeats is not None else ())):
            self._threads.append(threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.note_end(kind, error, trace)
        self._over.set()
        self._watch_collectives(False)
        # A thread that is inside torch when the interpreter ends aborts the process.
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def note_end(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Publish why the loop of this process ends (an error or not), and read the first failure of the run."""
        # The other thread is about to end the process, and must not be interrupted.
        if self._ends_process:
            time.sleep(STOP_SECONDS)
        if self._ending:
            return
        self._ending, heartbeats = True, self.heartbeats
        if heartbeats is None:
            return
        if error is not None and self.stop.requested and self.stop.is_preparing and not self.stop.insisted:
            # A library may have converted the error. `StopRequest.preparing` does the same.
            error = Preempted(BEFORE_THE_FIRST_STEP)
        # The others end when they have read this failure. A launcher then asks this process to stop.
        self.stop.has_failed = not (error is None or isinstance(error, Preempted) or is_peer_error(error))
        if is_peer_error(error) and self.stop.is_preparing and within(1.0, heartbeats.exchange):
            # `StopRequest.preparing` then makes the error Preempted.
            self.stop.requested = True
        elif error is None or isinstance(error, AGREED):
            is_alone = isinstance(error, Preempted) and not self._progress.has_begun
            ended = "" if error is None else one_line(error)
            within(2.0, lambda: heartbeats.exchange(is_stopping=is_alone, ended=ended, was_preparing=is_alone))
            # While a run is prepared, each process stops alone, or because the launcher saw another one fail.
            if is_alone:
                self.cause = heartbeats.known_failure
                heartbeats.stay_for_last_reads()
        else:
            self._note_failure(heartbeats, error)

    def _note_failure(self, heartbeats: HeartbeatStore, error: BaseException) -> None:
        problem = redact_text(one_line(error))
        message = f"{heartbeats.describe(self.rank)} failed first: {problem}"
        event, exit_code = FOR_ALL.get(type(error), (Failure.event, Failure.exit_code))
        failure: Failure | None = Failure(self.rank, message, event, exit_code, problem)
        if is_peer_error(error):
            # If a peer was asked to stop while it still prepared the run, no step was done, and no process has failed.
            is_stop = self.stop.requested and self._progress.is_first_step
            stop = Failure(self.rank, BEFORE_THE_FIRST_STEP, "preempted", 75)
            failure = stop if is_stop else find_cause(heartbeats, 2 * GRACE_SECONDS)
        if failure is None:
            return
        first = within(1.0, lambda: heartbeats.report_failure(failure)) or failure
        if is_peer_error(error):
            self.cause = first
            self._record(first)
        else:
            self.is_reported = first.rank != self.rank and first.problem == problem
        _restart_if_it_helps(first)
        heartbeats.stay_for_last_reads()

    def _send_heartbeats(self) -> None:
        assert self.heartbeats is not None
        while not self._over.is_set():
            place, is_waiting = place_of_main_thread()
            # torch raises several kinds of errors for a store that does not answer.
            with suppress(Exception):
                must_stop = self.heartbeats.exchange(
                    is_stopping=self.stop.requested,
                    progress=self._progress.done(),
                    place=place,
                    is_waiting=is_waiting,
                    work=self._progress.work,
                    num_beats=current_work()[1],
                )
                if must_stop:
                    if not self.stop.requested and self.stop.is_preparing and self.stop.is_open:
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                    self.stop.requested = True
            # Several between the two readings that tell whether a process is silent.
            self._over.wait(min(HEARTBEAT_SECONDS, self.timeout_seconds / 8))

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(TICK_SECONDS):
            now = time.monotonic()
            # A pause of the whole process (SIGSTOP, a laptop that slept) does not count.
            elapsed, before = min(now - before, 4 * TICK_SECONDS), now
            if self._ending:
                continue
            self._progress.look(elapsed)
            failure = self._failed_peer() or self._overdue_stop(elapsed) or self._hang()
            if failure is not None:
                self._end(failure)

    def _watch_collectives(self, is_watched: bool = True) -> None:
        """Replace the timeout of collectives by this watchdog, which waits for work and names the process that hangs.

        The groups of a mesh are made after the start.
        """
        if self.heartbeats is not None:
            from accel_train.runtime.process_group import COLLECTIVE_TIMEOUT_SECONDS, WATCHED_SECONDS, limit_collectives

            # The process group is already gone.
            with suppress(RuntimeError, ValueError):
                limit_collectives(WATCHED_SECONDS if is_watched else COLLECTIVE_TIMEOUT_SECONDS)

    def _failed_peer(self) -> Failure | None:
        """Return the failure of a peer, after this process has had time to fail in a collective."""
        heartbeats = self.heartbeats
        # Processes that stop before the first step are not waited for.
        if heartbeats is None or (self.stop.requested and self.stop.is_preparing):
            return None
        failure = heartbeats.known_failure or lost_peer(heartbeats, self._progress.idle_seconds)
        # Count ticks instead of seconds. If the machine was too busy for this thread, the loop has not had the time
        # either.
        self._alarmed = 0.0 if failure is None else self._alarmed + TICK_SECONDS
        return failure if self._alarmed > GRACE_SECONDS else None

    def _overdue_stop(self, elapsed: float) -> Failure | None:
        """Return why a stop request has no effect. Ending here is better than being killed without a message."""
        if not self.stop.requested:
            return None
        self._since_stop += elapsed
        self._since_insisted += elapsed if self.stop.insisted else 0.0
        if self._since_insisted > GRACE_SECONDS:
            return Failure(self.rank, INTERRUPTED_MESSAGE, exit_code=130)
        if self.stop.is_preparing and self._since_stop > STOP_SECONDS / 3:
            return Failure(self.rank, BEFORE_THE_FIRST_STEP, "preempted", 75)
        progress = self._progress
        allowed = STOP_SECONDS if progress.is_first_step else max(STOP_SECONDS, 3 * progress.longest_idle_seconds)
        is_moving = progress.phase() == "save" or min(progress.idle_seconds, self._since_stop) <= allowed
        if is_moving or not progress.has_begun:
            return None
        message = (
            f"asked to stop, and for {self._since_stop:.0f} s nothing has moved (rank {self.rank} "
            f"{progress.describe()}): what came after the last checkpoint is not saved; run the same command again to "
            "resume"
        )
        return Failure(self.rank, message, "preempted", 75)

    def _hang(self) -> Failure | None:
        """Return which rank hangs, if no process did a step in time.

        While others make progress or work outside of steps, this process waits.
        """
        progress, heartbeats = self._progress, self.heartbeats
        if progress.idle_seconds <= self.timeout_seconds / 2:
            self._halfway, self._noted_seconds = None, self.timeout_seconds
            return None
        if progress.work and (heartbeats is None or not place_of_main_thread()[1]):
            self._note_work()
            self._halfway = None
            return None
        if self._halfway is None and heartbeats is not None:
            self._halfway = within(3.0, heartbeats.look) or {}
        timeout = self.timeout_seconds * (FIRST_STEP_ALLOWANCE if progress.is_first_step else 1)
        if not progress.has_begun:
            timeout = max(timeout, START_SECONDS)
        if progress.idle_seconds <= timeout:
            return None
        culprit, hung, hosts = self.rank, f"rank {self.rank} {progress.describe()}", list[str]()
        if heartbeats is not None:
            before, after = self._halfway or {}, within(3.0, heartbeats.look) or {}
            is_busy = any(after[rank].is_busy_since(before[rank]) for rank in before.keys() & after.keys())
            if is_busy or heartbeats.leaves_hang_to_rank_0(before, after):
                progress.idle_seconds, self._halfway = timeout / 2, None
                return None
            hung_ranks = find_hung(heartbeats, before, after)
            hung = "; ".join(f"{heartbeats.describe(rank)} {what}" for rank, what in hung_ranks.items()) or hung
            culprit, hosts = next(iter(hung_ranks), culprit), heartbeats.hosts(hung_ranks)
        stacks = f"stacks are in {self.output_dir}/stacks-rank-*.txt"
        message = f"no step for {timeout:g} s (guard.hang_timeout_seconds): {hung}; {stacks}"
        return Failure(culprit, message, "hang", hosts=hosts)

    def _note_work(self) -> None:
        """Print what this process works on, once per timeout, then each time that has doubled."""
        seconds = self._progress.idle_seconds
        if seconds > self._noted_seconds and self._progress.has_begun:
            self._noted_seconds = 2 * seconds
            text = f"note: {self.who}{self._progress.work} has taken {seconds:.0f} s; the run waits for it\n"
            with suppress(OSError):
                os.write(2, text.encode())

    def _end(self, failure: Failure) -> None:
        """Print the first failure of the run (possibly another one), and end this process."""
        heartbeats = self.heartbeats
        if self._ending or self._over.is_set():
            return
        self._ending = self._ends_process = True
        if heartbeats is not None:
            failure = within(1.0, lambda: heartbeats.report_failure(failure)) or failure
        if self._progress.has_begun and failure.event != "peer_failed":
            write_stacks(self.output_dir / f"stacks-rank-{self.rank}.txt", self.rank)
        with suppress(OSError):
            kind = "preempted" if failure.event == "preempted" else "error"
            os.write(2, f"{kind}: {self.who}{failure.message}\n".encode())
        self._record(failure)
        _restart_if_it_helps(failure)
        if heartbeats is not None:
            heartbeats.end_stopped()
            heartbeats.stay_for_last_reads()
        finish_writing(3.0)
        for call in Watchdog.at_end:
            # This process must end.
            with suppress(Exception):
                call(failure.event, failure.message, failure.exit_code)
        os._exit(failure.exit_code)

    def _record(self, failure: Failure) -> None:
        """Append the failure to the run folder, and its machines to the file that $ACCEL_TRAIN_LOST_HOSTS names."""
        if failure.hosts and (path := os.environ.get(LOST_HOSTS)):
            with suppress(OSError), open(path, "a") as file:
                file.write("".join(f"{host}\n" for host in failure.hosts))
        if (record := self.record) is not None:
            event = utc_event(failure.event, self._progress.done()[0], failure.message, None, {})
            within(2.0, lambda: record(event))


def _restart_if_it_helps(failure: Failure) -> None:
    """Allow the launcher a restart for a run that resumes with smaller micro-batches."""
    if (failure.event, failure.exit_code) == ("out_of_memory", 75):
        allow_restart(failure.message)
