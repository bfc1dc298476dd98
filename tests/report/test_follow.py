"""The report that is served while a run goes on: renewed when the run has written, and served to this machine alone."""

import errno
import http.client
import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_train.cli.main import main
from accel_train.report.follow import ReportServer
from tests.support.report import Page, make_run
from tests.support.wording import assert_golden


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", summary=None)


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with ReportServer([run]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ReportServer, path: str = "") -> str:
    with urllib.request.urlopen(server.address + path, timeout=20) as answer:
        return str(answer.read().decode())


def refusal(address: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20)
    caught.value.close()
    return caught.value.code


def test_page_and_version_change_when_a_line_is_appended_and_no_file_is_written(
    server: ReportServer, run: Path
) -> None:
    before, files = get(server), sorted(run.iterdir())
    version = get(server, "version")
    assert json.dumps(version) in before, "the page knows which version it is"
    assert get(server, "version") == version
    assert "Perplexity" not in before
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 205, "split": "eval", "loss": 2.0, "perplexity": 7.4}) + "\n")
    assert get(server, "version") != version
    after = get(server)
    assert "Perplexity" in Page(after).text
    assert json.dumps(get(server, "version")) in after
    assert "connect-src 'self'" in after
    assert sorted(run.iterdir()) == files


@pytest.mark.parametrize("path", ["metrics.jsonl", "incidents/../summary.json", "../run/metrics.jsonl", "incidents"])
def test_only_the_page_and_what_it_links_to_are_served(server: ReportServer, run: Path, path: str) -> None:
    (run / "incidents" / "step-1").mkdir(parents=True)
    (run / "incidents" / "step-1" / "incident.txt").write_text("what is known")
    assert get(server, "incidents/step-1/incident.txt") == "what is known"
    assert refusal(server.address + path) == 404


def test_a_foreign_name_of_this_machine_is_refused(server: ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert refusal(server.address, Host="example.org:80") == 403


def test_what_cannot_be_followed_is_one_line(
    server: ReportServer, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = str(server.server_port)
    for case, words in {
        "a port that is taken": [str(run), "--follow", "--port", taken],
        "a port too large": [str(run), "--follow", "--port", "70000"],
        "a file": [str(run), "--follow", "--out", "a.html"],
        "a port alone": [str(run), "--port", "8000"],
        "no run": [str(tmp_path), "--follow"],
    }.items():
        assert main(["report", *words]) == 2
        said = capsys.readouterr().err
        assert_golden(said.replace(taken, "PORT").replace(os.strerror(errno.EADDRINUSE), "REASON"), case)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:PORT/", "http://127.0.0.1:PORT/version", "http://127.0.0.1:PORT/WRONG/"]
)
def test_an_address_without_the_token_is_refused(server: ReportServer, address: str) -> None:
    wrong = f"{'-' * (len(server.token) - 1)}"
    assert refusal(address.replace("PORT", str(server.server_port)).replace("WRONG", wrong)) == 403
    assert len(server.token) >= 32


@pytest.mark.parametrize("path", ["\0", "incidents/" + "a" * 5_000, "incidents/%00", "\xff\xfe"])
def test_a_path_that_no_file_can_have_is_answered(
    server: ReportServer, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        request = f"GET /{server.token}/{path} HTTP/1.0\r\nHost: localhost:80\r\n\r\n"
        connection.sendall(request.encode("latin-1"))
        with connection.makefile("rb") as answer:
            assert b" 404 " in answer.readline()
    assert capsys.readouterr().err == ""


def test_a_run_that_is_gone_is_a_line_and_no_traceback(
    server: ReportServer, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").unlink()
    with pytest.raises(http.client.HTTPException):
        get(server)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "metrics.jsonl" in said[0]
