"""Runs of several processes that begin at once: forked from one process that has already imported torch and
accel_train.

`run_forked(["run", "recipe.yaml"], 2, folder=tmp_path)` starts two ranks as torchrun would (RANK, WORLD_SIZE, ...), 3
seconds sooner. Each writes `rank-R.out` and `rank-R.err` into `folder`, and counts as ended once `rank-R.exit` is
there.
"""

import faulthandler
import gc
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_train.runtime.launcher import free_port as free_port

TESTS = Path(__file__).parent.parent
PRELOADED = (
    "accelerate",
    "deepspeed",
    "pandas",
    "peft",
    "sklearn.linear_model",
    "torch.distributed",
    "accel_train.cli.main",
    "accel_train.training.train",
    "accel_train.tasks.causal_lm.task",
)
PATIENCE_SECONDS = 300.0
"""Time after which a run hangs. A model that compiles takes minutes if other tests have the cores."""
_server: "subprocess.Popen[str] | None" = None


class Forked:
    """The processes of one run."""

    def __init__(self, pids: Sequence[int], folder: Path) -> None:
        self.pids, self.folder = list(pids), folder

    def kill(self, rank: int | None, number: signal.Signals) -> None:
        """Send a signal to one process, or (None) to all."""
        for each in range(len(self.pids)) if rank is None else [rank]:
            if self.exit_code(each) is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pids[each], number)

    def exit_code(self, rank: int) -> int | None:
        """How it ended: as of `subprocess`, so -9 is a SIGKILL; None while it runs."""
        with suppress(FileNotFoundError, ValueError):
            return int((self.folder / f"rank-{rank}.exit").read_text())
        return None

    def exit_codes(self) -> list[int | None]:
        """Of all processes."""
        return [self.exit_code(rank) for rank in range(len(self.pids))]

    def wait(self, timeout_seconds: float = PATIENCE_SECONDS, *, stop_at_failure: bool = False) -> list[int]:
        """Until all have ended: their exit codes. Those that have not by then are killed, and it is an error.

        `stop_at_failure` asks the others to end (SIGTERM) when one has failed, as torchrun does.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            codes = [code for code in self.exit_codes() if code is not None]
            if len(codes) == len(self.pids):
                return codes
            if stop_at_failure and any(codes):
                self.kill(None, signal.SIGTERM)
                stop_at_failure = False
            time.sleep(0.01)
        codes_now = self.exit_codes()
        self.end()
        raise AssertionError(
            f"not over after {timeout_seconds:g} s: {codes_now}\n"
            + "\n".join(self.stderr(rank)[-3000:] for rank in range(len(self.pids)))
        )

    def expect(self, code: int, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until all have ended, each with `code`; the error shows what each of the others wrote."""
        codes = self.wait(timeout_seconds)
        wrong = [rank for rank, found in enumerate(codes) if found != code]
        # A crash ends with a list of 190 modules.
        said = {rank: self.stderr(rank).partition("\nExtension modules: ")[0][-5000:] for rank in wrong}
        assert not wrong, f"{codes}\n" + "\n".join(f"process {rank}:\n{words}" for rank, words in said.items())

    def first_failure(self) -> int:
        """The exit code of the process that failed first, which is what torchrun says; 0 where none did."""
        ended = sorted(self.folder.glob("rank-*.exit"), key=lambda path: path.stat().st_mtime_ns)
        return next(filter(None, (int(path.read_text()) for path in ended)), 0)

    def end(self) -> None:
        """Kill what is left."""
        self.kill(None, signal.SIGKILL)

    def stderr(self, rank: int) -> str:
        """What a process has written to standard error so far."""
        path = self.folder / f"rank-{rank}.err"
        return path.read_text(errors="replace") if path.exists() else ""


def run_forked(
    argv: Sequence[str],
    world_size: int,
    *,
    folder: Path,
    timeout_seconds: float = PATIENCE_SECONDS,
    preload: Sequence[str] = (),
    cwd: str = ".",
    program: Path | None = None,
    **extra: str,
) -> Forked:
    """Start `accel-train ARGV`, or a Python file, in `world_size` processes, each with its number for `{rank}`, in
    `cwd` as well;
    `extra` are environment variables, `preload` are modules that need not be imported in each process."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*.*"):
        old.unlink()
    pids = folder / "pids.json"
    pids.unlink(missing_ok=True)
    # A log of a process has every choice.
    verbose = ["--verbose"] if program is None and argv[0] == "run" else []
    job = {
        "argv": [*argv[:1], *verbose, *argv[1:]],
        "world_size": world_size,
        "folder": str(folder),
        "port": free_port(),
        "extra": extra,
        "preload": list(preload),
        "cwd": cwd,
        "program": program and str(program),
    }
    server = started_server()
    assert server.stdin is not None
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    deadline = time.monotonic() + timeout_seconds
    while not pids.exists():
        assert server.poll() is None, "the process that forks has ended"
        assert time.monotonic() < deadline, "nothing was forked"
        time.sleep(0.005)
    return Forked(json.loads(pids.read_text()), folder)


def started_server() -> "subprocess.Popen[str]":
    """The process that forks: one for all tests of this process; it ends when its standard input does."""
    global _server
    if _server is None or _server.poll() is not None:
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTEST_"))}
        environment = {**keep, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(TESTS.parent)
        _server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, env=environment)
    return _server


def serve() -> None:
    """Fork what standard input asks for, a line of JSON a run."""
    import importlib

    from tqdm import tqdm

    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in PRELOADED:
        # Only so that a run begins sooner. What is not installed, a run that needs it will say.
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # tqdm's own lock is a semaphore that all forked processes would share: one that is killed while it holds it stops
    # the rest.
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0  # no thread that could hold it while this process forks
    _warm_up()
    assert "/dev/shm/sem." not in Path("/proc/self/maps").read_text(), "a semaphore is shared with forked processes"
    gc.collect()
    gc.freeze()  # a collection in a forked process would touch, and so copy, every page of this one
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        job = json.loads(line)
        for name in job["preload"]:
            importlib.import_module(name)
        if os.fork() == 0:
            os._exit(_run_job(job))


def end_group() -> None:
    """End the process group of a program that has trained, if there is one, and let no process go before the rest.

    No reducer of DDP may be left, which could be the last owner of the group: freeing both would hang (torch 2.13).
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is DistributedDataParallel and each.reducer is not None]
    assert not left, "a run has ended, and DDP still owns the process group"
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _warm_up() -> None:
    """Do once what is the same in every run: transformers' table of weight names, the report's template."""
    from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

    from accel_train.report.report import page_template

    assert AutoConfig  # transformers loads what is named, and not before
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=8))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
    page_template()


def _run_job(job: dict[str, Any]) -> int:
    """In a process of its own: fork the ranks, and write down how each of them ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    folder = Path(job["folder"])
    ranks: dict[int, int] = {}
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            os._exit(_run_rank(job, rank))
        ranks[pid] = rank
    _write_whole(folder / "pids.json", json.dumps(list(ranks)))
    while ranks:
        pid, status = os.wait()
        _write_whole(folder / f"rank-{ranks.pop(pid)}.exit", str(os.waitstatus_to_exitcode(status)))
    return 0


def _run_rank(job: dict[str, Any], rank: int) -> int:
    folder, size = Path(job["folder"]), job["world_size"]
    for number, kind in ((0, "in"), (1, "out"), (2, "err")):
        path = os.devnull if kind == "in" else str(folder / f"rank-{rank}.{kind}")
        fd = os.open(path, os.O_RDONLY if kind == "in" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    if size > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]),
        )  # fmt: skip
    os.environ.update(job["extra"])
    os.chdir(job["cwd"].replace("{rank}", str(rank)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from accel_train.cli.main import program

    sys.argv = [job["program"] or "accel-train", *(word.replace("{rank}", str(rank)) for word in job["argv"])]
    try:
        if job["program"]:
            faulthandler.enable(2)
            runpy.run_path(job["program"], run_name="__main__")
            return 0
        program()
    except SystemExit as asked:
        return asked.code if isinstance(asked.code, int) else 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError, ValueError):
            sys.stderr.flush()
    raise AssertionError("program() returns to nobody")


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_suffix(".aside")
    aside.write_text(text)
    aside.rename(path)


if __name__ == "__main__":
    serve()
