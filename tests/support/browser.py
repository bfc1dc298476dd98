"""A headless Chromium that is driven as a user would: real mouse events, over its DevTools protocol on a pipe."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page of a browser; `errors` are those of its scripts, `fetched` the addresses that it asked for."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._number, self._session = write, read, 0, None
        self._buffer = b""
        self.errors: list[str] = []
        self.fetched: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> Any:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass  # an event of the page, or the answer to an earlier command
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 2**20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        found = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        if message.get("method") == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(found["entry"]["text"])
        if message.get("method") == "Network.requestWillBeSent":
            self.fetched.append(found["request"]["url"])
        return message

    def open(
        self, page: Path | str, *, width: int, height: int = 1200, dark: bool = False, script: bool = True
    ) -> None:
        """Open a file or an address in a window of this size, in a system that is dark or light, with scripts or
        without.
        """
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Emulation.setScriptExecutionDisabled", value=not script)
        self("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass  # `_next` keeps what an earlier message says
        if script:
            self.settle()

    def settle(self) -> None:
        """Wait until the page has been drawn twice."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def run(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (code, answer)
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """Send `mouseMoved`, `mousePressed` or `mouseReleased` at a place of the window."""
        button = "none" if kind == "mouseMoved" else "left"
        self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks)
        self.settle()

    def click(self, x: float, y: float, clicks: int = 1) -> None:
        """Click at a place of the window, or double-click."""
        for number in range(1, clicks + 1):
            self.mouse("mousePressed", x, y, number)
            self.mouse("mouseReleased", x, y, number)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """Start a browser with its files below `profile`, and yield a tab of it."""
    browser = find_browser()
    assert browser is not None
    theirs_read, ours_write = os.pipe()
    ours_read, theirs_write = os.pipe()

    def take_the_pipes() -> None:  # the browser reads from 3 and writes to 4
        low, high = os.dup(theirs_read), os.dup(theirs_write)
        os.dup2(low, 3)
        os.dup2(high, 4)

    process = subprocess.Popen(
        [browser, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        preexec_fn=take_the_pipes,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        yield Tab(ours_write, ours_read)
    finally:
        os.close(ours_write)
        os.close(ours_read)
        process.terminate()
        process.wait()
