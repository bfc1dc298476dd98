"""Serve a live report of running jobs on localhost. The page reloads when their files change."""

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
"""Script that requests the version every two seconds. VERSION stands for the version of the page."""


class ReportServer(ThreadingHTTPServer):
    """A server that shows the report of runs at `address`, to this machine only.

    Use it as `with ReportServer(runs) as server: server.serve_forever()`. It reads the runs' files and does not write
    any. If `port` is 0, it takes a free port.

    Raises:
        ValueError: a folder does not hold a run, or the port is not available.
    """

    daemon_threads = True

    def __init__(self, run_folders: Sequence[Path], port: int = 0) -> None:
        if not 0 <= port <= LARGEST_PORT:
            raise ValueError(f"--port={port}: must be between 0 and {LARGEST_PORT}")
        self.token = secrets.token_urlsafe(24)
        self._folders = [Path(folder) for folder in run_folders]
        self._readers = [MetricsReader(folder / METRICS_FILE) for folder in self._folders]
        self._reading = threading.Lock()
        # Raises if a folder does not hold a run, before the page is opened.
        load_runs(self._folders, self._readers)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"--port={port} cannot be used: {error.strerror}. Choose another port, or leave the flag out"
            ) from error

    @property
    def address(self) -> str:
        """Return the address to open in a browser. Its token keeps out other users of this machine."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print on one line why a request failed, unless the browser closed the connection."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            print(f"warning: the report could not be served ({type(error).__name__}: {error!s:.200})", file=sys.stderr)

    def version(self) -> str:
        """Return a text that changes when a run writes a file that the page shows."""
        names = (METRICS_FILE, EVENTS_FILE, SUMMARY_FILE, EVALUATION_FILE)
        stats = [path.stat() for folder in self._folders for name in names if (path := folder / name).is_file()]
        return "-".join(f"{stat.st_size}.{stat.st_mtime_ns}" for stat in stats)

    def page(self) -> bytes:
        """Return the current report as HTML, with a script that reloads it."""
        # Taken before the files are read, so that later writes count as a new version.
        version = self.version()
        with self._reading:
            runs = load_runs(self._folders, self._readers)
        html = render_page(runs).replace(_STRICT, _MAY_ASK, 1)
        before, _, after = html.rpartition("</body>")
        script = _RENEW.replace("VERSION", json.dumps(version), 1)
        return f"{before}<script>\n{script}</script>\n</body>{after}".encode(errors="replace")

    def file(self, path: str) -> Path | None:
        """Return an incident or profile file that the page of a single run links to, or None for other paths."""
        if len(self._folders) > 1:
            return None
        folder = self._folders[0].resolve()
        try:
            found = (folder / path.lstrip("/")).resolve()
            linked = any(found.is_relative_to(folder / name) for name in (INCIDENTS, PROFILE_FOLDER))
            return found if linked and found.is_file() else None
        # The path is not a valid file name.
        except (OSError, ValueError):
            return None


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Answer a request with the page, its version, or a file that the page links to."""
        prefix, path = f"/{self.server.token}/", self.path.partition("?")[0]
        is_invited = hmac.compare_digest(path[: len(prefix)].encode(errors="replace"), prefix.encode())
        path = path[len(prefix) - 1 :]
        name = self.headers.get("Host", "").rpartition(":")[0]
        # Refuse foreign pages whose host name resolves to this machine, and other users of this machine.
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
        """Suppress the log line of each request."""
