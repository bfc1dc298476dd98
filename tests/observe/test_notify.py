"""`log.notify`: webhooks are notified how a run goes and ends, and whatever they do the run is the same."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.checkpoint.fingerprint import IDENTITY, OF_BEST, SETTINGS
from accel_train.cli.main import main
from accel_train.core.errors import CheckpointError, Preempted, RestartNeeded, TrainingStopped
from accel_train.core.state import StepResult
from accel_train.observe import notify
from accel_train.observe.notify import Notifier
from accel_train.training.output import how_it_ended
from tests.support.commands import call, error_line
from tests.support.runs import events, losses, metrics, run_forked_command, write_corpus, write_recipe_file
from tests.support.wording import assert_golden

SECRET = "T0001-B0002-very-secret"


class Hook:
    """A webhook on this machine: `sent` has what was posted; it answers with `status`, and not before `silent` is set,
    where it is given.
    """

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.status = 200
        self.silent: threading.Event | None = None
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if hook.silent is not None:
                    hook.silent.wait(60)
                self.send_response(hook.status)
                if hook.status == 302:
                    self.send_header("Location", "/login")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/{SECRET}"


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    thread = threading.Thread(target=hook.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield hook
    if hook.silent is not None:
        hook.silent.set()
    hook.server.shutdown()
    thread.join()
    hook.server.server_close()


@pytest.fixture(autouse=True)
def in_no_launch(not_launched: None) -> None:
    return


def recipe_with(folder: Path, targets: Sequence[Any], **sections: Any) -> str:
    write_corpus(folder)
    log = {"every_steps": 1, "progress": False, "notify": list(targets)}
    return str(write_recipe_file(folder, **{"schedule": {"max_steps": 3}, "log": log, **sections}))


def test_a_url_is_told_of_the_end_and_the_address_stays_secret(
    tmp_path: Path, hook: Hook, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", recipe_with(tmp_path, [hook.url])]) == 0
    [sent] = hook.sent
    assert (sent["event"], sent["exit_code"], sent["step"], sent["run"]) == ("done", 0, 3, str(tmp_path / "run"))
    assert_golden(re.sub(r"\d+\.\d+", "#", sent["text"]))
    assert sent["metrics"]["loss"] == metrics(tmp_path / "run", "eval")[-1]["loss"]
    assert events(tmp_path / "run", "notify_failed") == []
    written = [
        path.read_text()
        for path in (tmp_path / "run").rglob("*")
        if path.suffix in (".json", ".jsonl", ".yaml", ".html")
    ]
    assert SECRET not in "".join([*written, *capfd.readouterr()])


def test_targets_that_fail_or_hang_change_nothing_but_a_line_each(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_SECONDS", 0.3)
    for name in ("plain", "sent"):
        (tmp_path / name).mkdir()
    assert main(["run", recipe_with(tmp_path / "plain", [])]) == 0
    hook.silent = threading.Event()
    login = Hook()
    login.status = 302
    answering = threading.Thread(target=login.server.serve_forever, kwargs={"poll_interval": 0.05})
    answering.start()
    targets = [hook.url, login.url, "http://127.0.0.1:1/"]
    assert main(["run", recipe_with(tmp_path / "sent", targets)]) == 0
    assert losses(tmp_path / "sent" / "run") == losses(tmp_path / "plain" / "run")
    failures = [event["message"] for event in events(tmp_path / "sent" / "run", "notify_failed")]
    login.server.shutdown()
    answering.join()
    login.server.server_close()
    assert len(login.sent) == 1, "a redirect was followed"
    assert_golden("\n".join(each.partition(" (")[0] for each in failures))
    (redirected,) = [each for each in failures if "HTTPError" in each]
    assert_golden(redirected, "redirected")
    said = capfd.readouterr().out
    assert [said.count(each) for each in failures] == [1, 1, 1]


def notifier_of(hook: Hook, run: Path) -> Notifier:
    return Notifier([hook.url], run, how_it_ended)


@pytest.mark.parametrize(
    "error, event, code",
    [
        (TrainingStopped("6 skips in a row"), "stop", 3),
        (Preempted("saved at step 7"), "preempted", 75),
        (RestartNeeded("smaller"), "preempted", 75),
        (CheckpointError("disk"), "failed", 4),
        (KeyError("ours"), "failed", 1),
        (ValueError("the user's"), "failed", 2),
    ],
)
def test_each_way_to_end_has_its_event_and_exit_code(
    error: BaseException, event: str, code: int, hook: Hook, tmp_path: Path
) -> None:
    notifier = notifier_of(hook, tmp_path)
    notifier.note_end(type(error), error, None)
    notifier.end("hang", "a second end is none", 5)
    [sent] = hook.sent
    assert (sent["event"], sent["exit_code"]) == (event, code)
    assert str(error).strip("'") in sent["message"]


def test_a_rollback_is_told_when_it_happens_and_a_fault_of_ours_is_not_the_users(hook: Hook, tmp_path: Path) -> None:
    notifier = notifier_of(hook, tmp_path)
    notifier.on_event("start", 0, "starting")
    notifier.on_event("skip", 6, "step 6: skipped")
    notifier.on_event("rollback", 7, "step 7: rolled back to step 4")
    notifier.note_end(ValueError, ValueError("while training"), None)
    sent = {each["event"]: each for each in hook.sent}
    assert set(sent) == {"rollback", "failed"}
    assert (sent["rollback"]["step"], sent["rollback"]["exit_code"], sent["failed"]["exit_code"]) == (7, None, 1)


def test_a_preempted_run_tells_and_waits_no_longer_than_the_time_limit(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.silent = threading.Event()
    monkeypatch.setattr(notify, "TIMEOUT_SECONDS", 0.2)
    took_step = Notifier.on_step

    def stop_at_step_2(notifier: Notifier, result: StepResult, learning_rate: float) -> None:
        took_step(notifier, result, learning_rate)
        if result.step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Notifier, "on_step", stop_at_step_2)
    begin = time.monotonic()
    call("run", recipe_with(tmp_path, [hook.url], schedule={"max_steps": 100_000}), code=75)
    assert time.monotonic() - begin < 50  # the webhook is silent for 60 seconds
    assert [(sent["event"], sent["exit_code"]) for sent in hook.sent] == [("preempted", 75)]
    assert len(events(tmp_path / "run", "notify_failed")) == 1


def test_a_hang_is_told_by_the_watchdog_and_only_the_main_process_tells(tmp_path: Path, hook: Hook) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import time
from accel_train.cli.main import program
from accel_train.training import loop

loop.seed_step = lambda *_: time.sleep(600)
program()
""")
    words = ["run", recipe_with(tmp_path, [hook.url]), "--guard.hang_timeout_seconds", "1"]
    assert run_forked_command(words, 2, program).returncode == 5
    [sent] = hook.sent
    assert (sent["event"], sent["exit_code"]) == ("failed", 5)
    assert "guard.hang_timeout_seconds" in sent["message"]


@pytest.mark.parametrize(
    "target",
    [
        *("ftp://host/x", "https://me:secret@host/x", "mail me", "", "$NOT_SET_ANYWHERE"),
        pytest.param([], id="no words"),
        pytest.param(["curl", "-u", "bob:a-password"], id="a command"),
    ],
)
def test_a_target_that_cannot_be_called_is_one_line_before_anything_is_built(target: Any, tmp_path: Path) -> None:
    assert_golden(error_line("run", recipe_with(tmp_path, [target])))
    assert not (tmp_path / "run").exists()


def test_a_variable_may_hold_the_url_and_the_resolved_recipe_trains_again(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_WEBHOOK", hook.url)
    call("run", recipe_with(tmp_path, ["$TEAM_WEBHOOK", hook.url]))
    assert len(hook.sent) == 2
    resolved = tmp_path / "run" / "recipe.resolved.yaml"
    assert yaml.safe_load(resolved.read_text())["log"]["notify"] == ["$TEAM_WEBHOOK", "REDACTED"]
    again = tmp_path / "again"
    call("run", resolved, "--output_dir", again)
    assert len(hook.sent) == 3
    [warned] = events(again, "notify_failed")
    assert "REDACTED" in warned["message"]


def test_whom_a_run_tells_is_no_part_of_what_makes_it_the_same_run() -> None:
    assert [name for name in (*IDENTITY, *SETTINGS, *OF_BEST) if name.startswith("log")] == []
