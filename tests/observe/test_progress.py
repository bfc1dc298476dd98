import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

import accel_train
from accel_train.core.format import format_seconds
from accel_train.observe.progress import Progress, choose_style, describe_metrics, without_variants


class Terminal:
    """A pseudo terminal, and everything that was written to it."""

    def __init__(self, stream: TextIO, reader: threading.Thread, chunks: list[bytes]) -> None:
        self.stream = stream
        self._reader = reader
        self._chunks = chunks

    def text(self) -> str:
        self.stream.close()
        self._reader.join(timeout=10)
        return b"".join(self._chunks).decode()


@contextmanager
def open_terminal(columns: int = 120) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40 if columns else 0, columns, 0, 0))
    chunks: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunks.append(os.read(master, 65536))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    stream = os.fdopen(slave, "w")
    try:
        yield Terminal(stream, reader, chunks)
    finally:
        if not stream.closed:
            stream.close()
        reader.join(timeout=10)
        os.close(master)


def test_a_log_file_gets_aligned_lines_and_a_terminal_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with open_terminal() as terminal:
        assert choose_style("auto", terminal.stream) == "bar"
        assert choose_style(False, terminal.stream) == "off"
        monkeypatch.setenv("TERM", "dumb")
        assert choose_style("auto", terminal.stream) == "lines"
    monkeypatch.setenv("TERM", "xterm")
    with open_terminal(columns=0) as terminal:
        assert choose_style("auto", terminal.stream) == "lines"
    assert choose_style("auto", io.StringIO()) == "lines"
    assert choose_style("auto", None) == "lines"
    assert choose_style(True, io.StringIO()) == "bar"
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", sys)
    assert choose_style("auto", io.StringIO()) == "notebook"
    assert choose_style(True, None) == "notebook"
    assert choose_style(False, None) == "off"


def test_plain_lines_say_percent_loss_rate_speed_and_time_left_in_columns() -> None:
    stream = io.StringIO()
    with_progress = Progress("auto", total_steps=2000, initial_step=0, stream=stream)
    for step, loss, speed in ((10, 10.81234, None), (100, 2.5, 465_000.0), (2000, 0.00012, 1.2e6)):
        with_progress.advance(step)
        with_progress.show(step, loss=loss, learning_rate=3e-4, tokens_per_second=speed, skipped=step == 100)
    with_progress.note("a note")
    with_progress.close()
    first, second, third, note = stream.getvalue().splitlines()
    assert second.startswith("step  100/2000   5.0%  loss 2.5000   lr 3.000e-04      465,000 tok/s  left ")
    assert second.endswith("  skipped")
    assert third.startswith("step 2000/2000 100.0%  loss 0.0001   lr 3.000e-04    1,200,000 tok/s  left 0s")
    assert len({line.index("left") for line in (first, second, third)}) == 1
    assert note == "a note"


def test_time_left_is_judged_from_this_sitting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress("auto", total_steps=1000, initial_step=900, stream=stream)
    now = 50.0
    progress.begin()
    now = 60.0
    progress.show(910, loss=1.0, learning_rate=1.0, tokens_per_second=None)
    assert stream.getvalue().rstrip().endswith("left 1m 30s")


def test_the_bar_goes_on_where_the_run_was_left_and_notes_do_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.observe.progress.REFRESH_SECONDS", 0.0)
    with open_terminal() as terminal:
        progress = Progress(True, total_steps=200, initial_step=100, stream=terminal.stream)
        progress.note("what was chosen")
        progress.note("and why")
        progress.begin()
        progress.show(150, loss=2.34567, learning_rate=3e-4, tokens_per_second=12345.6)
        progress.advance(150)
        progress.note("saved step-150")
        progress.close()
        text = terminal.text()
    before, _, text = text.partition("what was chosen\r\nand why\r\n")
    assert before == ""
    assert "100/200" in text.split("\r")[1]
    assert "75%" in text
    assert "150/200" in text
    assert "loss 2.346, lr 3.0e-04, 12.3k tok/s" in text
    assert "\rsaved step-150\r\n" in text.replace("\r\r", "\r")


def test_no_display_still_prints_notes() -> None:
    stream = io.StringIO()
    progress = Progress(False, total_steps=10, stream=stream)
    progress.advance(1)
    progress.show(1, loss=1.0, learning_rate=1.0, tokens_per_second=None)
    progress.note("resumed")
    progress.close()
    assert stream.getvalue() == "resumed\n"


@pytest.mark.parametrize("setting", [True, "auto", False])
def test_a_stream_that_is_closed_on_the_way_is_never_written_to_again(setting: bool | str) -> None:
    stream = io.StringIO()
    progress = Progress(setting, total_steps=10, stream=stream)  # type: ignore[arg-type]
    progress.begin()
    stream.close()
    for step in range(1, 11):
        progress.show(step, loss=1.0, learning_rate=1.0, tokens_per_second=1.0)
        progress.advance(step)
        progress.note("still training")
    progress.close()


class FullDisk(io.StringIO):
    """A stream whose every write fails, and counts."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        raise OSError(28, "No space left on device")


def test_a_full_disk_behind_the_output_is_tried_once() -> None:
    stream = FullDisk()
    progress = Progress("auto", total_steps=10, stream=stream)
    for step in range(1, 11):
        progress.show(step, loss=1.0, learning_rate=1.0, tokens_per_second=1.0)
    assert stream.num_writes == 1


@pytest.mark.parametrize("setting", ["True", "'auto'"])
def test_a_reader_that_goes_away_neither_stops_the_run_nor_changes_its_exit_code(setting: str) -> None:
    code = f"""
import sys
from accel_train.observe.progress import Progress

sys.stdin.read()  # until the reader of standard output is gone
progress = Progress({setting}, total_steps=10)
progress.begin()
for step in range(1, 11):
    progress.show(step, loss=1.0, learning_rate=1.0, tokens_per_second=1.0)
    progress.advance(step)
    progress.note("x" * 10000)
progress.close()
print("done", file=sys.stderr)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(accel_train.__file__).parents[1])}
    environment.pop("PYTHONUNBUFFERED", None)  # it is the buffer, flushed at exit, that changes the exit code
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **pipes)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    with process.stderr, process.stdin:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "done\n"
        assert process.wait() == 0


def test_a_step_that_is_not_drawn_costs_microseconds() -> None:
    with open_terminal() as terminal:
        progress = Progress(True, total_steps=10**9, stream=terminal.stream)
        progress.begin()
        steps = iter(range(1, 10**6))
        seconds = min(timeit.repeat(lambda: progress.advance(next(steps)), number=2000, repeat=5)) / 2000
        progress.close()
    assert seconds < 20e-6  # measured 0.4e-6; a drawing costs 100e-6


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0s"), (59.6, "1m 00s"), (187, "3m 07s"), (7500, "2h 05m"), (273_600, "3d 04h"), (float("nan"), "?")],
)
def test_durations_read_like_a_person_says_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_narrow_terminal_keeps_the_bar_the_loss_and_the_time_left() -> None:
    shown = {}
    for columns in (72, 60):
        with open_terminal(columns) as terminal:
            progress = Progress(True, total_steps=100_000, initial_step=10, stream=terminal.stream)
            progress.begin()
            progress.show(20_000, loss=2.34567, learning_rate=3e-4, tokens_per_second=1234567.8)
            progress.advance(20_000)
            progress.close()
            shown[columns] = [line for line in terminal.text().split("\r") if "loss" in line][-1].rstrip("\n")
        assert len(shown[columns]) <= columns
        assert len(shown[columns].split("|")[1]) >= 10
        assert shown[columns].endswith(" left")
    assert "loss 2.346, 1.23M tok/s, " in shown[72]
    assert "20000/100000, loss 2.346, 0" in shown[60]


def test_steps_and_evaluations_are_printed_at_a_persons_pace_with_first_and_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress("auto", total_steps=100, pause_seconds=2.0, stream=stream)
    for step in range(1, 101):
        now = 100.0 + step / 16  # exact in binary: 2 s are 32 steps
        progress.show(step, loss=1.0, learning_rate=1.0, tokens_per_second=None, skipped=step == 50)
        if step % 20 == 0:
            progress.evaluated(step, "evaluation", {"loss": 2.0})
    shown = [line.split()[1].rstrip(":").partition("/")[0] for line in stream.getvalue().splitlines()]
    # Evaluations 20 and 60 are 2.5 s apart, and step 92 comes 2 s after 60. Step 50 is skipped, so it is shown.
    assert shown == ["1", "20", "50", "60", "92", "100", "100"]


def test_a_long_evaluation_says_how_far_it_is_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress("auto", total_steps=1000, stream=stream)
    for evaluation in range(2):
        for done in range(40):
            now += 1.0
            progress.evaluating(50 * (evaluation + 1), done / 40)
        progress.evaluated(50 * (evaluation + 1), "evaluation", {"loss": 2.0})
    lines = stream.getvalue().splitlines()
    shown = [
        "evaluating, 5% done after 2s",
        "evaluating, 10% done after 4s",
        "evaluating, 20% done after 8s",
        "evaluating, 40% done after 16s",
        "evaluating, 80% done after 32s",
        "evaluation: loss 2.0000",
    ]
    assert lines == [f"step {step}: {text}" for step in (50, 100) for text in shown]


def test_a_bar_shows_how_far_an_evaluation_is_and_then_its_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.observe.progress.REFRESH_SECONDS", 0.0)
    with open_terminal(100) as terminal:
        progress = Progress(True, total_steps=200, stream=terminal.stream)
        progress.begin()
        progress.show(50, loss=2.34567, learning_rate=3e-4, tokens_per_second=12345.6)
        progress.advance(50)
        progress.evaluating(50, 0.25)
        progress.evaluating(50, 0.5)
        progress.evaluated(50, "evaluation", {"loss": 2.0})
        progress.advance(51)
        progress.close()
        text = terminal.text()
    assert "50/200, evaluating, 50%, " in text
    assert "loss 2.346, lr 3.0e-04, 12.3k tok/s" in text.rpartition("evaluation: loss 2.0000")[2]


def test_at_80_columns_the_bar_keeps_ten_characters_and_notes_break_between_words() -> None:
    with open_terminal(80) as terminal:
        progress = Progress(True, total_steps=100_000, initial_step=10, stream=terminal.stream)
        progress.note(
            "batch.per_device_batch_size  4  (all of a process's samples at once; not searched, for a CPU has no limit)"
        )
        progress.note("a sample\n" + "x " * 60)
        progress.begin()
        progress.show(20_000, loss=2.34567, learning_rate=3e-4, tokens_per_second=1234567.8)
        progress.advance(20_000)
        progress.close()
        text = terminal.text()
    lines = text.replace("\r\n", "\n").split("\n")
    assert lines[0] == "batch.per_device_batch_size  4  (all of a process's samples at once; not"
    assert lines[1] == " " * 29 + "searched, for a CPU has no limit)"
    assert lines[3] == "x " * 60
    drawn = [line for line in text.split("\r") if "tok/s" in line][-1]
    assert len(drawn) <= 80
    assert "20000/100000, loss 2.346, lr 3.0e-04, 1.23M tok/s" in drawn
    assert len(drawn.split("|")[1]) >= 10


def test_of_the_averages_of_precision_recall_and_f1_the_macro_f1_stands_for_all_but_the_one_that_decides() -> None:
    names = [f"{score}_{kind}" for score in ("precision", "recall", "f1") for kind in ("macro", "micro", "weighted")]
    scores = {"accuracy": 0.9, **dict.fromkeys(names, 0.8)}
    assert [*without_variants(scores, "accuracy")] == ["accuracy", "f1_macro"]
    assert [*without_variants(scores, "f1_weighted")] == ["accuracy", "f1_macro", "f1_weighted"]
    assert without_variants({"f1_micro": 0.5}, "loss") == {"f1_micro": 0.5}
    assert describe_metrics(scores) == "accuracy 0.9000, f1_macro 0.8000"
