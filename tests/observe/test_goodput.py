import json
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from accel_train.observe.goodput import (
    ACCOUNTS,
    LAUNCHES_FILE,
    LINE_BYTES,
    LaunchClock,
    down_times,
    goodput_of,
    read_launches,
)
from tests.support.goodput import assert_accounts_add_up
from tests.support.processes import run_forked
from tests.support.runs import write_recipe_file


class Time:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def clock_of(time: Time, age_seconds: float = 0.0) -> LaunchClock:
    return LaunchClock(age_seconds, clock=time, wall=time)


def test_each_second_of_a_launch_is_in_one_account() -> None:
    time = Time()
    clock = clock_of(time, age_seconds=3.0)
    with clock.inside("data_preparation"):
        time.wait(5)
    time.wait(2)

    def batches():
        for _ in range(3):
            time.wait(0.5)
            yield

    for step, _ in enumerate(clock.reading(batches())):
        clock.begin_step(step)
        time.wait(1)
        if step == 0:
            with clock.inside("compile"):
                time.wait(8)
        if step:
            clock.end_step(step - 1, skipped=step == 2)  # the outcome of step 1 comes during step 2
        if step == 2:
            clock.end_step(2, skipped=False)
            with clock.inside("evaluation"):
                time.wait(4)
                with clock.inside("compile"):
                    time.wait(1)
            with clock.inside("saving"):
                time.wait(0.25)
    time.wait(6)
    assert clock.accounts() == {
        "imports": 3,
        "start_up": 2,
        "data_preparation": 5,
        "compile": 9,
        "first_step": 1,
        "productive_steps": 1,
        "skipped_steps": 1,
        "waiting_for_data": 1.5,
        "evaluation": 4,
        "saving": 0.25,
        "stopping": 6,
    }
    assert sum(clock.accounts().values()) == time.now - 1000 + 3


def test_a_step_that_a_kill_cuts_off_was_in_vain(tmp_path: Path) -> None:
    time = Time()
    clock = clock_of(time)
    for step in range(3):
        clock.begin_step(step)
        time.wait(1)
        if step < 2:
            clock.end_step(step, skipped=False)
    assert clock.accounts() == {"first_step": 1, "productive_steps": 1, "repeated_steps": 1}


def test_steps_that_an_earlier_launch_had_done_are_steps_done_again(tmp_path: Path) -> None:
    time = Time()
    clock = clock_of(time)
    with suppress(KeyboardInterrupt), clock.recorded(tmp_path):
        for step in range(6):
            clock.begin_step(step)
            time.wait(1)
            clock.end_step(step, skipped=False)
        raise KeyboardInterrupt
    time.wait(100)
    clock = clock_of(time)
    with clock.recorded(tmp_path, world_size=2):
        for step in range(3, 8):  # from the checkpoint of step 3
            clock.begin_step(step)
            time.wait(1)
            clock.end_step(step, skipped=False)
        assert clock.goodput() == {
            "launches": 2,
            "wall_seconds": 111,
            "productive_share": round(7 / 111, 6),
            "accounts": {"first_step": 2, "productive_steps": 7, "repeated_steps": 2, "down_time": 100},
        }
    first, second = read_launches(tmp_path)
    assert (first["launch"], second["launch"], second["world_size"], second["step"]) == (1, 2, 2, 8)
    assert down_times([first, second]) == [100]


def test_steps_that_a_rollback_undoes_are_done_again() -> None:
    time = Time()
    clock = clock_of(time)
    for step in (0, 1, 2, 3, 1, 2, 3, 4):
        clock.begin_step(step)
        time.wait(1)
        clock.end_step(step, skipped=False)
    assert clock.accounts() == {"first_step": 1, "productive_steps": 4, "repeated_steps": 3}


def test_a_launch_that_is_not_closed_ends_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.observe.goodput.WRITE_SECONDS", 0.01)
    clock = LaunchClock()
    with clock.recorded(tmp_path):
        written, enough = read_launches(tmp_path)[0]["seconds"], time.monotonic() + 20
        while read_launches(tmp_path)[0]["seconds"] < written + 0.05:
            assert time.monotonic() < enough, "the line is not written again"
            time.sleep(0.01)
        assert not read_launches(tmp_path)[0]["ended"]
    assert read_launches(tmp_path)[0]["ended"]
    assert not [thread for thread in threading.enumerate() if thread.name == "launch clock"]
    assert len((tmp_path / LAUNCHES_FILE).read_bytes()) == LINE_BYTES


def test_torn_and_damaged_lines_are_left_out_and_the_next_launch_gets_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / LAUNCHES_FILE
    with LaunchClock().recorded(tmp_path):
        pass  # a launch that does nothing has a line, too
    whole = path.read_bytes()
    path.write_bytes(b'{"started": "x"}\n[1]\nnot json\n' + whole + whole[:50])
    with LaunchClock().recorded(tmp_path):
        pass  # the same
    assert [each["launch"] for each in read_launches(tmp_path)] == [1, 2]
    path.write_bytes(b"")
    assert read_launches(tmp_path) == []


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / LAUNCHES_FILE).mkdir()
    clock = LaunchClock()
    error = RuntimeError("of the run")
    with pytest.raises(RuntimeError) as caught, clock.recorded(tmp_path):
        raise error
    assert caught.value is error
    assert clock.goodput()["launches"] == 1


def test_a_clock_that_was_set_back_between_launches_makes_no_negative_time() -> None:
    launch = {"started": 100.0, "seconds": 10.0, "accounts": {"start_up": 10.0}}
    assert goodput_of([launch, {**launch, "started": 90.0}])["accounts"] == {"start_up": 20}


def test_the_longest_line_has_room(tmp_path: Path) -> None:
    long = dict.fromkeys(ACCOUNTS, 10_000_000.123456)
    assert len(json.dumps(long)) < LINE_BYTES - 300


@pytest.mark.slow
def test_the_accounts_of_killed_launches_add_up_to_the_wall_clock(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, task="causal-lm", schedule={"max_steps": 100_000})
    began, folder = time.time(), corpus / "run"
    for number, signal_of_end in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM), start=1):
        forked = run_forked(["run", str(recipe)], 1, folder=corpus / "processes")
        enough = time.monotonic() + 300
        while not ((launches := read_launches(folder))[number - 1 :] and launches[-1]["steps"] >= 5):
            assert time.monotonic() < enough, forked.stderr(0)
            time.sleep(0.01)
        forked.kill(0, signal_of_end)
        assert forked.wait() == [75 if signal_of_end == signal.SIGTERM else -9]
    assert_accounts_add_up(folder, began)
    assert [each["ended"] for each in read_launches(folder)] == [False, False, True]
    accounts = goodput_of(read_launches(folder))["accounts"]
    assert {"imports", "start_up", "productive_steps", "repeated_steps", "saving", "down_time"} <= set(accounts)
