"""`python -m accel_train.torchrun ...`: torchrun, fit for clusters: it ends with the exit code of the run, and is told to stop by SIGUSR1 too.

The same arguments and PET_* variables as torchrun's. Six things differ. torchrun ends with 1 whatever its processes ended
with; a scheduler that is to start a preempted run again must see 75. torchrun dies at once of a SIGUSR1, which SLURM sends
before a time limit, and leaves its processes behind. torchrun spends its restarts (`--max-restarts`) on a recipe that is wrong
or a model that does not fit as well, which no restart mends, and on a run that was preempted on another machine, which it then
waits for. torchrun ends a run whose terminal is closed, under `nohup` too. And here a machine that was lost and is started again
can join the others.
"""

import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

HANDLED = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SHUTDOWN_SECONDS = 600
"""How long processes that were asked to stop may save; torchrun's own 30 s are short for a large model. A run ends by itself
where nothing moves, and a scheduler that waits no longer kills sooner."""
FINAL = (2, 3, 4, 6)
"""Exit codes that the same command would end with again: bad recipe, stopped by the guard, checkpoint or disk, out of memory
with the smallest micro-batches."""
PREEMPTED, PEER, INTERRUPTED = 75, 5, 130


def stops() -> list[signal.Signals]:
    """The signals that ask to stop; without SIGHUP where it is ignored (`nohup`): torchrun's handler would end the run."""
    return [number for number in STOPS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def exit_code_of(codes: Collection[int]) -> int:
    """What a job ends with, whose processes ended so (as of `subprocess`: -9 is a SIGKILL): the code that says most about why.

    A process that failed by itself speaks for all. Where none did, the others ended because of one that was killed, or
    were ended by torchrun: a peer failed. Preempted is what all were.
    """
    failed = [code for code in codes if code > 0 and code not in (PREEMPTED, PEER)]
    for code in FINAL:
        if code in failed:
            return code
    if failed:
        return failed[0]
    if all(code == 0 for code in codes):
        return 0
    return PREEMPTED if all(code in (0, PREEMPTED) for code in codes) else PEER


def exit_code_when_stopped(number: int, codes: Collection[int]) -> int:
    """What a job ends with that a signal has stopped: run it again, unless its processes were done or say what is wrong."""
    code = exit_code_of(codes)
    if codes and code in (0, *FINAL):
        return code
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


@contextmanager
def heard_afterwards() -> Iterator[None]:
    """A signal to stop that comes inside is handled at the end: processes are stopped there, and others may be started next."""
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda each, _: came.append(each)) for number in stops()}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    for number in came[:1]:
        signal.raise_signal(number)


def run(arguments: Sequence[str]) -> int:
    """Start the processes as torchrun would, and wait for them; returns the exit code of the run."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher import api

    ended: list[int] = []

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if exit_code_of(_codes(result.failures.values())) in (*FINAL, PREEMPTED):
                self._remaining_restarts = 0  # preempted: another machine was told to go, and would be waited for
            return result

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            with heard_afterwards():
                super()._shutdown()

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            for number in stops():  # asked once is enough: they are saving
                with suppress(ValueError):
                    signal.signal(number, signal.SIG_IGN)
            super()._shutdown(death_sig, timeout)
            if isinstance(self._pcontext, SubprocessContext):
                handlers = self._pcontext.subprocess_handlers.values()
                ended[:] = [handler.proc.poll() or 0 for handler in handlers]

    api.LocalElasticAgent = Agent  # type: ignore[misc]  # torchrun has no other place to say so
    handled = f"{HANDLED},SIGHUP" if signal.SIGHUP in stops() else HANDLED
    arguments = [f"--signals-to-handle={handled}", f"--shutdown-timeout={SHUTDOWN_SECONDS}", *arguments]
    if torchrun.parse_args(arguments).rdzv_backend == "c10d":
        # Else a machine that is started again waits for ever: the others keep the store of the first time (torch 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun.main(arguments)
    except ChildFailedError as error:
        return exit_code_of(_codes(error.failures.values()))
    except SignalException as error:
        return exit_code_when_stopped(error.sigval, ended)
    except RendezvousError as error:
        # The store went with the machine that holds it, which may have been preempted: these processes know more.
        if (code := exit_code_of(ended)) not in (0, PEER):
            return code
        print(f"error: the machines of this run do not meet: {error}", file=sys.stderr)
        return PEER
    return 0


def _codes(failures: "Collection[ProcessFailure]") -> list[int]:
    return [failure.exitcode for failure in failures]


def main() -> None:
    """The command; a signal before there are any processes ends it as it would end them."""
    for number in stops():
        signal.signal(number, lambda *_: os._exit(PREEMPTED))
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
