"""A server that speaks the S3 API and fails: training goes on, everything arrives, and one line says so."""

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_train import train
from accel_train.buckets.files import fetch_files
from accel_train.buckets.store import Store, local_run
from accel_train.training.upload import Upload
from tests.buckets.conftest import Bucket, recipe_of
from tests.support.runs import events, losses

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"


class Faults:
    """A WSGI application before another one: it fails every third request, is slow, or is away for a while."""

    def __init__(self, application: Any) -> None:
        self._application, self._lock = application, threading.Lock()
        self.kind, self.num_requests, self.num_failures = "", 0, 0
        self.delay_seconds, self.is_away = 0.0, False

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._lock:
            self.num_requests += 1
            fails = self.is_away or (self.kind != "" and self.num_requests % 3 == 0)
            self.num_failures += fails
        time.sleep(self.delay_seconds)
        if not fails:
            return list(self._application(environ, start_response))
        # The answer is lost, and the request too if the store is away.
        if self.kind in ("no answer", "cut") and not self.is_away:
            body = b"".join(self._application(environ, start_response))
            if self.kind == "cut":
                return [body[: len(body) // 2]]
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if self.kind == "slow down":
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [SLOW_DOWN]
        if self.kind == "error of a gateway":
            start_response("502 Bad Gateway", [("Content-Type", "text/html")])
            return [b"<p/>"]
        environ["werkzeug.socket"].shutdown(2)
        return [b""]


@pytest.fixture
def faults(s3_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The server that programs of AWS find from now on. The client repeats a request once."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        def log(self, *args: Any) -> None:
            """Print nothing: the run's output is looked at."""

    application = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.port}")
    # Every third request fails, so the second attempt does not.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    yield application
    server.shutdown()
    thread.join()
    server.server_close()


def arrived(bucket: Bucket, folder: Path) -> bool:
    """Whether the bucket has the files of a run, and no others."""
    here = {f"run/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    there = {name: bucket.read(name) for name in bucket.names()}
    return {name: here[name] for name in here.keys() - {"run/.lock", "run/.lock.owner"}} == there


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slow down", "error of a gateway", "no answer"])
def test_of_every_third_request_that_fails_nothing_is_left(corpus: Path, faults: Faults, kind: str) -> None:
    bucket, whole = Bucket(), train(recipe_of(corpus, str(corpus / "whole")))
    faults.kind = kind
    folder = train(recipe_of(corpus, f"{bucket.url}/run")).output_dir
    assert faults.num_failures > 20
    faults.kind = ""
    assert arrived(bucket, folder)
    assert losses(folder) == losses(whole.output_dir)
    assert len(events(folder, "upload_slow")) <= 1


def test_a_file_whose_answers_are_cut_is_copied_whole(corpus: Path, faults: Faults) -> None:
    bucket, content = Bucket(), bytes(range(256)) * 4096
    for number in range(6):
        bucket.write(f"text/{number}.txt", content)
    faults.kind = "cut"
    folder = Path(fetch_files(f"{bucket.url}/text"))
    assert faults.num_failures > 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {f"{n}.txt": content for n in range(6)}


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_training_goes_on_while_the_store_is_away(
    corpus: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    bucket, enter = Bucket(), Upload.__enter__
    report = Path(local_run(f"{bucket.url}/run")) / "report.html"

    def is_back() -> None:
        while not report.exists():
            time.sleep(0.01)
        time.sleep(seconds)
        faults.is_away = False

    def then_away(upload: Upload) -> Upload:
        entered = enter(upload)
        faults.is_away = True
        threading.Thread(target=is_back, daemon=True).start()
        return entered

    monkeypatch.setattr(Upload, "__enter__", then_away)
    # The client gives up at once.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    folder = train(recipe_of(corpus, f"{bucket.url}/run")).output_dir
    assert faults.num_failures > 0
    assert arrived(bucket, folder)
    assert len(events(folder, "upload_slow")) == 1


@pytest.mark.slow
def test_an_answer_after_20_seconds_is_not_a_failure(corpus: Path, faults: Faults) -> None:
    bucket = Bucket()
    store = Store(f"{bucket.url}/run")
    faults.delay_seconds = 20
    store.put(corpus / "corpus.jsonl", "a", reads_back=False)
    faults.delay_seconds = 0
    assert faults.num_requests == 2, "the bucket, and the file"
    assert store.num_failures == 0
    assert bucket.read("run/a") == (corpus / "corpus.jsonl").read_bytes()
