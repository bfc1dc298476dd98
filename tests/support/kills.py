"""A run that is killed again and again: one process, all of them, or the launcher; in a save, an
evaluation, anywhere.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.checkpoint.store import check, checkpoint_folders, step_of
from accel_train.observe.run_folder import read_events
from tests.support.processes import Forked, run_forked

POLL_SECONDS = 0.001
ORPHAN_SECONDS = {"rank": 10.0, "group": 10.0, "launcher": 20.0}
"""No process may outlive one that was killed for longer: it ends with a peer; without its launcher
it saves, and ends.
"""
WHO = ("rank", "group", "launcher")
WHERE = {"save": 0.5, "evaluate": 0.1, "load": 0.1, "forward": 0.05, "backward": 0.05, "start": 0.05, "anywhere": 0.15}
"""Where a kill is aimed at, and how often."""
SAVE_SECONDS = 0.05
"""About as long as a save takes on a small model: a kill that is aimed at one comes at a random moment of it, and where
the
save was over by then (a quick disk), at one of the next."""


@dataclass
class Tally:
    """What the kills were, and what they left."""

    kills: Counter[str] = field(default_factory=Counter)
    """By `who` and by `in WHERE`."""
    half_done: int = 0
    """Kills that left a half-written or half-removed checkpoint behind."""
    corrupt: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    finished: int = 0
    """Runs that came to their end."""
    longest_orphan_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def num_kills(self) -> int:
        """All of them."""
        return sum(self.kills[who] for who in WHO)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{self.num_kills} kills in {self.seconds:.0f} s ({kinds}; {self.half_done} left a save half done), "
            f"{len(self.corrupt)} corrupt, {len(self.lost)} lost, {self.finished} runs finished, "
            f"orphans gone after at most {self.longest_orphan_seconds:.1f} s"
        )


class KilledRun:
    """Starts a run of two processes, kills it, looks at what is left, and starts it again."""

    def __init__(self, recipe: Path, run_folder: Path, generator: random.Random, tally: Tally) -> None:
        self.recipe, self.run_folder = recipe, run_folder
        self.root = run_folder / "checkpoints"
        self.generator, self.tally = generator, tally
        self.newest = 0
        """The newest step that was seen published."""

    def kill_until_finished(self, num_kills: int) -> bool:
        """Start and kill until the run has ended by itself, or `num_kills` are done; whether it has ended."""
        while self.tally.num_kills < num_kills:
            if self._start_and_kill():
                return True
        return False

    def finish(self) -> None:
        """Let it go on to its end."""
        forked = self._start({})
        forked.expect(0, 120)

    def _start_and_kill(self) -> bool:
        generator = self.generator
        who = WHO[self.tally.num_kills % 3]
        where = generator.choices([*WHERE], [*WHERE.values()])[0]
        began = time.monotonic()
        if where in ("save", "start", "anywhere"):
            forked = self._start({})
            launcher = self._launcher(forked)
            fell = self._kill_from_outside(forked, launcher, who, where)
        else:
            rank, count = generator.randrange(2), generator.randint(1, 3 if where == "evaluate" else 12)
            aim = {"KILL_PLACE": where, "KILL_COUNT": str(count), "KILL_RANK": str(rank), "KILL_WHO": who}
            forked = self._start(aim)
            launcher = self._launcher(forked)
            fell = self._watch(forked, lambda: self._has_fallen(forked, launcher, who))
        if not fell:
            codes = forked.wait()
            assert codes == [0, 0], f"{who} in {where}: {codes}\n{forked.stderr(0)[-3000:]}\n{forked.stderr(1)[-3000:]}"
            self.tally.finished += 1
            self.tally.seconds += time.monotonic() - began
            return True
        self._bury(forked, launcher, who, where)
        self.tally.kills.update((who, f"in {where}"))
        self._inspect(f"kill {self.tally.num_kills}, {who} in {where}")
        self.tally.seconds += time.monotonic() - began
        return False

    def _start(self, aim: dict[str, str]) -> Forked:
        resumes = len(self._resumes())
        flags = ["--data.num_workers", "1"] if self.generator.random() < 0.1 else []
        self._expected = self.newest, resumes
        torchrun = {"TORCHELASTIC_RUN_ID": "kills"}  # by this a process knows that its parent is torchrun
        folder = self.run_folder.with_name("processes")
        return run_forked(["run", str(self.recipe), *flags], 2, folder=folder, **torchrun, **aim)

    def _launcher(self, forked: Forked) -> int:
        """The process that forked the ranks, and leads their group."""
        for pid in forked.pids:
            with suppress(ProcessLookupError):
                return os.getpgid(pid)
        return 0

    def _kill_from_outside(self, forked: Forked, launcher: int, who: str, where: str) -> bool:
        generator = self.generator
        if where == "save":
            reached = self._stop_in_a_save(forked, generator.randint(1, 3))
        elif where == "start":
            # A process asks for its launcher's death when it begins, and of one that died before it hears nothing.
            reached = self._watch(forked, lambda: who != "launcher" or self._holder() == forked.pids[0])
            time.sleep(generator.uniform(0, 0.4))
        else:
            begun = len(self._resumes())
            reached = self._watch(forked, lambda: len(self._resumes()) > begun)
            time.sleep(generator.uniform(0, 0.4))
        if not reached or any(code is not None for code in forked.exit_codes()):
            return False
        with suppress(ProcessLookupError):
            if who == "group":
                os.killpg(launcher, signal.SIGKILL)
            else:
                os.kill(launcher if who == "launcher" else generator.choice(forked.pids), signal.SIGKILL)
        forked.kill(None, signal.SIGCONT)  # those that are left, where a save was aimed at
        return True

    def _stop_in_a_save(self, forked: Forked, number: int) -> bool:
        """Stop all processes (SIGSTOP) at a random moment of a save, the `number`th one at the earliest; false where
        the run
        has ended before. Only what stands still can be looked at: a kill after a look may come after the save."""
        left_by_others = set(self._half_done())
        seen: set[str] = set()

        def saving() -> bool:
            begun = set(self._half_done()) - left_by_others - seen
            seen.update(begun)
            return bool(begun) and len(seen) >= number

        while self._watch(forked, saving):
            time.sleep(self.generator.uniform(0, SAVE_SECONDS))
            forked.kill(None, signal.SIGSTOP)
            if all(map(_stands_still, forked.pids)) and not seen.isdisjoint(self._half_done()):
                return True
            forked.kill(None, signal.SIGCONT)
        return False

    def _watch(self, forked: Forked, reached: Callable[[], bool]) -> bool:
        """Until something has come about (true), or the run has ended by itself (false)."""
        deadline = time.monotonic() + 120
        while not reached():
            self._note_newest()
            if all(code is not None for code in forked.exit_codes()):
                return reached()
            assert time.monotonic() < deadline, f"nothing happens\n{forked.stderr(0)[-3000:]}"
            time.sleep(POLL_SECONDS)
        return True

    def _has_fallen(self, forked: Forked, launcher: int, who: str) -> bool:
        if who == "rank":
            return signal.SIGKILL in [-(code or 0) for code in forked.exit_codes()]
        return not is_alive(launcher) and (who == "launcher" or not any(map(is_alive, forked.pids)))

    def _bury(self, forked: Forked, launcher: int, who: str, where: str) -> None:
        """Until nothing of the run is left: as torchrun does where a process has died; else by themselves, and soon.

        Of a process that died before it had joined nobody knows but torchrun.
        """
        began = time.monotonic()
        by_themselves = who != "rank" or (self.generator.random() < 0.1 and where != "start")
        if not by_themselves:
            time.sleep(self.generator.uniform(0, 0.2))
            forked.end()
        while any(map(is_alive, [*forked.pids, launcher])):
            alive = time.monotonic() - began
            said = "\n".join(forked.stderr(rank)[-3000:] for rank in range(2))
            assert alive < ORPHAN_SECONDS[who], (
                f"still there {alive:.1f} s after the {who} was killed in {where}\n{said}"
            )
            time.sleep(POLL_SECONDS)
        if by_themselves and who != "group":
            self.tally.longest_orphan_seconds = max(self.tally.longest_orphan_seconds, time.monotonic() - began)

    def _inspect(self, kill: str) -> None:
        """Nothing published may be broken, and nothing that was seen published may be gone."""
        self.tally.half_done += bool(self._half_done())
        statuses = [check(folder) for folder in checkpoint_folders(self.root)]
        self.tally.corrupt += [f"{kill}: {each.path.name}: {each.problem}" for each in statuses if each.problem]
        newest = max((status.step for status in statuses), default=0)
        if newest < self.newest:
            self.tally.lost.append(f"{kill}: step {self.newest} was published, and the newest is {newest}")
        before, resumes = self._expected
        for event in self._resumes()[resumes:]:
            if event["step"] < before:
                self.tally.lost.append(f"{kill}: step {before} was published, and the run went on from {event['step']}")
        self.newest = newest

    def _half_done(self) -> list[str]:
        """Checkpoints that are being written, or taken away."""
        return [name for name in _entries(self.root) if name.startswith((".tmp-step-", ".trash-"))]

    def _note_newest(self) -> None:
        steps = [step_of(folder) or 0 for folder in checkpoint_folders(self.root)]
        self.newest = max([self.newest, *steps])

    def _holder(self) -> int:
        """The process that holds the run folder: both processes have begun when it does."""
        with suppress(FileNotFoundError, ValueError):
            return int(json.loads((self.run_folder / ".lock.holder").read_text())["pid"])
        return 0

    def _resumes(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [event for event in read_events(self.run_folder) if event["event"] in ("start", "resume")]
        return []


def _entries(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has died, and that nobody has asked for, does not."""
    try:
        return _state(Path(f"/proc/{pid}/stat")) not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stands_still(pid: int) -> bool:
    """Wait until each thread of a process that was sent a SIGSTOP has stopped; false where it has died."""
    try:
        while any(_state(task / "stat") not in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()):
            time.sleep(POLL_SECONDS)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def _state(stat: Path) -> str:
    """Of a process or a thread: R, S, T, ... (proc_pid_stat(5))."""
    return stat.read_text().rpartition(")")[2].split()[0]
