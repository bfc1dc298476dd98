"""`log.notify`: post to webhooks that a run rolls back, stops or ends. None of them can fail or delay the run."""

import json
import os
import queue
import re
import socket
import sys
import threading
import time
import urllib.error
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

TIMEOUT_SECONDS = 10.0
"""Time for a URL to answer; the end of the process waits no longer."""
ENDS = {0: "done", 3: "stop", 75: "preempted"}
"""Events of the end by exit code; any other code is `failed`."""


def check_targets(targets: Sequence[str]) -> None:
    """Find out, before anything is built, whether every variable holds a URL.

    Raises:
        ValueError: a variable is not set, or holds no URL.
    """
    for target in targets:
        _from_variable(target)


def _from_variable(target: str) -> str:
    """Return the URL that the variable `$NAME` holds; other targets as they are.

    Raises:
        ValueError: the variable is not set, or holds no URL.
    """
    if not target.startswith("$"):
        return target
    name = target.strip("${}")
    url = os.environ.get(name, "")
    if not re.fullmatch(r"https?://[^\s/].*", url):
        raise ValueError(f"log.notify: ${name} is to hold a URL (https://...), and does not; set it, or take it out")
    remember_secrets({"notify": url})
    return url


class _Refused(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would follow with a GET that has no body, and a login page would count as notified."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        raise urllib.error.HTTPError(req.full_url, code, "redirects are not followed; give the final URL", headers, fp)


class Notifier(Observer):
    """The main process's observer that tells others: of rollbacks when they happen, and of the end by `note_end`.

    `ended` returns message and exit code of an error that ends the run, by whether the run had begun to train; `warn` gets a line,
    with the step, for each target that could not be notified.
    """

    def __init__(
        self, targets: Sequence[str], run: Path, ended: Callable[[BaseException, bool], tuple[str, int]]
    ) -> None:
        self._targets = [_from_variable(target) for target in targets if target != REDACTED]
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

    def _tell(self, target: str, facts: JsonRecord) -> None:
        body = json.dumps(facts, allow_nan=False).encode()
        try:
            _post(target, body)
        except Exception as error:  # of another's service
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._failures.put(f"{urlsplit(target).hostname} was not notified of {facts['event']} ({reason})")

    def _warn_of_failures(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.warn(f"log.notify: {self._failures.get_nowait()}", self._step)


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "accel-train"})
    urllib.request.build_opener(_Refused).open(request, timeout=TIMEOUT_SECONDS).close()
