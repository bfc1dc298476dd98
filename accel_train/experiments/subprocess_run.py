"""A training run in child processes, started as a user starts it, watched through its files, and killed or stopped."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from accel_train.core.errors import ProcessFailed
from accel_train.core.json_io import parse_json
from accel_train.core.state import JsonRecord
from accel_train.observe.run_folder import read_events, read_metrics
from accel_train.runtime.launch_environment import child_environment
from accel_train.runtime.launcher import stop_with_parent

POLL_SECONDS = 0.02
_LARGEST_RESULT = 2**24
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class TrainingProcess:
    """A process of `accel-train run` that writes to `run_folder`: `with TrainingProcess(...) as training:`.

    Several processes are started through torchrun. All of them are killed at the end of the block. The text output is
    appended to NAME.txt in `log_folder`, by default the parent of the run folder.
    """

    def __init__(
        self,
        name: str,
        recipe: str | Path,
        settings: Sequence[str],
        run_folder: Path,
        num_processes: int,
        log_folder: Path | None = None,
    ) -> None:
        self.name, self.run_folder = name, run_folder
        # `events` below needs the attribute before its value is known.
        self._num_earlier_events = 0
        self._num_earlier_events = len(self.events())
        self._log = (log_folder or run_folder.parent) / f"{name}.txt"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        launcher = ["accel_train.torchrun", f"--nproc_per_node={num_processes}", "--standalone", "-m"]
        command = [sys.executable, "-m", *(launcher if num_processes > 1 else ()), "accel_train", "run", str(recipe)]
        self._started = time.monotonic()
        self._log_begins = self._log.stat().st_size if self._log.exists() else 0
        self._result = TemporaryFile()  # noqa: SIM115, closed by __exit__
        with self._log.open("ab") as log:
            self._process = psutil.Popen(
                [*command, *settings, "--output_dir", str(run_folder), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=self._result,
                stderr=log,
                env={name: value for name, value in child_environment().items() if name not in LAUNCHER_VARIABLES},
                start_new_session=True,
                # Ends the training if this process is killed.
                preexec_fn=stop_with_parent,
            )

    def __enter__(self) -> "TrainingProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._result.close()

    def events(self) -> list[JsonRecord]:
        """Return the lines of events.jsonl since this start."""
        with suppress(FileNotFoundError):
            return read_events(self.run_folder)[self._num_earlier_events :]
        return []

    def last_step(self) -> int:
        """Return the last step in metrics.jsonl, or 0."""
        with suppress(FileNotFoundError):
            rows = read_metrics(self.run_folder)
            return max((row["step"] for row in rows if row["split"] == "train"), default=0)
        return 0

    def exit_code(self) -> int | None:
        """Return the exit code as a shell reports it (137 for SIGKILL), or None while the run is alive."""
        code: int | None = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def error(self) -> str:
        """Return the error of the ended run, from its JSON result. Empty if the run failed without a result."""
        code = self._process.poll()
        lines = os.pread(self._result.fileno(), _LARGEST_RESULT, 0).splitlines()
        for line in lines if code else ():
            with suppress(ValueError):
                result = parse_json(line)
                # torchrun ends the main process if another process fails. Its result is then about torchrun's signal.
                if result["exit_code"] == code and result["error"]:
                    return str(result["error"]["message"])
        return ""

    def _why(self) -> str:
        """Return the run's error, or the last lines of its log."""
        with self._log.open(errors="replace") as log:
            log.seek(self._log_begins)
            return self.error() or "\n".join(log.read().splitlines()[-15:])

    def wait_until(self, reached: Callable[[], object]) -> None:
        """Wait until `reached` returns a true value.

        Raises:
            ProcessFailed: the run ended before.
        """
        while not reached():
            if self._process.poll() is not None and not reached():
                code = self.exit_code() or 1
                raise ProcessFailed(f"{self.name}: exit code {code}:\n{self._why()}", code)
            time.sleep(POLL_SECONDS)

    def wait_for_first_step(self) -> float:
        """Wait until data and model are loaded and restored, and return the seconds since the start.

        Raises:
            ProcessFailed: the run ended before.
        """
        self.wait_until(lambda: any(event["event"] in ("start", "resume") for event in self.events()))
        return time.monotonic() - self._started

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait until the run reports that the checkpoint of `step` is published.

        Raises:
            ProcessFailed: the checkpoint was refused or could not be written, or the run ended before.
        """
        kinds = ("checkpoint", "checkpoint_failed", "checkpoint_refused")

        def ended() -> list[JsonRecord]:
            return [each for each in self.events() if each["event"] in kinds and each["step"] == step]

        self.wait_until(ended)
        if (end := ended()[0])["event"] != "checkpoint":
            raise ProcessFailed(f"{self.name}: {end['message']}", 4)

    def kill(self) -> None:
        """Send SIGKILL to the launcher and all its processes at once."""
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            family = [*self._process.children(recursive=True), self._process]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=60)
        self._process.wait()

    def stop(self, timeout_seconds: float) -> float | None:
        """Send SIGTERM and return the seconds until the run ended, or None after the timeout."""
        begin = time.monotonic()
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self._process.terminate()
            self._process.wait(timeout_seconds)
            return time.monotonic() - begin
        return None
