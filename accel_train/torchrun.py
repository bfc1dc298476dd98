"""`python -m accel_train.torchrun ...`: torchrun for clusters, with the same arguments and PET_* variables.

It differs from torchrun in six ways:

- It ends with the exit code of the run, where torchrun ends with 1. A scheduler that restarts preempted runs must see
  75.
- SIGUSR1 stops the run. SLURM sends it before a time limit. torchrun would die immediately and leave its processes
  behind.
- Restarts (`--max-restarts`) are not used for errors that a restart cannot fix: a wrong recipe, or a model that does
  not fit.
- Restarts are not used for a run that was preempted on another machine. torchrun would wait for that machine. (A run
  that ran out of memory and continues with smaller micro-batches is restarted. It also ends with 75.)
- Under `nohup`, a closed terminal does not end the run.
- A machine that was lost and is started again can join the others.
"""

import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from accel_train.runtime.launcher import MAY_RESTART

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

HANDLED = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SHUTDOWN_SECONDS = 600
"""Seconds that processes may save after they were asked to stop. torchrun's default of 30 s is short for a large model.
"""
FINAL = (2, 3, 4, 6)
"""Exit codes with which the same command would end again: bad recipe, stopped by the guard, checkpoint or disk, out of
memory with the smallest micro-batches.
"""
PREEMPTED, PEER, INTERRUPTED = 75, 5, 130


def stops() -> list[signal.Signals]:
    """Return the signals that ask to stop, without an ignored SIGHUP. torchrun's handler would end a `nohup` run."""
    return [number for number in STOPS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def exit_code_of(codes: Collection[int]) -> int:
    """Return the most informative exit code of a job's processes (-9 is a SIGKILL, as in `subprocess`).

    A process that failed determines the code. Without one, the others ended because one was killed or torchrun ended
    them: a peer failed. The job is preempted if all processes were preempted.
    """
    failed = [code for code in codes if code > 0 and code not in (PREEMPTED, PEER)]
    if failed:
        return next((code for code in FINAL if code in failed), failed[0])
    if all(code == 0 for code in codes):
        return 0
    return PREEMPTED if all(code in (0, PREEMPTED) for code in codes) else PEER


def exit_code_when_stopped(number: int, codes: Collection[int]) -> int:
    """Return the exit code of a job that a signal has stopped: run it again, unless it is done or failed for good."""
    code = exit_code_of(codes)
    if codes and code in (0, *FINAL):
        return code
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


@contextmanager
def stops_deferred() -> Iterator[None]:
    """Delay stop signals until the end of the context. Processes are stopped inside, and others may start next."""
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda each, _: received.append(each)) for number in stops()}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    for number in received[:1]:
        signal.raise_signal(number)


def run(arguments: Sequence[str]) -> int:
    """Start the processes as torchrun does, and wait for them; return the exit code of the run."""
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
            failures = result.failures.values()
            code = exit_code_of([failure.exitcode for failure in failures])
            # If another machine was asked to stop, the job is preempted, and a restart would wait for that machine.
            if code in FINAL or (code == PREEMPTED and not any(map(_may_restart, failures))):
                self._remaining_restarts = 0
            return result

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            with stops_deferred():
                super()._shutdown()

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            # The processes are already saving, so further stop signals are ignored.
            for number in stops():
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
        # Otherwise a restarted machine waits forever, because the others keep the store of the first start (torch
        # 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun.main(arguments)
    except ChildFailedError as error:
        return exit_code_of([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        return exit_code_when_stopped(error.sigval, ended)
    except RendezvousError as error:
        # The store was lost with its machine, which may have been preempted. The exit codes of these processes are more
        # reliable.
        if (code := exit_code_of(ended)) not in (0, PEER):
            return code
        print(f"error: the machines of this run cannot connect: {error}", file=sys.stderr)
        return PEER
    return 0


def _may_restart(failure: "ProcessFailure") -> bool:
    """Return whether a process with exit code 75 ran out of memory and may restart (`launcher.allow_restart`).

    Preempted processes also end with 75.
    """
    message = failure.error_file_data.get("message")
    return isinstance(message, dict) and MAY_RESTART in message.get("extraInfo", {})


def main() -> None:
    """Run the command. A signal before any process has started ends it with the exit code of a preemption."""
    for number in stops():
        signal.signal(number, lambda *_: os._exit(PREEMPTED))
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
