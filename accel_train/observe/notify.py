"""Webhook notifications (`log.notify`) about rollbacks and the end of a run.

Webhooks cannot fail or delay training.
"""

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
"""Timeout for a URL to answer, in seconds. The end of the process waits about as long."""
ENDS = {0: "done", 3: "stop", 75: "preempted"}
"""Name of the final event by exit code. Any other code is `failed`."""


def check_targets(targets: Sequence[str]) -> None:
    """Check that each `$NAME` target refers to a variable with a URL, before anything is built.

    Raises:
        ValueError: a variable is not set or does not hold a URL.
    """
    for target in targets:
        _from_variable(target)


def _from_variable(target: str) -> str:
    """Return the URL in the variable of a `$NAME` target. Return other targets unchanged.

    Raises:
        ValueError: the variable is not set or does not hold a URL.
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
    """A handler that refuses redirects.

    urllib would follow a redirect with a GET without a body. A login page would then count as a successful
    notification.
    """

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        raise urllib.error.HTTPError(req.full_url, code, "redirects are not followed; give the final URL", headers, fp)


class Notifier(Observer):
    """The main process's observer that posts rollbacks when they happen, and the end of the run in `note_end`.

    `ended` returns the message and exit code for an error that ends the run. Its second argument is whether training
    had begun. `warn` receives a message and the step for each target that could not be notified.
    """

    def __init__(
        self, targets: Sequence[str], run: Path, ended: Callable[[BaseException, bool], tuple[str, int]]
    ) -> None:
        self._targets = [_from_variable(target) for target in targets if target != REDACTED]
        self._run, self._ended = run.absolute(), ended
        self._step, self._metrics = 0, JsonRecord()
        self._threads: list[threading.Thread] = []
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._has_begun = self._is_over = False
        self.warn: Callable[[str, int], object] = lambda message, _: print(f"warning: {message}", file=sys.stderr)
        if len(self._targets) < len(targets):
            self._failures.put(f"a target is {REDACTED} in this recipe, and is not notified: give it again")

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Record the step, and warn about targets that earlier notifications did not reach."""
        self._step = result.step
        self._warn_of_failures()

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Send a notification of a rollback."""
        self._step = step
        self._has_begun |= kind in ("start", "resume")
        if kind == "rollback":
            self._send(kind, message)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Store the final metrics for the notification of the end."""
        self._metrics = dict(summary.get("eval", {}))

    def note_end(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Send how the run ends, and wait until all targets have answered, about `TIMEOUT_SECONDS` at most."""
        message, code = (describe_metrics(self._metrics), 0) if error is None else self._ended(error, self._has_begun)
        self.end("", message, code)

    def be_silent(self) -> None:
        """Suppress the notification of the end: the run had already finished, and its end was sent then."""
        self._is_over = True

    def end(self, _: str, message: str, exit_code: int) -> None:
        """Send how the run ends, like `note_end`, from any place that ends the process. Only the first call sends."""
        if self._is_over:
            return
        self._is_over = True
        self._send(ENDS.get(exit_code, "failed"), message, exit_code)
        # The threads time out first and report that.
        until = time.monotonic() + TIMEOUT_SECONDS + 0.5
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if num_silent := sum(thread.is_alive() for thread in self._threads):
            self._failures.put(f"{num_silent} of the targets took too long. The run does not wait for them")
        self._warn_of_failures()

    def _send(self, event: str, message: str, exit_code: int | None = None) -> None:
        """Send an event to every target, each in a separate thread."""
        text = f"{self._run.name}: {event} at step {self._step}{f': {message}' if message else ''}"
        what = {"text": text, "event": event, "run": str(self._run), "step": self._step, "message": message}
        how = {"exit_code": exit_code, "metrics": self._metrics, "host": socket.gethostname(), "time": utc_now()}
        facts: JsonRecord = to_json(what | how)
        for target in self._targets:
            thread = threading.Thread(target=self._tell, args=(target, facts), name="notify", daemon=True)
            try:
                thread.start()
            # The system cannot start another thread.
            except RuntimeError as error:
                self._failures.put(f"no target was notified of {event} ({error})")
            else:
                self._threads.append(thread)

    def _tell(self, target: str, facts: JsonRecord) -> None:
        body = json.dumps(facts, allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "accel-train"}
        try:
            request = urllib.request.Request(target, body, headers)
            urllib.request.build_opener(_Refused).open(request, timeout=TIMEOUT_SECONDS).close()
        # Any error of a third-party service.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._failures.put(f"{urlsplit(target).hostname} was not notified of {facts['event']} ({reason})")

    def _warn_of_failures(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.warn(f"log.notify: {self._failures.get_nowait()}", self._step)
