"""No test finds what another one has left."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_forked
from tests.support.runs import environment

TWO_TESTS = """
import os

import pytest
from accelerate import Accelerator, PartialState

@pytest.fixture(scope="module", autouse=True)
def leaving():
    os.environ["OF_THE_MODULE"] = "left"
    Accelerator(cpu=True)

def test_first():
    assert "OF_THE_MODULE" not in os.environ
    assert PartialState._shared_state == {}
    os.environ.update(OF_A_TEST="left", CHANGED="left")
    del os.environ["DELETED"]
    Accelerator(cpu=True)

def test_second():
    seen = {name: os.environ.get(name) for name in ("OF_THE_MODULE", "OF_A_TEST", "CHANGED", "DELETED")}
    assert seen == {"OF_THE_MODULE": None, "OF_A_TEST": None, "CHANGED": "before", "DELETED": "before"}
    assert PartialState._shared_state == {}
"""

HEARS = """
import os, signal, subprocess

def test_program_is_ended_and_pytest_is_not():
    os.kill(os.getpid(), signal.SIGNALS)
    program = subprocess.Popen(["sleep", "60"])
    program.send_signal(signal.SIGNALS)
    assert program.wait() == -signal.SIGNALS
"""


def _run(folder: Path, *words: str) -> list[str]:
    """Run the tests of a folder with the hooks of all tests; returns the last line's words, but for the time."""
    always = ["-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:xdist", "-p", "no:cacheprovider", str(folder)]
    variables = environment(CHANGED="before", DELETED="before")
    done = subprocess.run([sys.executable, *always, *words], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1].split()[:-2]


def test_next_test_finds_environment_and_device_as_before(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    assert _run(tmp_path) == ["2", "passed"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_programs_of_tests_hear_a_signal_that_a_shell_ignores_for_pytest(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "test_signal.py").write_text(HEARS.replace("SIGNALS", number.name))
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert _run(tmp_path) == ["1", "passed"]
    finally:
        signal.signal(number, before)


def test_what_would_begin_after_the_minutes_is_skipped_and_each_commit_begins_with_other_files(tmp_path: Path) -> None:
    begin_order = tmp_path / "order"
    for name in "abcdefgh":
        (tmp_path / f"test_{name}.py").write_text(f"def test(): open({str(begin_order)!r}, 'a').write({name!r})\n")
    assert _run(tmp_path, "--minutes", "0") == ["8", "skipped"]
    orders = []
    for subject in ("first", "second"):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
        for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", subject]):
            subprocess.run([*git, *words], cwd=tmp_path, check=True)
        assert _run(tmp_path, "--minutes", "60") == ["8", "passed"]
        orders.append(begin_order.read_text())
        begin_order.unlink()
    assert sorted(orders[0]) == sorted(orders[1]) == list("abcdefgh")
    assert orders[0] != orders[1]


def test_the_error_of_a_run_shows_what_the_process_that_ended_badly_wrote(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os\nif os.environ['RANK'] == '1':\n    os.abort()\n")
    forked = run_forked([], 2, folder=tmp_path / "processes", program=program)
    with pytest.raises(AssertionError) as caught:
        forked.expect(0)
    assert "[0, -6]" in str(caught.value)
    assert "process 1:\nFatal Python error: Aborted" in str(caught.value)
    assert "process 0" not in str(caught.value)
