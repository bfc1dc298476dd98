"""Hubs of tests: one on this machine that serves folders as model repositories, and one that notes uploads."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from accel_train.data import hub
from tests.support.downloads import REVISION


@contextmanager
def serve_hub(repositories: Mapping[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Yield the endpoint, and the requests so far, each as `HEAD /path`."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(f"{self.command} {self.path}")
            name, _, file = self.path.lstrip("/").partition("/resolve/main/")
            path = repositories.get(name, Path("/nowhere")) / (file or "nothing")
            found, known = path.is_file(), any(f"/{each}/" in self.path for each in repositories)
            content = path.read_bytes() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            if not found:
                self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, home: Path) -> None:
    """Let this process ask a hub, as without HF_HUB_OFFLINE, with HF_HOME below `home`; until the test ends."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setattr(datasets.config, name, False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    hub._go_offline_without_hub.cache_clear()


def record_uploads(monkeypatch: pytest.MonkeyPatch, expected_token: str | None = None) -> list[dict[str, Any]]:
    """Let the Trainer push to no hub. Return its uploads: arguments, and the `files` with their `content`."""
    uploads: list[dict[str, Any]] = []

    class Hub:
        def __init__(self, token: str | None) -> None:
            assert token == expected_token

        def create_repo(self, name: str, **settings: Any) -> Any:
            return SimpleNamespace(repo_id=f"someone/{name}")

        def upload_folder(self, **what: Any) -> Any:
            folder = Path(what["folder_path"])
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            kept = [*filter_repo_objects(names, ignore_patterns=what.get("ignore_patterns"))]
            uploads.append({**what, "files": kept, "content": {name: (folder / name).read_bytes() for name in kept}})
            return SimpleNamespace(done=lambda: True, result=lambda: None)

    monkeypatch.setattr("accel_train.hf.hub.HfApi", Hub)
    return uploads
