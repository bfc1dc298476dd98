"""`log.notify`: tell URLs and commands that a run rolls back, stops or ends. None of them can fail the run, or hold it up while it trains."""

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accel_train.core.json_io import to_json, utc_now
from accel_train.core.redaction import REDACTED, remember_secrets
from accel_train.core.state import JsonRecord, StepResult
from accel_train.observe.observer import Observer
from accel_train.observe.progress import describe_metrics
from accel_train.recipe.values import is_url, words_of

TIMEOUT_SECONDS = 10.0
"""Time for a URL to answer and a command to end; the end of the process waits no longer, whatever they do."""
ENDS = {0: "done", 3: "stop", 75: "preempted"}
"""Events of the end by exit code; any other code is `failed`."""
VARIABLES = {"event": "EVENT", "run": "RUN", "step": "STEP", "message": "MESSAGE", "exit_code": "EXIT_CODE"}
"""Facts that a command also finds in its environment, as ACCEL_TRAIN_EVENT and so on."""
Target = str | tuple[str, ...]


def check_targets(targets: Sequence[Target]) -> None:
    """Find out, before anything is built, whether every target can be called.

    Raises:
        ValueError: a program is not there, or a variable is not set or holds no URL.
    """
    for target in targets:
        if REDACTED in str(target):
            continue
        target = _from_variable(target)
        if not is_url(target) and shutil.which(word := words_of(target)[0]) is None:
            raise ValueError(f"log.notify: there is no program {word!r} here; give its path, or take it out")


def _from_variable(target: Target) -> Target:
    """Return the URL that the variable `$NAME` holds; other targets as they are.

    Raises:
        ValueError: the variable is not set, or holds no URL.
    """
    found = re.fullmatch(r"\$\{?(\w+)\}?", target) if isinstance(target, str) else None
    if found is None:
        return target
    url = os.environ.get(found[1], "")
    if not is_url(url) or urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(
            f"log.notify: ${found[1]} is to hold a URL (https://...), and does not; set it, or take it out"
        )
    remember_secrets({"notify": url})
    return url


class Notifier(Observer):
    """The main process's observer that tells others: of rollbacks when they happen, and of the end by `note_end`.

    `ended` returns message and exit code of an error that ends the run, by whether the run had begun to train; `warn` gets a line,
    with the step, for each target that could not be notified.
    """

    def __init__(
        self, targets: Sequence[Target], run: Path, ended: Callable[[BaseException, bool], tuple[str, int]]
    ) -> None:
        self._targets = [_from_variable(target) for target in targets if REDACTED not in str(target)]
        self._run, self._ended = run.absolute(), ended
        self._step, self._metrics = 0, dict[str, Any]()
        self._threads: list[threading.Thread] = []
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._has_begun = self._is_over = False
        self.warn: Callable[[str, int], object] = lambda message, _: print(f"warning: {message}", file=sys.stderr)
        if len(self._targets) < len(targets):
            self._failures.put(f"a target is {REDACTED} in this recipe, and is not notified: give it again")

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Remember the step, and warn of targets that could not be notified before it."""
        self._step = result.step
        self._warn_of_failures()

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Tell of a rollback."""
        self._step = step
        self._has_begun |= kind in ("start", "resume")
        if kind == "rollback":
            self._send(kind, message)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Remember the metrics, which are sent at the end."""
        self._metrics = dict(summary.get("eval", {}))

    def note_end(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell how the run ends, and wait until all are notified, or `TIMEOUT_SECONDS`."""
        message, code = (describe_metrics(self._metrics), 0) if error is None else self._ended(error, self._has_begun)
        self.end("", message, code)

    def be_silent(self) -> None:
        """Send nothing at the end: the run had finished before, and its end was sent then."""
        self._is_over = True

    def end(self, _: str, message: str, exit_code: int) -> None:
        """Tell how the run ends, as `note_end`, from wherever the process is ended; only the first call does."""
        if self._is_over:
            return
        self._is_over = True
        self._send(ENDS.get(exit_code, "failed"), message, exit_code)
        until = time.monotonic() + TIMEOUT_SECONDS + 0.5  # they time out themselves, and say so
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if num_silent := sum(thread.is_alive() for thread in self._threads):
            self._failures.put(f"{num_silent} of the targets took too long, and are not waited for")
        self._warn_of_failures()

    def _send(self, event: str, message: str, exit_code: int | None = None) -> None:
        """Tell every target of an event, each in a thread of its own."""
        text = f"{self._run.name}: {event} at step {self._step}{f': {message}' if message else ''}"
        facts: JsonRecord = {
            "text": text,
            "event": event,
            "run": str(self._run),
            "step": self._step,
            "message": message,
        }
        facts |= {"exit_code": exit_code, "metrics": self._metrics, "host": socket.gethostname(), "time": utc_now()}
        facts = to_json(facts)
        for target in self._targets:
            thread = threading.Thread(target=self._tell, args=(target, facts), name="notify", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there is no room for one
                self._failures.put(f"nobody was notified of {event} ({error})")
            else:
                self._threads.append(thread)

    def _tell(self, target: Target, facts: JsonRecord) -> None:
        body = json.dumps(facts, allow_nan=False).encode()
        name = str(urlsplit(str(target)).hostname) if is_url(target) else words_of(target)[0]
        try:
            _post(str(target), body) if is_url(target) else _call(words_of(target), body, facts)
        except Exception as error:  # of another's service or program
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._failures.put(f"{name} was not notified of {facts['event']} ({reason})")

    def _warn_of_failures(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.warn(f"log.notify: {self._failures.get_nowait()}", self._step)


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "accel-train"})
    urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()


def _call(words: Sequence[str], body: bytes, facts: JsonRecord) -> None:
    """Run a command with the facts on its standard input; it and its children are killed when their time is over.

    Raises:
        TimeoutError: it took too long.
        RuntimeError: its exit code is not 0; the text has its last line.
        OSError: it cannot be started.
    """
    named = {f"ACCEL_TRAIN_{name}": facts[key] for key, name in VARIABLES.items()}
    variables = {name: "" if value is None else str(value) for name, value in named.items()}
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **variables},
        start_new_session=True,  # what asks the run to stop does not stop this
    ) as process:
        try:
            said, _ = process.communicate(body, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"killed after {TIMEOUT_SECONDS:g} s") from error
    if process.returncode:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"exit code {process.returncode}{f': {last}' if last else ''}")
