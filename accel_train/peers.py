"""What the processes of a run know of each other beside their collectives: who lives, where each one stands, who failed first.

It goes through the process group's store, over a connection of its own, from threads that no collective can block.
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

STORE_SECONDS = 5.0
"""How long the store may take to answer, before its host counts as gone."""


@dataclass(frozen=True)
class Standing:
    """Where a process stands, as it last said itself."""

    beat: int
    """Counts up: a process whose number stays has no thread that runs."""
    progress: tuple[int, int] = (0, 0)
    """Steps done, and batches evaluated since."""
    place: str = ""
    """The line of code that its main thread is in."""
    waits: bool = False
    """It waits there for other processes."""


@dataclass(frozen=True)
class Failure:
    """What went wrong first, as the first process that noticed it has put it."""

    rank: int
    """Of the process that it went wrong on."""
    line: str


@dataclass(frozen=True)
class Address:
    """Which process a rank is: enough to tell whether it lives, from the same machine."""

    pid: int
    host: str
    namespace: str
    started: str

    def state(self) -> str:
        """Of the process, as /proc has it: R running, S sleeping, T stopped ...; X where there is no such process any more,
        and nothing where this machine cannot know."""
        if (self.host, self.namespace) != _machine():
            return ""
        facts = _process_facts(self.pid)
        return "X" if facts is None or facts[1] != self.started or facts[0] in "ZX" else facts[0]


def own_address() -> Address:
    """Of this process."""
    facts = _process_facts(os.getpid())
    return Address(os.getpid(), *_machine(), facts[1] if facts else "")


def _machine() -> tuple[str, str]:
    try:
        return socket.gethostname(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""  # no Linux: nothing can be known of others


def _process_facts(pid: int) -> tuple[str, str] | None:
    """State and start time (proc(5)): a number that is given again belongs to another process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def is_peer_error(error: BaseException) -> bool:
    """Whether an exception says that another process is gone, and nothing about why."""
    torch = sys.modules.get("torch")  # what torch raises can only come up where it has been imported
    if torch is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """What the call returns; None where it fails, or is not back by then (it is left behind)."""
    answer: list[T] = []

    def run() -> None:
        with suppress(Exception):
            answer.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


class Connection:
    """The store, as long as it answers: torch writes a page to stderr for each question to one that is lost."""

    def __init__(self, store: Any, is_host_away: Callable[[], bool]) -> None:
        self._store, self._is_host_away = store, is_host_away
        self._is_lost = False

    def ask(self, question: str, *arguments: Any) -> Any:
        """Call a method of the store.

        Raises:
            ConnectionError: the store is lost, or the process that holds it is stopped.
        """
        if self._is_lost or self._is_host_away():
            raise ConnectionError("the store does not answer")
        try:
            return getattr(self._store, question)(*arguments)
        except Exception as error:
            self._is_lost |= type(error).__name__ == "DistNetworkError"
            raise


class Peers:
    """The other processes of a run, and what is said among them; `store` is a torch.distributed store of their own.

    A method that asks the store waits for its answer: call it within a time limit, or from a thread that may wait.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        # torchrun's agent holds the store, and outlives the processes; else rank 0 does.
        is_with_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._ask = Connection(store, lambda: is_with_rank_0 and self.state(0) in ("X", "T", "t")).ask
        self._addresses: dict[int, Address] = {}

    def introduce(self) -> None:
        """Tell the others which process this is."""
        self._ask("set", f"address/{self.rank}", json.dumps(asdict(own_address())))

    def meet(self) -> None:
        """Learn which processes the others are, as far as they have said so."""
        for rank in range(self.world_size):
            if rank not in self._addresses and self._ask("check", [f"address/{rank}"]):
                self._addresses[rank] = Address(**json.loads(self._ask("get", f"address/{rank}")))

    def say(self, standing: Standing) -> None:
        """Tell the others where this process stands."""
        self._ask("set", f"standing/{self.rank}", json.dumps(asdict(standing)))

    def standings(self) -> dict[int, Standing]:
        """Where each process said that it stands."""
        keys = {rank: f"standing/{rank}" for rank in range(self.world_size)}
        said = {rank: json.loads(self._ask("get", key)) for rank, key in keys.items() if self._ask("check", [key])}
        return {rank: Standing(**{**one, "progress": tuple(one["progress"])}) for rank, one in said.items()}

    def ask_all_to_stop(self) -> None:
        """This process was asked to stop, so all are."""
        self._ask("set", "stop", str(self.rank))

    def is_stop_asked(self) -> bool:
        """Whether some process was asked to stop."""
        return bool(self._ask("check", ["stop"]))

    def note_stopping(self) -> None:
        """This process knows that all are asked to stop."""
        self._ask("add", "stopping", 1)

    def num_stopping(self) -> int:
        """How many processes know of it."""
        return int(self._ask("add", "stopping", 0))

    def tell_failure(self, failure: Failure) -> Failure:
        """Say what went wrong; returns what did first, which another process may have said before."""
        first = self._ask("compare_set", "failure", "", json.dumps(asdict(failure)))
        return Failure(**json.loads(first))

    def failure(self) -> Failure | None:
        """What went wrong first, if anything did."""
        return Failure(**json.loads(self._ask("get", "failure"))) if self._ask("check", ["failure"]) else None

    def note_heard(self) -> None:
        """This process knows of the failure."""
        self._ask("add", "heard", 1)

    def num_heard(self) -> int:
        """How many processes know of it."""
        return int(self._ask("add", "heard", 0))

    def give_up_stopping(self, why: str) -> None:
        """The stop request is not carried out: all end where they are."""
        self._ask("set", "given up", why)

    def given_up(self) -> str | None:
        """Why a process has given up carrying out the stop request; None where none has."""
        return str(self._ask("get", "given up").decode()) if self._ask("check", ["given up"]) else None

    def leave(self, line: str) -> None:
        """This process ends, and that is no failure; `line` says why, where all have agreed on it."""
        self._ask("set", f"left/{self.rank}", line)

    def has_left(self, rank: int) -> str | None:
        """What a process said as it left; None where it has not."""
        key = f"left/{rank}"
        return self._ask("get", key).decode() if self._ask("check", [key]) else None

    def claim_word(self) -> bool:
        """Whether it is for this process to tell the user: the first one that asks."""
        return int(self._ask("add", "told", 1)) == 1

    def is_told(self) -> bool:
        """Whether some process has told the user."""
        return int(self._ask("add", "told", 0)) > 0

    def address(self, rank: int) -> Address | None:
        """Which process a rank is, if it has said so."""
        return self._addresses.get(rank)

    def state(self, rank: int) -> str:
        """Of a process, as `Address.state`."""
        address = self._addresses.get(rank)
        return "" if address is None else address.state()

    def gone(self) -> list[int]:
        """Processes of this machine that have ended, whyever."""
        return [rank for rank in sorted(self._addresses) if rank != self.rank and self.state(rank) == "X"]

    def describe(self, rank: int) -> str:
        """A process by its rank, and where to find it: `launch/slurm.sh` reads the name of the machine from this."""
        address = self._addresses.get(rank)
        return f"rank {rank}" if address is None else f"rank {rank} (process {address.pid} on {address.host})"


def behind(peers: Peers, before: dict[int, Standing], after: dict[int, Standing]) -> dict[int, str]:
    """The processes that the others wait for, each with what is known of it: from their standings, some seconds apart.

    Those that give no sign of life; or else those that have come less far; or else, where all have come as far, those that
    do not wait for others. Empty where all are alike. Without standings, because the store does not answer, by what this
    machine knows.
    """
    silent: dict[int, str] = {}
    for rank in range(peers.world_size):
        state = peers.state(rank)
        if state == "X":
            silent[rank] = "has ended"
        elif state in ("T", "t"):
            silent[rank] = "is stopped (SIGSTOP, or a debugger)"
        elif (
            after
            and rank != peers.rank
            and (rank not in after or (rank in before and before[rank].beat == after[rank].beat))
        ):
            silent[rank] = "gives no sign of life"
    if silent:
        return {rank: f"{said}{_where('when it last spoke, ', after.get(rank))}" for rank, said in silent.items()}
    if not after:
        return {0: "does not answer; it holds the store of this run"}
    least = min(standing.progress for standing in after.values())
    slow = {rank: standing for rank, standing in after.items() if standing.progress == least}
    if len(slow) == len(after):
        slow = {rank: standing for rank, standing in slow.items() if not standing.waits}
    if len(slow) == len(after) and len(after) > 1:
        return {}
    return {rank: f"does not go on{_where('', standing)}" for rank, standing in slow.items()}


def _where(when: str, standing: Standing | None) -> str:
    return "" if standing is None else f"; {when}it had done step {standing.progress[0]}, and was in {standing.place}"


_sittings = itertools.count()


def open_peers(rank: int, world_size: int) -> Peers | None:
    """Meet the other processes over the process group's store; None where there are none."""
    import torch.distributed as dist

    sitting = next(_sittings)  # runs of this process: each has its own keys
    if world_size == 1:
        return None
    own = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"accel_train/{sitting}", own)
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    peers = Peers(store, rank, world_size)
    peers.introduce()
    return peers


def wait_until(seconds: float, is_so: Callable[[], bool], every_seconds: float = 0.05) -> bool:
    """Wait until something is so; False where it is not by then."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_seconds)
    return True
