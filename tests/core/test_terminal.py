"""Colours and the line of what is being done, in real terminals and outside of them."""

import io
import os
import pty
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from accel_train.core.terminal import busy, controls_kept_out, paint, print_line, use_colour
from accel_train.observe.progress import Progress
from tests.support.runs import Capture


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A terminal to write to, and the file descriptor that reads what it shows."""
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        yield stream, reader
    os.close(reader)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8", "shift_jis"])
@pytest.mark.parametrize("seam", ["print_line", "command", "progress"])
def test_letters_that_the_output_lacks_are_escaped_and_no_line_is_lost(
    encoding: str, seam: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Zürich 日本 \U0001f600"
    shown = text.encode(encoding, "backslashreplace").decode(encoding)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    if seam == "print_line":
        print_line(text, stream)
        print_line("next", stream)
    elif seam == "command":
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with controls_kept_out():
            print(text)
            print("next", file=sys.stderr)
    else:
        progress = Progress(False, total_steps=10, stream=stream)
        progress.note(text)
        progress.note("next")
        progress.close()
    stream.flush()
    assert raw.getvalue().decode(encoding).splitlines() == [shown, "next"]


@pytest.mark.parametrize(
    ("environment", "in_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_colour_is_for_terminals_and_for_those_who_ask(
    environment: dict[str, str],
    in_terminal: bool,
    in_pipe: bool,
    terminal: tuple[TextIO, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert use_colour(terminal[0]) is in_terminal
    assert use_colour(io.StringIO()) is in_pipe


def test_paint_leaves_text_alone_when_it_is_off() -> None:
    assert paint("error", "bold", "red") == "\x1b[1;31merror\x1b[0m"
    assert paint("error", "bold", "red", on=False) == "error"


def test_a_terminal_sees_the_seconds_count_behind_what_is_done(
    terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, reader = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    seen = b""
    with busy("importing torch", every_seconds=0.01):
        while b"\r" not in seen:
            seen += os.read(reader, 1000)
    while b"\n" not in seen:
        seen += os.read(reader, 1000)
    assert seen.startswith(b"importing torch ...\rimporting torch ... 0 s")
    assert seen.count(b"\n") == 1


def test_a_log_file_gets_one_line_before_the_wait_and_other_ranks_none(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy("importing torch", every_seconds=0.001):
        assert capsys.readouterr().err == "importing torch ...\n"
        time.sleep(0.01)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "1")
    with busy("importing torch"):
        pass  # nothing has to take long for it to be printed, or not
    assert capsys.readouterr().err == ""
