"""The report of runs that go on, served on this machine: the page renews itself when their files have changed."""

import hmac
import json
import secrets
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from accel_train.observe.incident_record import INCIDENTS
from accel_train.observe.metrics_reader import MetricsReader
from accel_train.observe.run_folder import EVENTS_FILE, METRICS_FILE, PROFILE_FOLDER, SUMMARY_FILE
from accel_train.report.report import load_runs, render_page
from accel_train.report.run import EVALUATION_FILE

HOST = "127.0.0.1"
LARGEST_PORT = 65535
_STRICT = "default-src 'none';"
_MAY_ASK = "default-src 'none'; connect-src 'self';"
_RENEW = (Path(__file__).parent / "follow.js").read_text(encoding="utf-8")
"""Script that asks for the version every two seconds; VERSION stands for the version of the page."""


class ReportServer(ThreadingHTTPServer):
    """Serves the report of runs at `address`, to this machine alone: `with ReportServer(runs) as server: server.serve_forever()`.

    It reads the runs' files and writes none. A `port` of 0 takes one that is free.

    Raises:
        ValueError: a folder holds no run, or the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, run_folders: Sequence[Path], port: int = 0) -> None:
        if not 0 <= port <= LARGEST_PORT:
            raise ValueError(f"--port={port}: must be between 0 and {LARGEST_PORT}")
        self.token = secrets.token_urlsafe(24)
        self._folders = [Path(folder) for folder in run_folders]
        self._readers = [MetricsReader(folder / METRICS_FILE) for folder in self._folders]
        self._reading = threading.Lock()
        load_runs(self._folders, self._readers)  # a folder without a run is refused before anybody opens the page
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ValueError(f"--port={port} cannot be had: {error.strerror}; give another, or none") from error

    @property
    def address(self) -> str:
        """Return the address to open in a browser; its token keeps out the other users of this machine."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print why a request failed, on one line; a browser that has gone away is not worth one."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            print(f"warning: the report could not be served ({type(error).__name__}: {error!s:.200})", file=sys.stderr)

    def version(self) -> str:
        """Return a text that differs once a run has written something that the page shows."""
        names = (METRICS_FILE, EVENTS_FILE, SUMMARY_FILE, EVALUATION_FILE)
        stats = [path.stat() for folder in self._folders for name in names if (path := folder / name).is_file()]
        return "-".join(f"{stat.st_size}.{stat.st_mtime_ns}" for stat in stats)

    def page(self) -> bytes:
        """Return the report as it is now, with a script that renews it."""
        version = self.version()  # before the files are read: what is written meanwhile is another version
        with self._reading:
            runs = load_runs(self._folders, self._readers)
        html = render_page(runs).replace(_STRICT, _MAY_ASK, 1)
        before, _, after = html.rpartition("</body>")
        script = _RENEW.replace("VERSION", json.dumps(version), 1)
        return f"{before}<script>\n{script}</script>\n</body>{after}".encode()

    def file(self, path: str) -> Path | None:
        """Return a file that the page of one run links to: of an incident, or a profile; None for any other path."""
        if len(self._folders) > 1:
            return None
        folder = self._folders[0].resolve()
        try:
            found = (folder / path.lstrip("/")).resolve()
            linked = any(found.is_relative_to(folder / name) for name in (INCIDENTS, PROFILE_FOLDER))
            return found if linked and found.is_file() else None
        except (OSError, ValueError):  # a name that no file can have
            return None


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Answer with the page, its version, or a file that it links to."""
        prefix, path = f"/{self.server.token}/", self.path.partition("?")[0]
        is_invited = hmac.compare_digest(path[: len(prefix)].encode(errors="replace"), prefix.encode())
        path = path[len(prefix) - 1 :]
        name = self.headers.get("Host", "").rpartition(":")[0]
        # A foreign page, whose name was made to mean this machine, or another user of it.
        if name not in (HOST, "localhost") or not is_invited:
            self.send_error(403)
        elif path == "/":
            self._answer("text/html; charset=utf-8", self.server.page())
        elif path == "/version":
            self._answer("text/plain", self.server.version().encode())
        elif file := self.server.file(path):
            kind = "text/plain; charset=utf-8" if file.suffix in (".txt", ".json") else "application/octet-stream"
            self._answer(kind, file.read_bytes())
        else:
            self.send_error(404)

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""
