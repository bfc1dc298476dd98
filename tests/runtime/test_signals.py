"""What a run does when it is interrupted, loses its readers or its audience, or finds its folder taken."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from accel_train.core.errors import ExitedEarly, Preempted
from accel_train.core.json_io import read_json
from accel_train.core.ownership import claim
from accel_train.recipe.schema import Recipe
from accel_train.runtime.signals import StopRequest
from accel_train.training.train import train
from tests.support.endless import ENDLESS, TASK, seconds_to_end, start, wait_for
from tests.support.kills import is_alive
from tests.support.marks import faults
from tests.support.processes import Forked
from tests.support.runs import (
    assert_saved_at_the_stop,
    command,
    done_steps,
    environment,
    event_steps,
    events,
    losses,
    recipe_dict,
    wait_for_step,
    write_recipe_file,
)
from tests.support.wording import assert_golden


def test_ctrl_c_once_saves_and_ctrl_c_twice_ends_at_once(corpus: Path, started: list[Forked]) -> None:
    once = start(corpus, started)
    wait_for(once, corpus)
    once.kill(None, signal.SIGINT)
    once.expect(75)
    assert_golden(next(line for line in once.stderr(0).splitlines() if "Ctrl-C" in line), "once")
    twice = start(corpus, started, options={"seconds": {"step": 6.0}})
    step = events(corpus / "run", "preempted")[-1]["step"] + 1
    wait_for(twice, corpus, step)
    twice.kill(None, signal.SIGINT)
    time.sleep(0.5)
    twice.kill(None, signal.SIGINT)
    twice.expect(130)
    assert done_steps(corpus / "run") == step, "it did not wait for the end of the step"
    assert_golden(next(line for line in twice.stderr(0).splitlines() if line.startswith("error: ")), "twice")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_each_signal_to_stop_saves_where_no_checkpoints_are_due(
    corpus: Path, started: list[Forked], number: signal.Signals
) -> None:
    forked = start(corpus, started, options={"seconds": {"step": 0.05}}, data={"num_workers": 1})
    wait_for(forked, corpus, 2)
    for pid in (*children(forked.pids[0]), forked.pids[0]):  # as a terminal that is closed does
        os.kill(pid, number)
    forked.expect(75)
    assert_saved_at_the_stop(corpus / "run")


@pytest.mark.slow
def test_run_whose_terminal_is_closed_saves(corpus: Path) -> None:
    sections: dict[str, Any] = {"options": {"seconds": {"step": 0.05}}, "log": {"every_steps": 1, "progress": "auto"}}
    recipe = write_recipe_file(corpus, task=TASK, **ENDLESS, **sections)
    terminal, theirs = pty.openpty()
    os.set_blocking(terminal, False)
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command(recipe)],
        env=environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)

    def is_read() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 65536)
        return process.poll() is None

    wait_for_step(corpus / "run", 2, is_read)
    os.close(terminal)
    assert process.wait(300) == 75
    assert_saved_at_the_stop(corpus / "run")


@pytest.mark.parametrize("launched_by_torchrun", [False, True])
def test_a_closed_terminal_stops_a_run_under_nohup_only_where_torchrun_hands_it_on(
    monkeypatch: pytest.MonkeyPatch, launched_by_torchrun: bool
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched_by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.requested == launched_by_torchrun
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_evaluation_is_left_at_a_signal_to_one_process_and_done_when_the_run_goes_on(
    corpus: Path, started: list[Forked]
) -> None:
    sections: dict[str, Any] = {
        "schedule": {"max_steps": 4},
        "evaluate": {"every_steps": 2},
        "batch": {"global_batch_size": 8, "per_device_eval_batch_size": 1},
    }
    whole = start(corpus, started, 2, **sections, output_dir=str(corpus / "whole"))
    whole.expect(0)
    cut = start(corpus, started, 2, **sections, options={"seconds": {"evaluate": 2.0}})
    wait_for(cut, corpus, 2)
    time.sleep(1)
    cut.kill(1, signal.SIGUSR1)
    assert seconds_to_end(cut) < 10
    assert cut.exit_codes() == [75, 75]
    assert event_steps(corpus / "run", "preempted") == [2]
    assert "evaluation:" not in (corpus / "processes-1" / "rank-0.out").read_text()
    last = start(corpus, started, 2, **sections)
    last.expect(0)
    summaries = [read_json(corpus / name / "summary.json") for name in ("whole", "run")]
    assert summaries[0]["eval"] == summaries[1]["eval"]
    assert summaries[0]["best_step"] == summaries[1]["best_step"]


@pytest.mark.faults
def test_stop_request_that_a_hung_reader_keeps_from_being_carried_out_ends_the_run_in_20_seconds(
    corpus: Path, started: list[Forked]
) -> None:
    data = {"num_workers": 1}
    forked = start(corpus, started, 2, options={"data_worker": "hangs"}, data=data, checkpoint={"every_steps": 1})
    wait_for(forked, corpus, 10)  # the 12th batch is never read, and what a step came to is heard of a step late
    time.sleep(2)
    workers = [worker for pid in forked.pids for worker in children(pid)]
    forked.kill(0, signal.SIGTERM)
    assert seconds_to_end(forked) < 20
    assert forked.exit_codes() == [75, 75]
    assert len(workers) >= 2
    deadline = time.monotonic() + 10
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline, "a reader that hangs stays behind"
    for rank in (0, 1):  # both name what the first of them to notice reported
        [line] = [line for line in forked.stderr(rank).splitlines() if line.startswith("preempted: ")]
        told, _, rest = line.partition(" (rank ")
        told = re.sub(r" 1\d s ", " 1# s ", told.removeprefix(f"preempted: rank {rank}: "))
        assert_golden(told + rest[rest.index("): ") + 1 :])
        assert "dataloader.py" in (corpus / "run" / f"stacks-rank-{rank}.txt").read_text()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        # torch says the one or the other, whichever notices first: its signal handler or the one who waits for the
        # batch.
        ("killed", r"DataLoader worker (\(pid.*\) (is killed by signal: Killed|exited unexpectedly)|is gone)"),
        # So does one that is killed as it hands over a batch, where torch asks a moment too early whether it has died.
        ("hangs_up", r"DataLoader worker is gone, with a batch half sent \((ConnectionResetError|EOFError)"),
        faults("hangs", "DataLoader timed out after 4"),
    ],
)
def test_data_worker_that_dies_or_hangs_ends_the_run_with_an_error_and_the_run_goes_on_from_its_checkpoint(
    corpus: Path, started: list[Forked], fault: str, said: str
) -> None:
    sections: dict[str, Any] = {
        "schedule": {"max_steps": 20},
        "data": {"num_workers": 1},
        "checkpoint": {"every_steps": 1},
    }
    guard = {"hang_timeout_seconds": 5}
    forked = start(corpus, started, options={"data_worker": fault}, guard=guard, **sections)
    assert forked.wait(60) == [5]
    [line] = [line for line in forked.stderr(0).splitlines() if line.startswith("error: ")]
    assert re.search(said, line)
    again = start(corpus, started, **sections)
    again.expect(0, 60)
    assert events(corpus / "run", "resume")[0]["step"] > 0
    assert list(losses(corpus / "run")) == list(range(1, 21))


@pytest.mark.parametrize(
    ("processes", "options", "where"),
    [
        (1, {"sys_exit_at": {"step": 3, "rank": 0}}, "in <lambda>"),
        (2, {"sys_exit_at": {"step": 3, "rank": 1}}, "in <lambda>"),
        (1, {"data_worker": "exits"}, "in __getitems__"),
    ],
)
def test_sys_exit_in_a_task_is_an_error_and_not_the_end_of_a_finished_run(
    corpus: Path, started: list[Forked], processes: int, options: dict[str, Any], where: str
) -> None:
    data = {"num_workers": int("data_worker" in options)}
    forked = start(corpus, started, processes, schedule={"max_steps": 8}, options=options, data=data)
    assert 1 in forked.wait(60)
    assert 0 not in forked.exit_codes()
    lines = [line for rank in range(processes) for line in forked.stderr(rank).splitlines()]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == processes
    for line in errors:
        told, _, place = line[line.index("exit(0)") :].partition(" (")
        assert_golden(told)
        assert "process_faults.py:" in place
        assert where in place


def test_sys_exit_in_a_task_is_an_error_of_train(corpus: Path) -> None:
    recipe = Recipe.model_validate(
        recipe_dict(corpus, task=TASK, options={"sys_exit_at": {"step": 3, "rank": 0}}, schedule={"max_steps": 4})
    )
    with pytest.raises(ExitedEarly) as caught:
        train(recipe)
    told, _, place = str(caught.value).partition(" (")
    assert_golden(told)
    assert "process_faults.py:" in place


def test_signal_to_all_processes_of_a_job_leaves_the_data_workers_to_the_training(
    corpus: Path, started: list[Forked]
) -> None:
    forked = start(corpus, started, options={"seconds": {"step": 0.05}}, data={"num_workers": 2})
    wait_for(forked, corpus, 3)
    workers = children(forked.pids[0])
    assert len(workers) >= 2
    for pid in (*workers, forked.pids[0]):
        os.kill(pid, signal.SIGTERM)
    forked.expect(75)
    assert [pid for pid in workers if is_alive(pid)] == []


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_closed_standard_output_does_not_stop_the_run(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, log={"every_steps": 1, "progress": "auto"})
    process = subprocess.Popen(
        command(recipe), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    with process.stderr:
        stderr = process.stderr.read()
    assert process.wait(60) == 0, stderr
    assert "Broken" not in stderr
    assert list(losses(corpus / "run")) == list(range(1, 13))


def test_second_run_in_a_folder_exits_with_2_at_once_naming_the_first_and_the_folder_is_free_after_its_kill(
    corpus: Path, started: list[Forked]
) -> None:
    first = start(corpus, started)
    wait_for(first, corpus)
    second = start(corpus, started)
    assert seconds_to_end(second) < 10
    assert second.exit_codes() == [2]
    holder = f"is in use by process {first.pids[0]} on {socket.gethostname()}, started "
    assert holder in second.stderr(0)
    first.kill(None, signal.SIGKILL)
    assert first.wait() == [-9]
    third = start(corpus, started, schedule={"max_steps": 2})
    third.expect(0)


def test_what_a_holder_on_another_host_left_does_not_keep_a_run_out(corpus: Path, started: list[Forked]) -> None:
    (corpus / "run").mkdir()
    claim(corpus / "run")
    holder = {"pid": 1, "host": "another-host", "started": "2020-01-01T00:00:00+00:00"}
    (corpus / "run" / ".lock.holder").write_text(json.dumps(holder))
    (corpus / "run" / ".lock").touch()
    forked = start(corpus, started, schedule={"max_steps": 2})
    forked.expect(0)


@pytest.fixture
def launched(corpus: Path) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """What a test has launched: ended after it with all its processes, whatever became of it."""
    launchers: list[subprocess.Popen[bytes]] = []
    yield launchers
    for launcher in launchers:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def launch(corpus: Path, launched: list["subprocess.Popen[bytes]"], until_step: int, **sections: Any) -> Path:
    """Start two processes under torchrun, and wait until a step is done; returns where their stderr goes."""
    recipe = write_recipe_file(corpus, task=TASK, **ENDLESS, **sections)
    path = corpus / "stderr"
    with path.open("wb") as stderr:
        words = command(recipe, processes=2)
        launched.append(subprocess.Popen(words, env=environment(), stderr=stderr, start_new_session=True))
    wait_for_step(corpus / "run", until_step, lambda: True, path.read_text)
    return path


@pytest.mark.faults
def test_signal_to_torchrun_stops_all_processes_in_time_at_one_step(
    corpus: Path, launched: list["subprocess.Popen[bytes]"]
) -> None:
    stderr = launch(corpus, launched, 1)
    begin = time.monotonic()
    launched[0].send_signal(signal.SIGTERM)
    assert launched[0].wait(60) != 0
    assert time.monotonic() - begin < 20
    line = next(line for line in stderr.read_text().splitlines() if line.startswith("preempted: asked"))
    assert_golden(re.sub(r"step \d+", "step #", line))
    assert_saved_at_the_stop(corpus / "run")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "within_seconds", "said"),
    [
        ("kill_at", 10, "error: rank 0: rank 1 (process "),
        ("raise_at", 10, "failed first: KeyError: 'a layer that is not there'"),
        ("spin_at", 15, "makes no progress; it had done step 3, and was in tasks/process_faults.py:"),
        ("sigstop_at", 15, "is stopped (SIGSTOP, or a debugger)"),
    ],
)
def test_under_torchrun_a_process_that_dies_or_hangs_is_named_and_the_launcher_ends_soon(
    corpus: Path, launched: list["subprocess.Popen[bytes]"], fault: str, within_seconds: float, said: str
) -> None:
    options = {fault: {"step": 4, "rank": 1}}
    stderr = launch(corpus, launched, 2, options=options, guard={"hang_timeout_seconds": 5})
    begin = time.monotonic()
    assert launched[0].wait(90) != 0
    assert said in stderr.read_text()
    assert time.monotonic() - begin < within_seconds


def test_signal_reaches_a_process_that_waits_for_the_others_to_join(corpus: Path) -> None:
    """It waits in torch's own code, where no handler of Python runs: for a process 0 that answers nothing."""
    recipe = write_recipe_file(corpus, task=TASK, **ENDLESS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(120)
        joining = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        process = subprocess.Popen(
            command(recipe),
            env=environment(**joining, MASTER_PORT=str(silent.getsockname()[1])),
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=20)
    assert process.returncode == 75
    assert_golden(next(line for line in said.splitlines() if line.startswith("preempted: ")))


def test_a_signal_in_collectives_that_belong_together_waits_for_their_end_while_a_run_is_prepared() -> None:
    done = []

    def prepare() -> None:
        with StopRequest() as stop, stop.preparing():
            with StopRequest.held():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("the whole of it")
            done.append("what comes next")

    with pytest.raises(Preempted):
        prepare()
    assert done == ["the whole of it"]
