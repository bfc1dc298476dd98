import errno
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import accel_train
from accel_train.core.json_io import read_json
from accel_train.observe import read_events, read_metrics, read_summary, run_folder
from accel_train.observe.run_folder import RunFolder, parse_line
from tests.support.runs import refused
from tests.support.wording import assert_golden, raises_golden

ANOTHER_USER = 65534  # nobody

HOLD_THE_FOLDER = r"""
import os, sys, time
from pathlib import Path
from accel_train.observe.run_folder import RunFolder

with RunFolder(Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork() == 0:
        os.setsid()
        os.write(1, b"%d\n" % os.getpid())
        time.sleep(60)
        os._exit(0)
    os.write(1, b"held\n")  # one write: the two processes share the pipe
    time.sleep(60)
"""


def start_python(code: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(accel_train.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_run_folder_and_its_parents_follow_the_umask(tmp_path: Path, mask: int, umask: Callable[[int], int]) -> None:
    umask(mask)
    with RunFolder(tmp_path / "runs" / "first") as folder:
        folder.append_metrics({"step": 1, "split": "train"})
        folder.append_event({"step": 1, "event": "skip"})
        folder.write_summary({"steps": 1})
        assert folder.lock.value is True
        assert mode_of(folder.path) == mode_of(folder.path.parent) == 0o777 & ~mask
        assert {mode_of(path) for path in folder.path.iterdir()} == {0o666 & ~mask}
        assert not list(folder.path.glob(".probe*"))


def test_numbers_json_lacks_are_written_as_strings_and_read_back_as_floats(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.append_metrics(
            {
                "step": 1,
                "split": "x",
                "loss": math.nan,
                "grad_norm": math.inf,
                "deep": [{"low": -math.inf}],
                "np": np.float32(0.5),
            }
        )
        folder.write_summary({"eval": {"loss": math.nan}})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["grad_norm"], line["deep"]) == ("NaN", "Infinity", [{"low": "-Infinity"}])
    [record] = read_metrics(tmp_path)
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["deep"], record["np"]) == (math.inf, [{"low": -math.inf}], 0.5)
    assert math.isnan(read_summary(tmp_path)["eval"]["loss"])


def test_floats_survive_the_ledger_to_the_last_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
    with RunFolder(tmp_path) as folder:
        for step, value in enumerate(values, start=1):
            folder.append_metrics({"step": step, "split": "train", "loss": value})
    assert [record["loss"].hex() for record in read_metrics(tmp_path)] == [value.hex() for value in values]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3}', b"\xe2\x82", b"\x00" * 100_000])
def test_a_line_torn_by_a_kill_is_not_read_and_cut_off_before_the_next_is_written(tmp_path: Path, torn: bytes) -> None:
    whole = b"".join(b'{"step": %d, "split": "train", "event": "skip"}\n' % step for step in (1, 2))
    RunFolder(tmp_path).open().close()
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_bytes(whole + torn)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    with RunFolder(tmp_path) as folder:
        folder.append_metrics({"step": 4, "split": "train"})
        folder.append_event({"step": 4, "event": "skip"})
    for read in (read_metrics, read_events):
        assert [record["step"] for record in read(tmp_path)] == [1, 2, 4]


def test_rewind_forgets_later_metrics_and_keeps_every_event(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        for step in range(1, 8):
            folder.append_metrics({"step": step, "split": "train", "loss": math.nan})
            folder.append_event({"step": step, "event": "skip"})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "spl')
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step": 8, "spl')
    with RunFolder(tmp_path) as folder:
        before = (tmp_path / "metrics.jsonl").read_bytes()
        folder.rewind(4)
        assert before.startswith((tmp_path / "metrics.jsonl").read_bytes())
        folder.append_metrics({"step": 5, "split": "train"})
        folder.append_event({"step": 5, "event": "skip"})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in read_events(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 5]
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_rewind_to_a_step_whose_evaluation_is_made_again_forgets_that_evaluation_alone(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        for step in (4, 5, 6):
            for split in ("train", "eval"):
                folder.append_metrics({"step": step, "split": split})
        folder.rewind(5, evaluated=False)
    kept = [(record["step"], record["split"]) for record in read_metrics(tmp_path)]
    assert kept == [(4, "train"), (4, "eval"), (5, "train")]


def test_rewind_far_back_parses_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    monkeypatch.setattr(run_folder, "parse_line", lambda *a: (parsed.append(a), parse_line(*a))[1])
    with RunFolder(tmp_path / "run") as folder:
        lines = [json.dumps({"step": n, "split": "train", "loss": 5.0}) for n in range(1, 40_001)]
        lines.insert(20_000, json.dumps({"step": 20_000, "split": "eval", "loss": 5.0}))
        (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        folder.rewind(20_000)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() == lines[:20_001]
    # Those of one block, and not the 20,000 that are removed.
    assert len(parsed) < 3_000


def test_rewind_begins_anew_where_the_files_were_moved_away(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics({"step": 1, "split": "train"})
        for name in ("metrics.jsonl", "events.jsonl"):
            (folder.path / name).rename(tmp_path / name)
        folder.rewind(0)
        folder.append_metrics({"step": 2, "split": "train"})
        folder.append_event({"step": 3, "event": "skip"})
        assert read_metrics(folder.path) == [{"step": 2, "split": "train"}]
        assert read_events(folder.path) == [{"step": 3, "event": "skip"}]


def test_a_full_disk_raises_and_leaves_whole_lines_only(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from accel_train.observe.run_folder import RunFolder

with RunFolder(Path(sys.argv[1])) as folder:
    folder.append_metrics({"step": 1, "split": "train", "text": "x" * 100})
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))  # the third line is written in part, then refused
    folder.append_metrics({"step": 2, "split": "train", "text": "x" * 100})
    try:
        folder.append_metrics({"step": 3, "split": "train", "text": "x" * 100})
    except OSError as error:
        print(type(error).__name__)
"""
    process = start_python(code, str(tmp_path))
    assert process.communicate()[0] == "OSError\n"
    content = (tmp_path / "metrics.jsonl").read_bytes()
    assert content.endswith(b"}\n")
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_second_process_is_refused_with_the_name_of_the_holder(tmp_path: Path) -> None:
    with start_python(HOLD_THE_FOLDER, str(tmp_path)) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        began = time.monotonic()
        named = refused(RunFolder(tmp_path).open, named=f" {holder.pid} ")
        assert_golden(re.sub(r"\d+ on \S+, started 20[^;]+", "PID on HOST, started TIME", str(named)))
        assert time.monotonic() - began < 2
        holder.kill()
        holder.wait()
    with RunFolder(tmp_path) as folder:  # freed by the kill, and no stale name is left behind
        assert read_json(tmp_path / ".lock.holder")["pid"] == os.getpid()
        refused(RunFolder(tmp_path).open, named=f" {os.getpid()} ")
        assert folder.lock.value
    assert not (tmp_path / ".lock.holder").exists()
    RunFolder(tmp_path).open().close()  # and let go in good order, it can be taken again


LEAVE_A_CHILD_WITH_THE_LOCK = """
import fcntl, json, os, socket, subprocess, sys
from pathlib import Path
from accel_train.core.ownership import claim
from tests.support.runs import refused
folder = sys.argv[1]
claim(Path(folder))
lock = os.open(f"{folder}/.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
json.dump({"pid": os.getpid(), "host": socket.gethostname(), "started": "2026"}, open(f"{folder}/.lock.holder", "w"))
subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[lock], stdout=subprocess.DEVNULL)
"""


def test_the_folder_of_a_dead_run_is_waited_for_while_a_child_of_it_still_ends(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVE_A_CHILD_WITH_THE_LOCK, str(tmp_path), "1"], check=True)
    with RunFolder(tmp_path) as folder:
        assert folder.lock.value


def test_a_forked_worker_that_outlives_a_killed_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    with start_python(HOLD_THE_FOLDER, str(tmp_path), "fork") as holder:
        assert holder.stdout is not None
        worker = next(int(line) for line in iter(holder.stdout.readline, "") if line.strip().isdigit())
        try:
            holder.kill()
            holder.wait()
            with RunFolder(tmp_path) as folder:
                assert folder.lock.value
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_said_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flock(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")  # ENOSYS, as Lustre mounted without flock answers

    monkeypatch.setattr("fcntl.flock", no_flock)
    with RunFolder(tmp_path) as folder:
        assert folder.lock.value is False
        assert_golden(folder.lock.reason)
        folder.append_metrics({"step": 1, "split": "train"})
    assert read_metrics(tmp_path) == [{"step": 1, "split": "train"}]


def test_a_path_that_cannot_be_a_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_golden():
        RunFolder(tmp_path / "file").open()
    for path, reason in ((tmp_path / "file" / "below", errno.ENOTDIR), (Path("/proc/run"), errno.ENOENT)):
        refused(RunFolder(path).open, named=f"output_dir={path} |{os.strerror(reason)}")


def test_a_read_only_folder_is_named() -> None:
    # Not below tmp_path, which only its owner can enter: root may write everywhere, so for root another user tries it.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        owner = os.geteuid()
        os.seteuid(ANOTHER_USER if owner == 0 else owner)
        try:
            assert list(folder.iterdir()) == [], "it can be read"
            refused(RunFolder(folder).open, named=f"output_dir={folder} |{os.strerror(errno.EACCES)}")
        finally:
            os.seteuid(owner)
            folder.chmod(0o700)


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOSPC, "no space left")

    def full(_: object) -> None:
        raise error

    with RunFolder(tmp_path) as folder:
        folder.write_summary({"steps": 1})
        monkeypatch.setattr("accel_train.core.files.sync", full)
        with pytest.raises(OSError) as caught:  # noqa: PT011 (it is compared below)
            folder.write_summary({"steps": 2})
        assert caught.value is error
        assert read_summary(tmp_path) == {"steps": 1}
