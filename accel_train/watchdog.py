"""Ends a process that would else wait for ever: for a peer that has died or hangs, or for a step that does not come.

Two threads that the training never waits for. One talks to the other processes; the other one looks at the clock, at what
the loop has done since (plain attributes, so a step costs nothing), and at the peers. A process that fails by itself tells
the others, so that all can name the first cause.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from accel_train.peers import Failure, Peers, Standing, behind, is_peer_error, wait_until, within
from accel_train.signals import BEFORE_THE_FIRST_STEP, StopRequest
from accel_train.stacks import finish_writing, one_line, place_of_main_thread, write_stacks
from accel_train.state import CheckpointError, Preempted, TrainingStopped

TICK_SECONDS, BEAT_SECONDS = 0.5, 1.0
GRACE_SECONDS = 1.5
"""A process whose peer is gone mostly fails by itself, at its next collective, and says more than a watchdog can."""
STOP_SECONDS = 15.0
"""How long a stop request may wait for a step: launchers kill after 30 seconds."""
LEFT_SECONDS = 20.0
"""How long to wait where a peer has ended in good order, and this process still has something to do."""
JOIN_SECONDS = 2.0
"""How long whoever closes the watchdog waits for each of its threads to be through with what it does."""
COLLECTIVE_ALLOWANCE = 2
"""A collective may wait for so many times as long as a step may take."""
FIRST_STEPS_ALLOWANCE = 3
"""The first step of a sitting, and what follows the last, may take so many times as long: one compiles, the other writes."""
AGREED = (TrainingStopped, CheckpointError, Preempted)
"""All processes raise these at the same point, each for itself."""


class Watchdog:
    """Watches over this process while it is open; `peers` is none where it is alone."""

    current: ClassVar["Watchdog | None"] = None
    """Of this process: the last one that was opened."""

    def __init__(self, stop: StopRequest, output_dir: Path, timeout_seconds: float, peers: Peers | None) -> None:
        self.stop, self.output_dir, self.timeout_seconds, self.peers = stop, output_dir, timeout_seconds, peers
        self.rank = 0 if peers is None else peers.rank
        self.first_cause: str | None = None
        """Why this process fails, where another one failed first."""
        self.record: Callable[[Mapping[str, Any]], object] | None = None
        """Adds an event to the run folder, on the main process."""
        self._progress: Callable[[], tuple[int, int]] | None = None
        self._phase: Callable[[], str] = str
        self._last: object = None
        self._idle = self._longest_idle = self._since_stop = self._since_insisted = self._alarmed = 0.0
        self._first_step: int | None = None
        self._failure: Failure | None = None
        self._halfway: dict[int, Standing] | None = None
        self._ending = self._ends_process = self._is_limited = False
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._contact = time.monotonic()

    def watch_steps(self, progress: Callable[[], tuple[int, int]], phase: Callable[[], str]) -> None:
        """From now on steps are to be done: `progress` counts them, and batches evaluated; `phase` is what is done now."""
        if self.peers is not None:
            within(3.0, self.peers.meet)  # by now all have said which processes they are
        self._limit_collectives(FIRST_STEPS_ALLOWANCE * self.timeout_seconds)
        self._idle, self._first_step = 0.0, progress()[0]
        self._phase, self._progress = phase, progress

    def __enter__(self) -> "Watchdog":
        type(self).current = self
        for work in (self._watch, *((self._talk,) if self.peers is not None else ())):
            self._threads.append(threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.note_end(kind, error, trace)
        self._over.set()
        for thread in self._threads:  # one that is within torch when the interpreter ends aborts the process
            thread.join(JOIN_SECONDS)

    def note_end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """This process is on its way out, by an error or not: tell the others, and learn what came first."""
        if self._ends_process:  # it has the word, and must not be cut short
            time.sleep(LEFT_SECONDS)
        if self._ending:
            return
        self._ending = True
        peers = self.peers
        if peers is None:
            return
        if error is None or isinstance(error, AGREED):
            if isinstance(error, Preempted) and self._progress is None:  # by itself: the others have yet to hear of it
                within(1.0, peers.ask_all_to_stop)
                within(
                    3.0, lambda: wait_until(3.0, lambda: peers.num_stopping() >= peers.world_size - len(peers.gone()))
                )
            within(1.0, lambda: peers.leave("" if error is None else one_line(error)))
            return
        if is_peer_error(error):
            failure = self._find_first(peers)
        else:
            failure = Failure(self.rank, f"failed first: {one_line(error)}")
        if failure is not None:
            first = within(1.0, lambda: peers.tell_failure(failure)) or failure
            if first.rank != self.rank and is_peer_error(error):
                self.first_cause = f"{peers.describe(first.rank)} {first.line}"
                self._note("peer_failed", self.first_cause)
            self._let_others_hear(peers)

    def speaks(self) -> bool:
        """Whether it is for this process to tell the user what is wrong: rank 0, or one where rank 0 does not."""
        peers = self.peers
        if peers is None:
            return True
        if self.rank != 0:
            wait_until(3.0, lambda: bool(within(1.0, peers.is_told)) or 0 in peers.gone())
            if within(1.0, peers.is_told):
                return False
        claimed = within(1.0, peers.claim_word)
        if (
            claimed is None
        ):  # the store is gone, mostly with rank 0: better said twice, by another machine too, than never
            return all(peers.state(rank) in ("", "X", "T", "t") for rank in range(self.rank))
        return claimed

    def see_others_off(self) -> None:
        """The end of rank 0 may be that of the store, where the others look whether the user has been told."""
        peers = self.peers
        if peers is not None and self.rank == 0:
            wait_until(2.0, lambda: len(peers.gone()) == peers.world_size - 1)

    def _talk(self) -> None:
        """Tell the others where this process stands, and hear what they say."""
        peers, beat, has_told_stop, has_heard = self.peers, 0, False, False
        assert peers is not None
        while not self._over.is_set():
            beat += 1
            try:
                peers.meet()
                place, waits = place_of_main_thread()
                progress = self._progress() if self._progress is not None else (0, 0)
                peers.say(Standing(beat, progress, place, waits))
                if not has_told_stop and (self.stop.requested or peers.is_stop_asked()):
                    peers.ask_all_to_stop()
                    peers.note_stopping()
                    has_told_stop = True
                    self._stop_as_others()
                if not has_heard and (failure := peers.failure()) is not None:
                    self._failure, has_heard = failure, True
                    peers.note_heard()
            except Exception:  # torch has several kinds for a store that does not answer
                if time.monotonic() - self._contact > LEFT_SECONDS:
                    return
            else:
                self._contact = time.monotonic()
            self._over.wait(BEAT_SECONDS)

    def _stop_as_others(self) -> None:
        """Some process was asked to stop: this one has heard of it, if it is not the one itself."""
        if not self.stop.requested and self.stop.is_preparing and self.stop.is_open:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        self.stop.requested = True

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(TICK_SECONDS):
            now = time.monotonic()
            # After a pause of the whole process (SIGSTOP, a laptop that slept) the clock begins where it stood.
            elapsed, before = min(now - before, 4 * TICK_SECONDS), now
            if not self._ending:
                self._look_at_progress(elapsed)
                self._look_at_peers(elapsed)
                self._look_at_stop(elapsed)
                self._look_for_hang()

    def _look_at_progress(self, elapsed: float) -> None:
        seen = None if self._progress is None else (self._progress(), self._phase())
        if seen == self._last:
            self._idle += elapsed
            return
        if not self._is_first_step:
            if not self._is_limited:
                self._limit_collectives(self.timeout_seconds)
                self._is_limited = True
            self._longest_idle = max(self._longest_idle, self._idle)
        self._last, self._idle, self._halfway = seen, 0.0, None

    def _limit_collectives(self, seconds: float) -> None:
        """Let none wait for much longer than this watchdog does, which is to come first: it names who is waited for."""
        if self.peers is not None:
            from accel_train.precision import limit_collectives

            with suppress(RuntimeError, ValueError):  # the group is gone already
                limit_collectives(COLLECTIVE_ALLOWANCE * seconds)

    @property
    def _is_first_step(self) -> bool:
        return self._progress is None or self._progress()[0] == self._first_step

    def _look_at_peers(self, elapsed: float) -> None:
        """A peer that has failed, or is gone: give this process time to fail by itself, and then end it."""
        peers = self.peers
        failure = peers and (self._failure or self._found_gone(peers))
        is_stopping = self.stop.requested and self.stop.is_preparing  # as they do: there is nothing to wait for
        if not peers or not failure or failure.rank == self.rank or is_stopping:
            self._alarmed = 0.0
            return
        self._alarmed += elapsed
        if self._alarmed > GRACE_SECONDS:
            self._end(5, f"{peers.describe(failure.rank)} {failure.line}", failure)

    def _found_gone(self, peers: Peers) -> Failure | None:
        for rank in peers.gone():
            left = within(1.0, lambda rank=rank: peers.has_left(rank))  # type: ignore[misc]
            if left is None:
                return Failure(
                    rank, "is gone without a word: killed (has the host run out of memory?), or it ended itself"
                )
            if self._idle > LEFT_SECONDS:
                return Failure(rank, f"has ended, and this process waits for it{left and f': {left}'}")
        if time.monotonic() - self._contact > LEFT_SECONDS and self._idle > LEFT_SECONDS:
            return Failure(0, "does not answer: it may hold the store of this run, which is lost")
        return None

    def _find_first(self, peers: Peers) -> Failure | None:
        """What made a collective fail: somebody has said so, or is gone."""
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        while time.monotonic() < deadline:
            if (told := self._failure or within(1.0, peers.failure)) is not None:
                return told
            if (gone := self._found_gone(peers)) is not None:
                return gone
            for rank in peers.gone():
                if left := within(1.0, lambda rank=rank: peers.has_left(rank)):  # type: ignore[misc]
                    return Failure(rank, f"has ended: {left}")
            time.sleep(0.1)
        return None

    def _look_at_stop(self, elapsed: float) -> None:
        """A stop request that is not carried out: better to end here than to be killed without a word."""
        if not self.stop.requested:
            return
        self._since_stop += elapsed
        if self.peers is not None and (why := within(1.0, self.peers.given_up)) is not None:
            if self._progress is not None:
                self._write_stacks(aloud=False)
            self._end(75, why)
        self._since_insisted += elapsed if self.stop.insisted else 0.0
        if self._since_insisted > GRACE_SECONDS:
            self._end(130, "interrupted; run the same command to go on from the last checkpoint")
        if self.stop.is_preparing and self._since_stop > STOP_SECONDS / 3:
            self._end(75, BEFORE_THE_FIRST_STEP)
        allowed = STOP_SECONDS if self._is_first_step else max(STOP_SECONDS, 3 * self._longest_idle)
        if self._progress is not None and min(self._idle, self._since_stop) > allowed and self._phase() != "save":
            self._write_stacks()
            steps, _ = self._progress()
            place, _ = place_of_main_thread()
            self._end(
                75,
                f"asked to stop, and for {self._since_stop:.0f} s nothing has moved (rank {self.rank} has done step {steps}, "
                f"and is in {place}): what came after the last checkpoint is not saved; run the same command again to go on",
            )

    def _look_for_hang(self) -> None:
        if self._progress is None:
            return
        timeout = self.timeout_seconds * (FIRST_STEPS_ALLOWANCE if self._is_first_step else 1)
        if self._idle > timeout / 2 and self._halfway is None and self.peers is not None:
            self._halfway = within(3.0, self.peers.standings) or {}
        if self._idle > timeout:
            self._judge_hang(timeout)

    def _judge_hang(self, timeout: float) -> None:
        """Nothing has moved here. Where it has elsewhere this process only waits; else name who is behind, and end."""
        peers, before, names = self.peers, self._halfway or {}, {}
        if peers is not None:
            after = within(3.0, peers.standings)
            others = [rank for rank in before if after and rank in after and rank != self.rank]
            if after and any(after[rank].progress != before[rank].progress for rank in others):
                self._idle, self._halfway = timeout / 2, None
                return
            names = behind(peers, before, after or {})
        self._write_stacks()
        said = "; ".join(f"{peers.describe(rank)} {what}" for rank, what in names.items()) if peers and names else ""
        place, _ = place_of_main_thread()
        steps, _ = self._progress() if self._progress is not None else (0, 0)
        said = said or f"rank {self.rank} has done step {steps}, and is in {place}"
        line = f"no step for {timeout:g} s (guard.hang_timeout_seconds): {said}; stacks are in {self.output_dir}/stacks-rank-*.txt"
        culprit = next((rank for rank in names if rank != self.rank), self.rank)
        self._end(5, line, Failure(culprit, f"hangs: {said}"))

    def _end(self, code: int, text: str, failure: Failure | None = None) -> None:
        """Say why, once for all processes, and end this one."""
        peers = self.peers
        if self._ending or self._over.is_set():
            return
        self._ending = self._ends_process = True
        if failure is not None and "hangs: " in failure.line:
            self._write_stacks(aloud=False)
        if peers and code == 75:
            within(1.0, lambda: peers.give_up_stopping(text))
        told = peers and failure and within(1.0, lambda: peers.tell_failure(failure))
        if self.speaks():
            with suppress(OSError):
                os.write(2, f"{'preempted' if code == 75 else 'error'}: {text}\n".encode())
        self._note("preempted" if code == 75 else "hang" if "hang_timeout" in text else "peer_failed", text)
        if peers and failure:
            self._kill_stopped(peers)
            if told:
                self._let_others_hear(peers)
        self.see_others_off()
        finish_writing(3.0)
        os._exit(code)

    def _let_others_hear(self, peers: Peers) -> None:
        """Stay until all who can have heard of the failure: the store, and so the cause, may go with this process."""
        within(3.0, lambda: wait_until(3.0, lambda: peers.num_heard() >= peers.world_size - len(peers.gone())))

    def _kill_stopped(self, peers: Peers) -> None:
        """End processes of this run and machine that are stopped: no signal reaches them, and the launcher waits for them."""
        for rank in range(peers.world_size):
            address = peers.address(rank)
            if address is not None and rank != self.rank and address.state() == "T":
                with suppress(OSError):
                    os.kill(address.pid, signal.SIGKILL)

    def _write_stacks(self, *, aloud: bool = True) -> None:
        write_stacks(self.output_dir / f"stacks-rank-{self.rank}.txt", self.rank, aloud=aloud)

    def _note(self, kind: str, text: str) -> None:
        record = self.record
        if record is not None:
            from accel_train.observe.ledger import utc_event

            steps, _ = self._progress() if self._progress is not None else (0, 0)
            within(2.0, lambda: record(utc_event(kind, steps, text, None, {})))
