"""One sitting of a run in processes of its own: started as a user starts it, watched from outside, killed or stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from accel_train.checkpoint import checkpoint_folders, step_of
from accel_train.launcher import stop_with_parent
from accel_train.observe.ledger import EVENTS_FILE, METRICS_FILE, read_events, read_metrics

POLL_SECONDS = 0.01
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class SittingFailed(Exception):
    """A sitting ended before what was expected of it; `exit_code` is its own."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Sitting:
    """`accel-train run` in `processes` processes, writing to `run_folder`: `with Sitting(...) as sitting:`.

    Nothing of it is left when it is closed.
    """

    def __init__(
        self, what: str, recipe: str | Path, settings: Sequence[str], run_folder: Path, processes: int
    ) -> None:
        self.what, self.run_folder, self.processes = what, run_folder, processes
        self.save_seconds: list[float] = []
        """How long checkpoints took from their first file to their publication, as seen from outside."""
        self.peak_resident_bytes = 0
        """Of all its processes together, in host memory."""
        self._begun_before = self._times_begun()
        self._saving_since: tuple[str, float] | None = None
        self._next_look = 0.0
        self._log = run_folder.with_name(f"{run_folder.name}.{what.replace(' ', '-')}.txt")
        launcher = (
            [] if processes == 1 else ["torch.distributed.run", f"--nproc_per_node={processes}", "--standalone", "-m"]
        )
        words = [sys.executable, "-m", *launcher, "accel_train", "run", str(recipe), *settings]
        words += ["--output_dir", str(run_folder)]
        self.began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = psutil.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER},
                start_new_session=True,
                preexec_fn=stop_with_parent,  # should the one that watches be killed, nothing goes on training
            )

    def __enter__(self) -> "Sitting":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Watch until something has come about.

        Raises:
            SittingFailed: it ended before.
        """
        while not reached():
            if self._process.poll() is not None and not reached():
                raise SittingFailed(f"{self.what}: {self._how_it_ended()}", self._exit_code())
            self._look()
            time.sleep(POLL_SECONDS)
        self._look()

    def begun(self) -> bool:
        """Whether its first step is under way: everything is loaded, built, and restored."""
        return self._times_begun() > self._begun_before

    def at_step(self) -> int:
        """The last step whose outcome it has written down."""
        path = self.run_folder / METRICS_FILE
        if not path.exists():
            return 0
        return max((row["step"] for row in read_metrics(self.run_folder) if row["split"] == "train"), default=0)

    def has_saved(self, step: int) -> bool:
        """Whether the checkpoint of a step is published."""
        return any(step_of(folder) == step for folder in checkpoint_folders(self.run_folder / "checkpoints"))

    def wait_for_save(self, step: int) -> None:
        """Watch until the checkpoint of a step is published.

        Raises:
            SittingFailed: it was refused or could not be written, or the run ended before.
        """

        def is_decided() -> bool:
            return self.has_saved(step) or self._why_not_saved(step) is not None

        self.wait_until(is_decided)
        if not self.has_saved(step):
            raise SittingFailed(f"{self.what}: {self._why_not_saved(step)}", 4)

    def _why_not_saved(self, step: int) -> str | None:
        kinds = ("checkpoint_failed", "checkpoint_refused")
        told = (event["message"] for event in self._events() if event["event"] in kinds and event["step"] == step)
        return next(told, None)

    def kill(self) -> None:
        """SIGKILL to the launcher and to every process, all at once."""
        family = self._family()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=60)
        self._process.wait()

    def stop(self, timeout_seconds: float) -> bool:
        """SIGTERM to the processes that train; whether they were all gone in time."""
        trainers = [self._process] if self.processes == 1 else self._process.children()
        for process in trainers:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([self._process], timeout=timeout_seconds)
        return not alive

    def preempted(self) -> dict[str, Any] | None:
        """What it wrote down when it was asked to stop."""
        return next((event for event in self._events() if event["event"] == "preempted"), None)

    def _times_begun(self) -> int:
        return sum(event["event"] in ("start", "resume") for event in self._events())

    def _events(self) -> list[dict[str, Any]]:
        return read_events(self.run_folder) if (self.run_folder / EVENTS_FILE).exists() else []

    def _family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [*self._process.children(recursive=True), self._process]
        return []

    def _look(self) -> None:
        now, root = time.monotonic(), self.run_folder / "checkpoints"
        aside = (
            next((entry.name for entry in root.iterdir() if entry.name.startswith(".tmp-step-")), None)
            if root.is_dir()
            else None
        )
        if self._saving_since is not None and aside != self._saving_since[0]:
            self.save_seconds.append(now - self._saving_since[1])
            self._saving_since = None
        if aside is not None and self._saving_since is None:
            self._saving_since = aside, now
        if now >= self._next_look:
            self._next_look = now + 0.25
            self.peak_resident_bytes = max(self.peak_resident_bytes, sum(map(_resident_bytes, self._family())))

    def _exit_code(self) -> int:
        """Its own; of several processes, that of the first one to fail, which torchrun tells at the end."""
        code: int = self._process.returncode
        told = re.findall(r"exitcode\s*: (-?\d+)", self._output())
        code = int(told[-1]) if told else code
        return 128 - code if code < 0 else code or 1

    def _how_it_ended(self) -> str:
        lines = self._output().splitlines()
        errors = [line.partition("error: ")[2].strip() for line in lines if line.startswith("error: ")]
        said = "\n".join(errors or lines[-15:])
        return f"it ended with exit code {self._exit_code()}:\n{said}"

    def _output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _resident_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0
